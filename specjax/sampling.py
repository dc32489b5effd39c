"""From logits to tokens: the one place that chooses, for decoding, drafters and verifiers alike.

The processed distribution, `log_probs(logits, sampling)`, is what "the target's distribution" means
everywhere: plain decoding draws from it, drafters draw from theirs, rules compare the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Parameters of one row, each `[]`; applied in this order.

    A filter that no row of the batch uses is None, and costs nothing.

    Attributes:
      temperature: divides the logits; 0 is greedy.
      top_k: keeps the k largest; 0 keeps all.
      top_p: keeps the smallest set of likeliest tokens that holds this mass; 1 keeps all.
      min_p: keeps what is at least this likely relative to the likeliest; 0 keeps all.
    """

    temperature: jax.Array
    top_k: jax.Array | None = None
    top_p: jax.Array | None = None
    min_p: jax.Array | None = None


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


def likeliest(head: Callable[[jax.Array], jax.Array], hidden: jax.Array) -> jax.Array:
    """`argmax` of a head's logits after each of many tokens, `[T, D]` → `[T]`, 128 at a time."""
    return jax.lax.map(lambda x: argmax(head(x[None])[0]), hidden, batch_size=128)


def _largest_threshold(values: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest t for which the tokens with value ≥ t are enough; the mask of those tokens.

    Bisection over the bit patterns of float32, which are ordered like the numbers once the negative
    ones are flipped: 32 halvings reach the exact threshold, without sorting the vocabulary, for any
    predicate that stays true as t falls. Equal values are kept or dropped together.
    """
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def halve(_, bounds):
        low, high = bounds  # enough at low, not at high
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        holds = enough(ordered >= middle)
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle)

    limits = jnp.int32(-(2**31)), jnp.int32(2**31 - 1)
    low, _ = jax.lax.fori_loop(0, 32, halve, limits)
    return ordered >= low


def log_probs(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Log-probabilities after temperature, top-k, top-p and min-p, in this order.

    Ties at a threshold are all kept, for target and drafter alike. Where temperature is 0 the row is
    one-hot at `argmax(logits)`.

    Args:
      logits: `[V]`; computed in float32 at least.
      sampling: of this row.

    Returns:
      `[V]`, −inf where a token is excluded; exponentials sum to 1.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    greedy = sampling.temperature == 0
    # The maximum first: a tiny temperature would make both infinite. It is 0 and always kept below.
    scaled = (logits - logits.max()) / jnp.where(greedy, 1, sampling.temperature)

    if sampling.top_k is not None:
        kept = _largest_threshold(scaled, lambda mask: mask.sum() >= sampling.top_k)
        scaled = jnp.where(kept | (scaled == 0) | (sampling.top_k == 0), scaled, -jnp.inf)
    if sampling.top_p is not None:
        probs = jax.nn.softmax(scaled)
        kept = _largest_threshold(scaled, lambda mask: (probs * mask).sum() >= sampling.top_p)
        scaled = jnp.where(kept | (scaled == 0) | (sampling.top_p == 1), scaled, -jnp.inf)
    if sampling.min_p is not None:
        # The likeliest token has scaled = 0. log 0 = −inf keeps all.
        scaled = jnp.where(scaled >= jnp.log(sampling.min_p), scaled, -jnp.inf)

    one_hot = jnp.arange(logits.shape[-1]) == argmax(logits)
    return jnp.where(greedy, jnp.where(one_hot, 0.0, -jnp.inf), jax.nn.log_softmax(scaled))


def sample(log_probabilities: jax.Array, gumbel: jax.Array) -> jax.Array:
    """Draws a token by the Gumbel-max trick: argmax(log p + g) has law p (Gumbel 1954).

    Args:
      log_probabilities, gumbel: `[V]`.

    Returns:
      `[]` int32; never a token of probability 0 while there is one of positive probability.
    """
    return argmax(log_probabilities + gumbel)


def draw(weights: jax.Array, uniforms: jax.Array, *, block: int = 256) -> jax.Array:
    """Draws an index with probability proportional to its weight, by inverting the sum in two steps.

    First a block of the vocabulary, then a token inside it, each by a uniform of its own: one pass
    over the weights, and twice the resolution that one float32 uniform has.

    Args:
      weights: `[V]`, non-negative, not all zero.
      uniforms: `[2]` in [0, 1).
      block: tokens a block.

    Returns:
      `[]` int32, of positive weight.
    """
    size = weights.shape[-1]
    padded = jnp.pad(weights, (0, -size % block)).reshape(-1, block)
    row = invert(padded.sum(-1), uniforms[0])
    return row * block + invert(padded[row], uniforms[1])


def invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The index where the running sum passes uniform · total; its weight is positive."""
    sums, has_mass = jnp.cumsum(weights), weights > 0
    # A long sum is rounded block by block, so that it may also rise where nothing was added.
    passed = (sums > uniform * sums[-1]) & has_mass
    # Where rounding carries the product up to the total, the last token that has any mass.
    last = jnp.max(jnp.where(has_mass, jnp.arange(weights.shape[-1], dtype=jnp.int32), 0))
    return jnp.where(passed.any(), jnp.argmax(passed), last).astype(jnp.int32)
