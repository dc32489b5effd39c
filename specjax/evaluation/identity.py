"""Whether two decodings gave the same text: `yes`, `near-tie` or `no`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models.cache import KVCache
from specjax.models.target import Target
from specjax.models.transformer import causal_mask
from specjax.types import DecodeResult, PyTree

YES, NEAR_TIE, NO = "yes", "near-tie", "no"


def identical(target: Target, plain: DecodeResult, speculative: DecodeResult) -> str:
    """Compares two decodings of the same prompts; the worst row's answer.

    `near-tie`: the first difference is a choice between logits that rounding cannot tell apart.
    """
    rows = zip(plain.prompts, plain.tokens, speculative.tokens, strict=True)
    return worst([_row_identical(target, *row) for row in rows])


def worst(answers: Sequence[str]) -> str:
    """The worst of several answers of `identical`: one `no` makes the whole `no`."""
    return max(answers, key=(YES, NEAR_TIE, NO).index)


def _row_identical(
    target: Target, prompt: np.ndarray, plain: np.ndarray, speculative: np.ndarray
) -> str:
    one, other = plain, speculative
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

    The logits are computed twice, in one pass over the whole context and in one step on its rows.
    Their largest difference over the vocabulary is what rounding does here, on this machine and in
    this type. One sample of it can be too small (even 0) or, if one of the two paths is broken, far
    too large: it is held between 1 and 32 units in the last place of the largest logit. The two
    tokens are near-tied where both are within twice that of the largest logit.
    """
    size = 1 << (len(context) - 1).bit_length()
    padded = np.zeros(size, np.int32)
    padded[: len(context)] = context
    whole, step = _last_logits(
        target.graphdef, target.params, jnp.asarray(padded), jnp.int32(len(context))
    )
    unit = jnp.finfo(target.dtype).eps * jnp.abs(step).max()
    rounding = jnp.clip(jnp.abs(whole - step).max(), unit, 32 * unit)
    return bool(step.max() - step[jnp.asarray(tokens)].min() <= 2 * rounding)


@functools.partial(jax.jit, static_argnames=("graphdef",))
def _last_logits(
    graphdef: Any, params: PyTree, tokens: jax.Array, length: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Logits `[V]` after `tokens[:length]`, by one pass over all of them and by one step."""
    model = nnx.merge(graphdef, params)
    (size,) = tokens.shape
    last = length - 1
    empty = KVCache.zeros(model.config, 1, model.embedding.dtype)
    whole = model(tokens, jnp.arange(size), empty, jnp.int32(0), causal_mask(size))
    step = model(tokens[last][None], last[None], whole.rows, last, causal_mask(1))
    return model.head(whole.hidden[last][None])[0], model.head(step.hidden)[0]
