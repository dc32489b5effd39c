"""Drafting token after token with a transformer: shared by `draft_lm` and `early_exit`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.models.transformer import Scratch
from specjax.noise import Noise
from specjax.sampling import argmax, log_probs, sample
from specjax.types import Context, Draft

Forward = Callable[[jax.Array, jax.Array, Scratch, jax.Array], tuple[jax.Array, Scratch]]


def draft_chain(
    forward: Forward,
    scratch: Scratch,
    tokens: jax.Array,
    positions: jax.Array,
    hidden_slots: jax.Array,
    num_draft_tokens: int,
    context: Context,
    noise: Noise | None,
) -> tuple[Draft, Scratch]:
    """Drafts K tokens, each from the logits after the one before it.

    The rows of all passes go to a scratch and see each other causally there, so that the cache is
    only read. The draft carries the law it was drawn from: the processed distribution of each step,
    or point masses in the greedy mode.

    Args:
      forward: (tokens `[T]`, positions `[T]`, scratch, mask `[T, N]`) → (logits `[V]` after the last
        token, scratch); N = T0 + K − 1.
      scratch: empty, with room for N tokens.
      tokens, positions: `[T0]`, of the first pass; the anchor is the last.
      hidden_slots: `[N]` bool, slots that only see themselves and are seen by nobody else.
      num_draft_tokens: K.
      context: its sampling parameters are used.
      noise: None in the greedy mode.
    """
    slots = jnp.arange(scratch.positions.shape[0])

    def mask(own: jax.Array) -> jax.Array:
        return ((slots <= own[:, None]) & ~hidden_slots) | (slots == own[:, None])

    def choose(logits: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        if context.sampling is None:
            return argmax(logits), None
        log_q = log_probs(logits, context.sampling)
        return sample(log_q, noise.draft_gumbel(slot, logits.shape[-1])), log_q

    def step(carry, slot):
        token, scratch = carry
        own = scratch.slot[None]
        logits, scratch = forward(token[None], positions[-1:] + slot, scratch, mask(own))
        token, log_q = choose(logits, slot)
        return (token, scratch), (token, log_q)

    logits, scratch = forward(tokens, positions, scratch, mask(jnp.arange(len(tokens))))
    first = choose(logits, jnp.int32(0))
    later = jnp.arange(1, num_draft_tokens)
    (_, scratch), rest = jax.lax.scan(step, (first[0], scratch), later)
    drafted, log_q = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), first, rest)
    return Draft(drafted, log_q, jnp.int32(num_draft_tokens)), scratch
