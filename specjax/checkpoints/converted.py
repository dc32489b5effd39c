"""Converted weights, kept: reading and dequantising a GGUF file is most of a start.

A safetensors folder loads about as fast as its converted copy would, and is not copied.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import pathlib
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from specjax.checkpoints import convert, download, huggingface, memory
from specjax.models import tokenizer as tokenizers
from specjax.models.config import ModelConfig
from specjax.models.target import Target

# Part of an entry's name: raise it when `convert` or the tokenizer builder changes.
FORMAT = 3


def entry_of(path: pathlib.Path, dtype: jnp.dtype) -> pathlib.Path:
    """The cache entry of a file in its present state: `stem-KEY-STATE`.

    KEY stands for the path and the type, STATE for the file's content and `FORMAT`.
    """
    stat = path.stat()
    state = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
    parts = (str(path.resolve()), dtype.name), (state, FORMAT)
    key, state = (hashlib.sha256(repr(part).encode()).hexdigest()[:16] for part in parts)
    return download.cache_dir() / "converted" / f"{path.stem}-{key}-{state}"


def write(entry: pathlib.Path, target: Target) -> None:
    """Keeps a target instead of the file's earlier states; if it cannot, says so in the log.

    Written aside and renamed: a process that dies half-way leaves no entry.
    """
    leaves = jax.tree_util.tree_leaves_with_path(target.params)
    flat = {"/".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in leaves}
    described = {"config": dataclasses.asdict(target.config), "stop_tokens": target.stop_tokens}
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=entry.parent, ignore_cleanup_errors=True) as folder:
            partial = pathlib.Path(folder) / "entry"
            partial.mkdir()
            save_file(flat, partial / "params.safetensors")
            (partial / "target.json").write_text(json.dumps(described), encoding="utf-8")
            target.tokenizer.save_pretrained(partial / "tokenizer")
            partial.rename(entry)
        key, _ = entry.name.rsplit("-", 1)
        for other in entry.parent.iterdir():
            if other.name.rsplit("-", 1)[0] == key and other != entry:
                # A process that is reading it keeps what it has open, or makes it anew.
                shutil.rmtree(other, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        if not entry.is_dir():  # else another process was faster, with the same content
            logging.getLogger(__name__).warning("the converted weights are not kept: %s", error)


def read(entry: pathlib.Path, name: str, dtype: jnp.dtype) -> Target | None:
    """The target that an entry keeps; None, and no entry any more, where it is absent or damaged."""
    if not entry.exists():
        return None
    try:
        described = huggingface.read_json(entry / "target.json")
        fields = described["config"]
        listed = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        config = ModelConfig(**fields | listed)
        memory.tell(name, config, dtype)
        flat = {
            tuple(int(key) if key.isdigit() else key for key in path.split("/")): array
            for path, array in load_file(entry / "params.safetensors").items()
        }
        target = Target(
            name,
            config,
            jax.tree.map(jnp.asarray, convert.nest(flat)),
            tokenizer=tokenizers.tokenizer_from_folder(entry / "tokenizer"),
            stop_tokens=tuple(described["stop_tokens"]),
        )
        nnx.merge(target.graphdef, target.params)  # all parameters are there
        if target.tokenizer is None:
            raise ValueError("no tokenizer")
        return target
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        log = logging.getLogger(__name__)
        log.warning("the converted weights %s are damaged and made anew: %s", entry, error)
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)  # another process may have removed it just now
        return None
