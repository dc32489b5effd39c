"""Plain against speculative decoding of the same prompts, timed alternately."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.decoding.decode import Prompt, decode
from specjax.evaluation.identity import identical
from specjax.models.target import Target
from specjax.types import DecodeResult, Drafter, LoadedDrafter, Progress


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Both decodings of a batch.

    Attributes:
      plain, speculative: the last of the timed runs.
      plain_tokens_per_second, speculative_tokens_per_second: medians of the timed runs; prefill is
        not part of either.
      identical: what `specjax.evaluation.identity.identical` says of them; None above temperature 0,
        where only their laws are the same.
    """

    plain: DecodeResult
    speculative: DecodeResult
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    identical: str | None

    @property
    def speedup(self) -> float:
        """Speculative over plain tokens per second."""
        return self.speculative_tokens_per_second / self.plain_tokens_per_second


def compare(
    target: Target,
    drafter: Drafter | LoadedDrafter,
    prompts: Prompt | Sequence[Prompt],
    *,
    repeats: int = 3,
    progress: Progress | None = None,
    **options: Any,
) -> Comparison:
    """Decodes with and without the drafter, alternating, so that a drifting machine hits both.

    Args:
      target, drafter, prompts: as `specjax.decode` takes them.
      repeats: timed runs of each, after one that compiles.
      progress: as `specjax.decode` takes it; told of the runs that compile, the timed ones are left
        alone.
      options: further arguments of `specjax.decode`.
    """
    plain, speculative = [], []
    for repeat in range(repeats + 1):
        watched = progress if repeat == 0 else None
        plain.append(decode(target, None, prompts, progress=watched, **options))
        speculative.append(decode(target, drafter, prompts, progress=watched, **options))

    def speed(runs: list[DecodeResult]) -> float:
        return statistics.median(run.tokens_per_second for run in runs[1:])

    greedy = not np.any(options.get("temperature", 0))
    return Comparison(
        plain[-1],
        speculative[-1],
        speed(plain),
        speed(speculative),
        identical(target, plain[-1], speculative[-1]) if greedy else None,
    )
