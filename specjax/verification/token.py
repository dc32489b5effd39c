"""The `token` rule: each drafted token is accepted or rejected by itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import Draft
from specjax.verification.law import Law, verifier


def token_law(draft: Draft, target: jax.Array) -> Law:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1).

    Draft i is accepted with probability min(1, p_i(x_i) / q_i(x_i)), given that all before it were.
    After the first rejection the next token is drawn from (p − q)₊, after a whole draft from p. Where
    p = q, so that (p − q)₊ has no mass, rejection has probability 0 and the row is p.

    Args:
      draft: K tokens with their log q, or point masses (q is 1 at the token).
      target: `[K + 1, V]` log-probabilities.
    """
    slots = jnp.arange(draft.tokens.shape[0])
    vocab = target.shape[-1]
    tokens = jnp.clip(draft.tokens, 0, vocab - 1)  # slots past num_valid may hold anything
    log_p = target[slots, tokens]
    log_q = jnp.zeros_like(log_p) if draft.log_q is None else draft.log_q[slots, tokens]
    # A token that its own q excludes was not drawn from it: rejected, rather than −inf − −inf.
    possible = (slots < draft.num_valid) & (log_p > -jnp.inf) & (log_q > -jnp.inf)
    accept = jnp.where(possible, jnp.exp(jnp.minimum(log_p - log_q, 0)), 0)
    reached = jnp.cumprod(jnp.append(1.0, accept).astype(accept.dtype))
    accepted = reached * (1 - jnp.append(accept, 0))

    def next_weights(index: jax.Array) -> jax.Array:
        p = jnp.exp(target[index])
        if not len(tokens):  # a pass over the anchor alone: there is nothing to reject
            return p
        slot = jnp.minimum(index, tokens.shape[0] - 1)
        if draft.log_q is None:
            q = (jnp.arange(vocab) == tokens[slot]).astype(p.dtype)
        else:
            q = jnp.exp(draft.log_q[slot])
        residual = jnp.maximum(p - q, 0)
        rejected = (index < draft.num_valid) & (residual.sum() > 0)
        return jnp.where(rejected, residual, p)

    return Law(accepted, next_weights)


token = verifier(token_law)
