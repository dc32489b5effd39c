"""Prompt files: a JSON object a line, `{"turns": ["first user turn", …]}` or `{"prompt": "…"}`."""

from __future__ import annotations

import json
import pathlib


def read_prompts(path: str | pathlib.Path, limit: int | None = None) -> list[str]:
    """The first turn of every line; arguments and errors as in `read_conversations`."""
    return [turns[0] for turns in read_conversations(path, limit)]


def read_conversations(path: str | pathlib.Path, limit: int | None = None) -> list[list[str]]:
    """The user's turns of every line.

    Args:
      path: of the file.
      limit: read no more than this many prompts.

    Raises:
      OSError: the file cannot be read.
      ValueError: a line is no such object (its number is in the message), or there is none.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from None
    prompts: list[list[str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) >= limit:
            break
        try:
            record = json.loads(line)
            turns = [record["prompt"]] if "prompt" in record else record["turns"]
        except (json.JSONDecodeError, KeyError, TypeError):
            turns = None
        texts = isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)
        if not texts or not turns or not all(turn.strip() for turn in turns):
            raise ValueError(
                f'{path}, line {number}: expected {{"turns": ["text", …]}} or {{"prompt": "text"}}, '
                f"got {line[:60]!r}"
            )
        prompts.append(turns)
    if not prompts:
        raise ValueError(f"{path}: no prompts in it")
    return prompts
