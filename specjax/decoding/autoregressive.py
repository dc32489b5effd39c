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
from specjax.sampling import argmax
from specjax.types import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlainState:
    """Carry of the loop, with the batch axis in front of rows and cache; `step` is `[]` int32."""

    rows: Row
    cache: KVCache
    step: jax.Array


@functools.partial(jax.jit, static_argnames=("graphdef",), donate_argnames=("state",))
def plain_loop(
    graphdef: Any, params: PyTree, state: PlainState, stop_tokens: jax.Array, until: jax.Array
) -> PlainState:
    """Decodes greedily until every row has ended or `step` reaches `until`. `state` is donated."""
    model = nnx.merge(graphdef, params)

    def one(row: Row, cache: KVCache) -> tuple[Row, KVCache]:
        position = row.length - 1
        out = model(row.anchor[None], position[None], cache, position, causal_mask(1))
        logits = model.head(out.hidden)
        # Through `finite` the write depends on what was read; see `write_rows`.
        finite = jnp.isfinite(logits.max())
        row, committed = append(row, argmax(logits), finite.astype(int), finite, stop_tokens)
        return row, write_rows(cache, out.rows, position, committed)

    def body(state: PlainState) -> PlainState:
        rows, cache = jax.vmap(one)(state.rows, state.cache)
        return PlainState(rows, cache, state.step + 1)

    def unfinished(state: PlainState) -> jax.Array:
        return state.rows.running.any() & (state.step < until)

    return jax.lax.while_loop(unfinished, body, state)
