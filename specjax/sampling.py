"""From logits to tokens: the one place that chooses, for decoding, drafters and verifiers alike."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def argmax(logits: jax.Array) -> jax.Array:
    """The greedy choice: index of the largest logit, the lowest index among equals.

    Two plain reductions, because XLA:CPU does not vectorise the paired one behind `jnp.argmax`.

    Args:
      logits: `[…, V]` float32. A row with NaN gives V, an id outside the vocabulary; the decode
        loops stop such a row before they use it.

    Returns:
      `[…]` int32.
    """
    vocab = logits.shape[-1]
    largest = logits == logits.max(-1, keepdims=True)
    return jnp.where(largest, jnp.arange(vocab, dtype=jnp.int32), vocab).min(-1)
