"""What the folder of a trained drafter says of itself, beside its weights."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from specjax.checkpoints import huggingface
from specjax.models.target import Target, target_hash
from specjax.models.tokenizer import fingerprint

FILE = "specjax.json"


def write(folder: pathlib.Path, drafter: str, target: Target) -> None:
    """Says which drafter it is, and what it was trained for."""
    told = {"drafter": drafter, "target": target.name, "target_hash": target_hash(target)}
    if target.tokenizer is not None:
        told |= fingerprint(target.tokenizer)
    (folder / FILE).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def carry_over(source: pathlib.Path, folder: pathlib.Path) -> None:
    """Says of a drafter that was made from another what that one's folder says, and no more."""
    told = {"drafter": name_of(folder)} | read(source)
    (folder / FILE).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def read(folder: pathlib.Path) -> dict[str, Any]:
    """What `write` said; nothing where there is no such file."""
    path = folder / FILE
    return huggingface.read_json(path) if path.exists() else {}


def name_of(folder: pathlib.Path) -> str | None:
    """The drafter's name in the registry; None where the folder does not say."""
    return read(folder).get("drafter")


def check_fit(folder: pathlib.Path, target: Target, *facts: tuple[str, Any, Any]) -> None:
    """Raises ValueError for the first (what, what the drafter has, what it must be) that differs."""
    for what, drafter_has, wanted in facts:
        if drafter_has != wanted:
            raise ValueError(
                f"{folder} does not fit {target.name}: it has {what} {drafter_has}, not {wanted}"
            )


def check_target(folder: pathlib.Path, target: Target) -> None:
    """Raises ValueError where a drafter of features was trained on those of another target."""
    told = read(folder)
    if told.get("target_hash") not in (None, target_hash(target)):
        raise ValueError(
            f"{folder} was trained for {told.get('target')}, and {target.name} has other weights; if "
            f"it is the same model in other numbers, take target_hash out of {folder / FILE}"
        )
