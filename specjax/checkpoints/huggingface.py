"""Hugging Face folders: `config.json`, and safetensors in one file or in shards with an index."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax.checkpoints.convert import Tensor

FLOATS = ("F64", "F32", "F16", "BF16")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      ValueError: the file does not hold one.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def folder_tensors(folder: pathlib.Path, *, other_types: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors of a folder, by name, unread.

    Args:
      folder: with safetensors.
      other_types: what may be stored beside floats, as safetensors names it (`I64`, `BOOL`).

    Raises:
      FileNotFoundError: no safetensors, or a shard that the index names is missing.
      ValueError: a file is truncated or damaged.
    """
    if (folder / INDEX).exists():
        names = read_json(folder / INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(x, str) for x in names.values()):
            raise ValueError(f"{folder / INDEX}: weight_map must map tensor names to file names")
        files = sorted(set(names.values()))
    else:
        files = [SINGLE]
    missing = [name for name in files if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"{folder}: {', '.join(missing)} not found; weights are read from {SINGLE}, "
            f"or from the shards that {INDEX} names"
        )
    tensors = {}
    for file in files:
        tensors |= _file_tensors(folder / file, FLOATS + other_types)
    return tensors


def _file_tensors(path: pathlib.Path, types: tuple[str, ...]) -> dict[str, Tensor]:
    def read(name: str) -> np.ndarray:
        with safe_open(path, "numpy") as file:
            return file.get_tensor(name)

    try:
        with safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            for name, stored in slices.items():
                kind = stored.get_dtype()
                if kind not in types:
                    raise ValueError(
                        f"{path}: {name} is stored as {kind}; read are {', '.join(types)}"
                    )
            return {
                name: Tensor(tuple(stored.get_shape()), functools.partial(read, name))
                for name, stored in slices.items()
            }
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated or damaged safetensors file: {error}") from None


def write_folder(
    folder: pathlib.Path, config: Mapping[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    """Writes `config.json` and one safetensors file; the folder is made if absent."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def stop_tokens(folder: pathlib.Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end a row: `eos_token_id` of generation_config.json, else of config.json."""
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    if eos is None:
        eos = config.get("eos_token_id")
    if eos is None:
        return ()
    ids = tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(type(index) is int and 0 <= index < config["vocab_size"] for index in ids):
        raise ValueError(
            f"{folder}: eos_token_id must be a token id or a list of them, got {eos!r}"
        )
    return ids
