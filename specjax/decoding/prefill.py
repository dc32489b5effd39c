"""Prefill: the prompt without its last token goes through the target, chunk by chunk.

The last token is the first anchor. Its row is written by the first cycle, like any anchor's, and no
token is chosen before that cycle: prefill computes no logits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.decoding.rows import Row
from specjax.models.cache import KVCache, write_if_finite
from specjax.models.transformer import causal_mask
from specjax.types import Committed, Drafter, PyTree, StopReason

CHUNKS = (32, 64, 128, 256, 512)  # tokens a forward pass
PASS = 16  # what another pass costs, in tokens: it reads all weights again


def chunk_size(rows: int) -> int:
    """The bucket of the next chunk where so many rows are left: of all, or of some and more passes."""
    return _cheapest(rows, CHUNKS)[1]


@functools.cache
def _cheapest(rows: int, chunks: tuple[int, ...]) -> tuple[int, int]:
    """The least cost of so many rows, in tokens, and the first chunk's size, the larger of equals."""
    if rows > chunks[-1]:
        return chunks[-1] + PASS + _cheapest(rows - chunks[-1], chunks)[0], chunks[-1]
    options = [
        (size + PASS + (_cheapest(rows - size, chunks)[0] if size < rows else 0), size)
        for size in chunks
    ]
    return min(options, key=lambda option: (option[0], -option[1]))


@functools.partial(
    jax.jit,
    static_argnames=("graphdef", "drafter", "size"),
    donate_argnames=("rows", "cache", "drafter_state"),
)
def prefill_chunk(
    graphdef: Any,
    params: PyTree,
    drafter: Drafter | None,
    drafter_params: PyTree,
    rows: Row,
    cache: KVCache,
    drafter_state: PyTree,
    start: jax.Array,
    *,
    size: int,
) -> tuple[Row, KVCache, PyTree]:
    """Runs positions start…start + size − 1 of every row; those past a row's prompt are dropped.

    Returns:
      Rows (status NAN where the target's output is not finite), cache and drafter state. All three
      arguments are donated.
    """
    model = nnx.merge(graphdef, params)
    taps = drafter.taps if drafter else ()
    positions = start + jnp.arange(size)

    def one(row: Row, cache: KVCache, state: PyTree) -> tuple[Row, KVCache, PyTree]:
        tokens = row.tokens.at[positions].get(mode="clip")
        out = model(tokens, positions, cache, start, causal_mask(size), taps)
        count = jnp.clip(row.length - 1 - start, 0, size)
        cache, finite = write_if_finite(cache, out.rows, out.hidden, start, count)
        count = jnp.where(finite, count, 0)
        status = jnp.where(finite, row.status, StopReason.NAN).astype(jnp.int32)
        if drafter:
            next_tokens = row.tokens.at[positions + 1].get(mode="clip")
            nodes = jnp.arange(size)
            chunk = Committed(tokens, out.features, next_tokens, start, count, nodes)
            state = drafter.prefill(drafter_params, params, state, chunk)
        return dataclasses.replace(row, status=status), cache, state

    return jax.vmap(one)(rows, cache, drafter_state)


def prefill(
    graphdef: Any,
    params: PyTree,
    drafter: Drafter | None,
    drafter_params: PyTree,
    rows: Row,
    cache: KVCache,
    drafter_state: PyTree,
    *,
    longest: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Row, KVCache, PyTree]:
    """Runs all chunks of a batch.

    Args:
      graphdef, params: the target.
      drafter, drafter_params: None and () in plain decoding.
      rows, cache, drafter_state: with a batch axis; donated.
      longest: tokens of the longest prompt.
      progress: called with (rows done, rows in all).
    """
    start = 0
    while start < longest - 1:
        size = chunk_size(longest - 1 - start)
        rows, cache, drafter_state = prefill_chunk(
            graphdef, params, drafter, drafter_params, rows, cache, drafter_state,
            jnp.int32(start), size=size,
        )  # fmt: skip
        start += size
        if progress:
            jax.block_until_ready(rows)
            progress(min(start, longest - 1), longest - 1)
    return rows, cache, drafter_state
