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

from specjax.checkpoints import convert, download, huggingface
from specjax.models import tokenizer as tokenizers
from specjax.models.config import ModelConfig
from specjax.models.target import Target

# Part of an entry's name: raise it when `convert` or the tokenizer builder changes.
FORMAT = 3


def entry_of(path: pathlib.Path, dtype: jnp.dtype) -> pathlib.Path:
    """The cache entry of a file in its present state."""
    stat = path.stat()
    state = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
    identity = (str(path.resolve()), state, dtype.name, FORMAT)
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return download.cache_dir() / "converted" / f"{path.stem}-{key}"


def write(entry: pathlib.Path, target: Target) -> None:
    """Keeps a target; where that is not possible, says so in the log.

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
    except (OSError, SafetensorError) as error:
        if not entry.is_dir():  # else another process was faster, with the same content
            logging.getLogger(__name__).warning("the converted weights are not kept: %s", error)


def read(entry: pathlib.Path, name: str) -> Target | None:
    """The target that an entry keeps; None, and no entry any more, where it is absent or damaged."""
    if not entry.exists():
        return None
    try:
        described = huggingface.read_json(entry / "target.json")
        fields = described["config"]
        listed = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        flat = {
            tuple(int(key) if key.isdigit() else key for key in path.split("/")): array
            for path, array in load_file(entry / "params.safetensors").items()
        }
        target = Target(
            name,
            ModelConfig(**fields | listed),
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
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return None
