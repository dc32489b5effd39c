"""Plain against speculative decoding: speed, and whether the text is the same."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.decoding.decode import Progress, Prompt, decode
from specjax.models.cache import KVCache, write_rows
from specjax.models.target import Target
from specjax.models.transformer import causal_mask
from specjax.types import DecodeResult, Drafter, PyTree

YES, NEAR_TIE, NO = "yes", "near-tie", "no"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Both decodings of a batch.

    Attributes:
      plain, speculative: the last of the timed runs.
      plain_tokens_per_second, speculative_tokens_per_second: medians of the timed runs; prefill is
        not part of either.
      identical: `yes`, `near-tie` (the first difference is a choice between logits that rounding
        cannot tell apart) or `no`; the worst of the rows.
    """

    plain: DecodeResult
    speculative: DecodeResult
    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    identical: str

    @property
    def speedup(self) -> float:
        """Speculative over plain tokens per second."""
        return self.speculative_tokens_per_second / self.plain_tokens_per_second


def compare(
    target: Target,
    drafter: Drafter,
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
    runs: tuple[list[DecodeResult], list[DecodeResult]] = ([], [])
    for repeat in range(repeats + 1):
        for taken, by in zip(runs, (None, drafter), strict=True):
            watched = progress if repeat == 0 else None
            taken.append(decode(target, by, prompts, progress=watched, **options))
    plain, speculative = runs
    medians = [statistics.median(run.tokens_per_second for run in taken[1:]) for taken in runs]
    return Comparison(
        plain[-1], speculative[-1], *medians, identical(target, plain[-1], speculative[-1])
    )


def identical(target: Target, plain: DecodeResult, speculative: DecodeResult) -> str:
    """Whether two decodings of the same prompts gave the same tokens: the worst row's answer."""
    rows = zip(plain.prompts, plain.tokens, speculative.tokens, strict=True)
    return worst([_row_identical(target, *row) for row in rows])


def worst(answers: Sequence[str]) -> str:
    """The worst of several answers of `identical`: one `no` makes the whole `no`."""
    return max(answers, key=(YES, NEAR_TIE, NO).index)


def _row_identical(target: Target, prompt: np.ndarray, one: np.ndarray, other: np.ndarray) -> str:
    if np.array_equal(one, other):
        return YES
    shared = min(len(one), len(other))
    (differs,) = np.nonzero(one[:shared] != other[:shared])
    if not differs.size:
        return NO  # one stopped where the other went on
    at = differs[0]
    context = np.concatenate([prompt, one[:at]])
    return NEAR_TIE if near_tie(target, context, (one[at], other[at])) else NO


def near_tie(target: Target, context: np.ndarray, tokens: tuple[int, int]) -> bool:
    """Whether rounding can swap two choices after a context.

    The logits are computed twice, in one pass over the whole context and in one step on its cache.
    Their largest difference over the vocabulary is what rounding does here, on this machine and in
    this type. The two tokens are near-tied where both are within twice that of the largest logit.
    """
    size = 1 << (len(context) - 1).bit_length()
    padded = np.zeros(size, np.int32)
    padded[: len(context)] = context
    whole, step = _last_logits(
        target.graphdef, target.params, jnp.asarray(padded), jnp.int32(len(context))
    )
    rounding = jnp.abs(whole - step).max()
    return bool(step.max() - step[jnp.asarray(tokens)].min() <= 2 * rounding)


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _last_logits(
    graphdef: Any, params: PyTree, tokens: jax.Array, length: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Logits `[V]` after `tokens[:length]`, by one pass over all of them and by one step."""
    model = nnx.merge(graphdef, params)
    (size,) = tokens.shape
    last = length - 1
    cache = KVCache.zeros(model.config, size, model.embedding.dtype)
    out = model(tokens, jnp.arange(size), cache, jnp.int32(0), causal_mask(size))
    cache = write_rows(cache, out.rows, jnp.int32(0), last)
    step = model(tokens[last][None], last[None], cache, last, causal_mask(1))
    return model.head(out.hidden[last][None])[0], model.head(step.hidden)[0]
