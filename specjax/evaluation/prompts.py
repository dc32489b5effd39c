"""Prompt files: one JSON object a line, `{"turns": ["first user turn", …]}`."""

from __future__ import annotations

import json
import pathlib


def read_prompts(path: str | pathlib.Path, limit: int | None = None) -> list[str]:
    """The first turn of every line.

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
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) >= limit:
            break
        try:
            turns = json.loads(line)["turns"]
            first = turns[0]
        except (json.JSONDecodeError, KeyError, TypeError, IndexError):
            first = None
        if not isinstance(first, str) or not isinstance(turns, list) or not first.strip():
            raise ValueError(
                f'{path}, line {number}: expected {{"turns": ["text", …]}}, got {line[:60]!r}'
            )
        prompts.append(first)
    if not prompts:
        raise ValueError(f"{path}: no prompts in it")
    return prompts
