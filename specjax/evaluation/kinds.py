"""Acceptance by kind of token: which parts of a text a drafter finds easy."""

from __future__ import annotations

import enum
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax.evaluation.transcript import Origin, origins
from specjax.types import DecodeResult


class Kind(enum.StrEnum):
    """What a token is, by the first character of its text that is no space."""

    WORD = "word start"  # a letter, behind a space or behind no letter or digit
    CONTINUATION = "word continuation"  # a letter, right behind a letter or a digit
    DIGIT = "digit"
    PUNCTUATION = "punctuation"  # symbols too
    SPACE = "white space"  # nothing but that
    OTHER = "other"  # control tokens, and bytes of a character that took several tokens


class Acceptance(NamedTuple):
    """Counts of one kind of token.

    Attributes:
      accepted: drafts that were accepted.
      tried: drafts that were decided about, at places whose committed token is of the kind.
      committed: all tokens; those of cycles without a draft, and after a whole one, were not tried.
    """

    accepted: int
    tried: int
    committed: int

    @property
    def rate(self) -> float:
        """Accepted over tried; NaN where none was."""
        return self.accepted / self.tried if self.tried else float("nan")


def kind_of(text: str, before: str = "") -> Kind:
    """The kind of a token that is no control token.

    Args:
      text: its own, as it stands inside of a text; bytes that are no character are U+FFFD.
      before: that of the token before it.
    """
    if text.isspace():
        return Kind.SPACE
    first = text.lstrip()[:1]
    match _category(first) if "\ufffd" not in text else "":
        case "L" | "M":
            inside = first == text[0] and _category(before[-1:]) in ("L", "M", "N")
            return Kind.CONTINUATION if inside else Kind.WORD
        case "N":
            return Kind.DIGIT
        case "P" | "S":
            return Kind.PUNCTUATION
    return Kind.OTHER


def kinds(result: DecodeResult) -> list[list[Kind]]:
    """The kind of each new token of each row.

    Raises:
      ValueError: the target has no tokenizer.
    """
    tokenizer = result.tokenizer
    if tokenizer is None:
        raise ValueError("kinds of tokens need a tokenizer; this target has none")
    added = tokenizer.added_tokens_decoder.items()
    control = {index for index, token in added if token.special}
    texts: dict[int, str] = {}

    def text(token: int) -> str:
        if token not in texts:  # after itself: some tokenizers drop the space that begins a text
            once, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
            texts[token] = twice[len(once) :]
        return texts[token]

    told = []
    for prompt, tokens in zip(result.prompts, result.tokens, strict=True):
        ids = [*prompt[-1:].tolist(), *tokens.tolist()]
        told.append(
            [
                Kind.OTHER if token in control else kind_of(text(token), text(before))
                for before, token in zip(ids, ids[1:], strict=False)
            ]
        )
    return told


def acceptance(results: Sequence[DecodeResult]) -> dict[Kind, Acceptance]:
    """Counts of every kind of token, pooled over results of one target.

    Every draft that was tried stands where one token was committed: the draft itself, or the
    target's own that corrects it. That token's kind is the draft's.

    Raises:
      ValueError: the target has no tokenizer.
    """
    pooled = DecodeResult.pooled(results)
    counts = {kind: [0, 0, 0] for kind in Kind}
    for row, row_kinds in enumerate(kinds(pooled)):
        for kind, origin in zip(row_kinds, origins(pooled, row), strict=True):
            accepted = origin is Origin.ACCEPTED
            tried = accepted or origin is Origin.CORRECTED
            for number, counted in enumerate((accepted, tried, True)):
                counts[kind][number] += counted
    return {kind: Acceptance(*count) for kind, count in counts.items()}


def figures(counts: Mapping[Kind, Acceptance]) -> dict[str, dict[str, Any]]:
    """What `acceptance` counted, as JSON has it: a rate that is not known is None."""
    return {
        str(kind): {**one._asdict(), "rate": one.rate if one.tried else None}
        for kind, one in counts.items()
    }


def _category(character: str) -> str:
    """The first letter of a character's Unicode category; "" of none."""
    return unicodedata.category(character)[0] if character else ""
