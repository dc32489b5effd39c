"""The key/value cache: padded arrays, one pair a layer, written in one place.

```
 row        0  1  2  …  length−2 │ length−1 …          S−1
            ───── committed ──── │ stale: never read, never cleared
```

The row of the anchor (position length − 1) is written by the cycle that verifies it, so the cache
of a sequence of `length` tokens holds `length − 1` rows.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values by layer, of one sequence; also the form of rows about to be written.

    Attributes:
      k, v: L arrays `[G, S, head_dim]`; `[G, T, head_dim]` for rows of a forward pass. Keys are
        stored after their rotation. This axis order keeps XLA on CPU from transposing the cache.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    @classmethod
    def zeros(cls, config: ModelConfig, max_len: int, dtype: jax.typing.DTypeLike) -> KVCache:
        """An empty cache of `max_len` rows."""
        shape = (config.num_kv_heads, max_len, config.head_dim)

        def layers():
            return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

        return cls(k=layers(), v=layers())


def write_rows(cache: KVCache, rows: KVCache, start: jax.Array, count: jax.Array) -> KVCache:
    """Writes rows 0…count − 1 at positions start…start + count − 1; drops the others.

    `count` must depend, through data, on the output of the forward pass that read the cache:
    otherwise XLA may order this write before those reads, and copies the whole cache to do so.

    Args:
      cache: S rows a layer.
      rows: T rows a layer, from one forward pass.
      start, count: `[]` int32; rows at negative positions are dropped too.

    Returns:
      The cache. Dropped rows are aimed at index S: negative ones would wrap around.
    """
    offsets = jnp.arange(rows.k[0].shape[1])

    def write(into, new):
        kept = (offsets < count) & (start + offsets >= 0)
        index = jnp.where(kept, start + offsets, into.shape[1])
        return into.at[:, index].set(new.astype(into.dtype), mode="drop")

    return jax.tree.map(write, cache, rows)


def write_if_finite(
    cache: KVCache, rows: KVCache, outputs: jax.Array, start: jax.Array, count: jax.Array
) -> tuple[KVCache, jax.Array]:
    """Writes rows whose outputs are all finite, or none: for passes that no accepted count follows.

    Args:
      cache, rows, start, count: as in `write_rows`.
      outputs: `[T, D]`, of the pass that made the rows. That the count depends on them keeps XLA from
        writing before the pass has read.

    Returns:
      The cache, and whether the outputs of the first `count` rows are finite, `[]` bool.
    """
    counted = jnp.arange(len(outputs)) < count
    finite = (jnp.isfinite(outputs).all(-1) | ~counted).all()
    return write_rows(cache, rows, start, jnp.where(finite, count, 0)), finite
