"""The answer in colour: which tokens were drafted and accepted, which the target had to correct."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from specjax.models.tokenizer import token_texts
from specjax.types import DecodeResult

if TYPE_CHECKING:
    from rich.text import Text


class Origin(enum.Enum):
    """Where a token came from, and its style in the transcript."""

    ACCEPTED = "green"  # drafted, and kept by the rule
    CORRECTED = "bold red"  # the target's, in place of a rejected draft
    BONUS = "bold blue"  # the target's, after a draft that was accepted whole
    UNDRAFTED = "default"  # the target's, in a cycle without a draft


def origins(result: DecodeResult, row: int = 0) -> list[Origin]:
    """The origin of each new token of a row."""
    told = []
    counts = result.accepted[row], result.drafted[row], result.committed[row]
    for accepted, drafted, committed in zip(*counts, strict=True):
        told += [Origin.ACCEPTED] * int(accepted)
        if committed > accepted:
            if not drafted:
                told.append(Origin.UNDRAFTED)
            else:
                told.append(Origin.BONUS if accepted == drafted else Origin.CORRECTED)
    return told


def transcript(result: DecodeResult, row: int = 0) -> Text:
    """A row's new tokens as coloured text: accepted, corrected and bonus tokens in three colours.

    Args:
      result: from `specjax.decode`.
      row: which prompt.

    Returns:
      A `rich.text.Text`: print it with `rich.print`, or let a notebook show it.

    Raises:
      ValueError: the target has no tokenizer.
    """
    from rich.text import Text

    if result.tokenizer is None:
        raise ValueError("a transcript needs a tokenizer; this target has none")
    text = Text()
    pieces = token_texts(result.tokenizer, result.tokens[row])
    for piece, origin in zip(pieces, origins(result, row), strict=True):
        text.append(piece, origin.value)
    return text


def legend() -> Text:
    """What the colours mean, in one line."""
    from rich.text import Text

    text = Text()
    for origin in Origin:
        text.append(origin.name.lower(), origin.value).append("  ")
    return text
