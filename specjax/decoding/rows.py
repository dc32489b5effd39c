"""One row of the batch as it grows: committed tokens, its limit and why it ended."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.types import StopReason


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Row:
    """A sequence; with a batch axis in front of everything, the rows of a batch.

    Attributes:
      tokens: `[S]` int32, prompt and output; slots at or after `length` may hold anything.
      length: `[]` int32, committed tokens.
      limit: `[]` int32, the length at which the row ends.
      limit_status: `[]` int32, the status it then takes: LENGTH or CACHE_FULL.
      status: `[]` int32, a `StopReason`.
    """

    tokens: jax.Array
    length: jax.Array
    limit: jax.Array
    limit_status: jax.Array
    status: jax.Array

    @property
    def running(self) -> jax.Array:
        """`[]` bool: the row has not ended."""
        return self.status == StopReason.RUNNING

    @property
    def room(self) -> jax.Array:
        """`[]` int32: drafted tokens that fit beside the next one, 0 once the row has ended."""
        return jnp.where(self.running, self.limit - self.length - 1, 0)

    @property
    def anchor(self) -> jax.Array:
        """`[]` int32: the last committed token."""
        return self.tokens[self.length - 1]


def append(
    row: Row, new_tokens: jax.Array, count: jax.Array, finite: jax.Array, stop_tokens: jax.Array
) -> tuple[Row, jax.Array]:
    """Commits the first `count` new tokens, up to and including the first stop token.

    A row that has ended stays as it is.

    Args:
      row: a sequence.
      new_tokens: `[T]` int32.
      count: `[]` int32, 0…T; at most limit − length.
      finite: `[]` bool, False where the target gave no token after these; the row ends here.
      stop_tokens: `[n]` int32.

    Returns:
      The row, and how many tokens were committed, `[]` int32.
    """
    slots = jnp.arange(new_tokens.shape[0])
    stops = (new_tokens[:, None] == stop_tokens).any(-1) & (slots < count)
    until_stop = jnp.where(stops.any(), jnp.argmax(stops) + 1, count)
    committed = jnp.where(row.running, until_stop, 0).astype(jnp.int32)
    size = row.tokens.shape[0]
    index = jnp.where(slots < committed, row.length + slots, size)
    length = row.length + committed
    status = jnp.select(
        [stops.any(), ~finite, length >= row.limit],
        [StopReason.EOS, StopReason.NAN, row.limit_status],
        StopReason.RUNNING,
    )
    row = dataclasses.replace(
        row,
        tokens=row.tokens.at[index].set(new_tokens.astype(jnp.int32), mode="drop"),
        length=length,
        status=jnp.where(row.running, status, row.status).astype(jnp.int32),
    )
    return row, committed
