"""Plain decoding, one token a forward pass: the baseline of every speed-up."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.decoding.rows import Row, append
from specjax.models.cache import KVCache, write_rows
from specjax.models.transformer import causal_mask
from specjax.noise import Noise
from specjax.sampling import Sampling, argmax, log_probs, sample
from specjax.types import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlainState:
    """Carry of the loop, with the batch axis in front of rows and cache; `step` is `[]` int32."""

    rows: Row
    cache: KVCache
    step: jax.Array


def choose(
    logits: jax.Array, position: jax.Array, sampling: Sampling | None, key: jax.Array | None
) -> jax.Array:
    """The token at `position` from its logits `[V]`: the argmax, or a draw with token noise."""
    if sampling is None:
        return argmax(logits)
    gumbel = Noise(key, position - 1).token_gumbel(position, logits.shape[-1])
    return sample(log_probs(logits, sampling), gumbel)


@functools.partial(jax.jit, static_argnames=("graphdef",), donate_argnames=("state",))
def plain_loop(
    graphdef: Any,
    params: PyTree,
    state: PlainState,
    sampling: Sampling | None,
    keys: jax.Array | None,
    stop_tokens: jax.Array,
    until: jax.Array,
) -> PlainState:
    """Decodes until every row has ended or `step` reaches `until`. `state` is donated.

    `sampling` and the request `keys` have the batch axis; both are None in the greedy mode.
    """
    model = nnx.merge(graphdef, params)

    def one(
        row: Row, cache: KVCache, sampling: Sampling | None, key: jax.Array | None
    ) -> tuple[Row, KVCache]:
        position = row.length - 1
        out = model(row.anchor[None], position[None], cache, position, causal_mask(1))
        logits = model.head(out.hidden)
        # Through `finite` the write depends on what was read; see `write_rows`.
        finite = jnp.isfinite(logits.max())
        token = choose(logits[0], row.length, sampling, key)[None]
        row, committed = append(row, token, finite.astype(int), finite, stop_tokens)
        return row, write_rows(cache, out.rows, position, committed)

    def body(state: PlainState) -> PlainState:
        rows, cache = jax.vmap(one)(state.rows, state.cache, sampling, keys)
        return PlainState(rows, cache, state.step + 1)

    def unfinished(state: PlainState) -> jax.Array:
        return state.rows.running.any() & (state.step < until)

    return jax.lax.while_loop(unfinished, body, state)
