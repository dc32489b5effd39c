"""The answer in colour: which tokens were drafted and accepted, which the target had to correct."""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a new token stands in the cycles of its row.

    Attributes:
      origin: where it came from.
      cycle: which, from 1.
      draft: its position in the cycle's draft, from 1; the target's own token is one behind those
        that were accepted.
      accepted, drafted: of the cycle, as `specjax.metrics` defines them.
      confidence: of the draft at this position, the token itself or the one it corrects; None where
        there was no draft, or the drafter tells none.
    """

    origin: Origin
    cycle: int
    draft: int
    accepted: int
    drafted: int
    confidence: float | None


def places(result: DecodeResult, row: int = 0) -> list[Place]:
    """The place of each new token of a row."""
    told = []
    columns = result.accepted[row], result.drafted[row], result.committed[row]
    cycles = zip(*(column.tolist() for column in columns), result.confidence[row], strict=True)
    for cycle, (accepted, drafted, committed, confidence) in enumerate(cycles, start=1):
        for draft in range(1, committed + 1):
            if draft <= accepted:
                origin = Origin.ACCEPTED
            elif not drafted:
                origin = Origin.UNDRAFTED
            else:
                origin = Origin.BONUS if accepted == drafted else Origin.CORRECTED
            known = draft <= min(drafted, len(confidence))
            sure = float(confidence[draft - 1]) if known else None
            told.append(Place(origin, cycle, draft, accepted, drafted, sure))
    return told


def origins(result: DecodeResult, row: int = 0) -> list[Origin]:
    """The origin of each new token of a row."""
    return [place.origin for place in places(result, row)]


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
