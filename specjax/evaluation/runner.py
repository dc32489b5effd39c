"""Decodes the same prompts plainly and with every drafter, alternating, and pools what it counts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax.decoding.decode import decode
from specjax.evaluation.identity import identical
from specjax.models.target import Target
from specjax.types import DecodeResult, Drafter, LoadedDrafter, Progress, StopReason


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One drafter on one set of prompts, each prompt decoded by itself.

    Attributes:
      plain, speculative: one result a prompt; of the plain ones all drafters share the same.
      identical: answers of `specjax.evaluation.identity`, one a prompt; empty above temperature 0.
    """

    plain: list[DecodeResult]
    speculative: list[DecodeResult]
    identical: list[str]

    @functools.cached_property
    def _plain(self) -> DecodeResult:
        return DecodeResult.pooled(self.plain)

    @functools.cached_property
    def _speculative(self) -> DecodeResult:
        return DecodeResult.pooled(self.speculative)

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        return self._speculative.num_draft_tokens

    @property
    def tau(self) -> float:
        """τ, pooled over all cycles of all prompts."""
        return self._speculative.tau

    @property
    def survival(self) -> np.ndarray:
        """J_1…J_K, pooled."""
        return self._speculative.survival

    @property
    def alpha(self) -> np.ndarray:
        """α_1…α_K, pooled."""
        return self._speculative.alpha

    @property
    def plain_tokens_per_second(self) -> float:
        """All tokens over all seconds of plain decoding, prefill left out."""
        return self._plain.tokens_per_second

    @property
    def speculative_tokens_per_second(self) -> float:
        """All tokens over all seconds of speculative decoding, prefill left out."""
        return self._speculative.tokens_per_second

    @property
    def speedup(self) -> float:
        """Speculative over plain tokens per second."""
        return self.speculative_tokens_per_second / self.plain_tokens_per_second


def evaluate(
    target: Target,
    drafters: Mapping[str, Drafter | LoadedDrafter],
    prompts: Sequence[Any],
    *,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Evaluation]:
    """Decodes every prompt plainly and with every drafter, one after the other.

    Each program runs once before it is timed. All prompts share one `max_len`, so that each is
    compiled once.

    Args:
      target: from `specjax.load_target`.
      drafters: by name.
      prompts: as `specjax.decode` takes one.
      progress: called with (what, prompts done, prompts in all).
      options: further arguments of `specjax.decode`; `max_len` should hold the longest prompt.
    """
    greedy = not np.any(options.get("temperature", 0.0))
    key = options.get("key")
    runs: dict[str, list[DecodeResult]] = {name: [] for name in drafters}
    plain: list[DecodeResult] = []
    for drafter in (None, *drafters.values()):
        decode(target, drafter, prompts[0], **options)
    for done, prompt in enumerate(prompts):
        if progress:
            progress("evaluating", done, len(prompts))
        if not greedy:  # each prompt its own coins, as in one batch
            options = options | {"key": jax.random.fold_in(key, done)}
        plain.append(decode(target, None, prompt, **options))
        if StopReason.NAN in plain[-1].stop_reason:
            raise FloatingPointError(f"prompt {done}: the target's output is not finite")
        for name, drafter in drafters.items():
            runs[name].append(decode(target, drafter, prompt, **options))
    if progress:
        progress("evaluating", len(prompts), len(prompts))
    return {
        name: Evaluation(
            plain,
            taken,
            [identical(target, *pair) for pair in zip(plain, taken, strict=True)] if greedy else [],
        )
        for name, taken in runs.items()
    }
