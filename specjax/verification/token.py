"""The `token` rule: each drafted token is accepted or rejected by itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import Draft
from specjax.verification.law import Law, Rows, require_chain, rule_of


def token_law(draft: Draft, target: Rows | jax.Array) -> Law:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1).

    Draft i is accepted with probability min(1, p_i(x_i) / q_i(x_i)), given that all before it were.
    After the first rejection the next token is drawn from (p − q)₊, after a whole draft from p. Where
    p = q, so that (p − q)₊ has no mass, rejection has probability 0 and the row is p.

    Args:
      draft: K tokens with their log q, or point masses (q is 1 at the token).
      target: the K + 1 rows of its log-probabilities.
    """
    require_chain(draft, "token")
    accept = jnp.exp(jnp.minimum(log_ratios(draft, target), 0))
    reached = jnp.cumprod(jnp.append(1.0, accept).astype(accept.dtype))
    terminal = reached * (1 - jnp.append(accept, 0))
    return Law(terminal, lambda node: residual(draft, target, node, 1.0))


def log_ratios(draft: Draft, target: Rows | jax.Array) -> jax.Array:
    """`[K]`: log p(x) − log q(x) of each draft, −inf where it is not valid or cannot be accepted."""

    def one(slot: jax.Array) -> jax.Array:
        return log_ratio(draft, target[slot], slot)

    return jax.lax.map(one, jnp.arange(draft.tokens.shape[0]))


def log_ratio(draft: Draft, log_p: jax.Array, slot: jax.Array) -> jax.Array:
    """The same of one draft, from its target's row `[V]`."""
    token = jnp.clip(draft.tokens[slot], 0, log_p.shape[0] - 1)  # invalid slots may hold anything
    log_q = 0.0 if draft.log_q is None else draft.log_q[slot, token]
    # A token that its own q excludes was not drawn from it: rejected, rather than −inf − −inf.
    possible = (slot < draft.num_valid) & (log_p[token] > -jnp.inf) & (log_q > -jnp.inf)
    return jnp.where(possible, log_p[token] - log_q, -jnp.inf)


def residual(
    draft: Draft, target: Rows | jax.Array, node: jax.Array, scale: jax.typing.ArrayLike
) -> jax.Array:
    """`[V]`: (scale · p − q)₊ where draft `node` was rejected; p after a whole draft.

    And p where that residual has no mass: then rejection had no probability.
    """
    p = jnp.exp(target[node])
    slot = jnp.minimum(node, draft.tokens.shape[0] - 1)
    if draft.log_q is None:
        q = (jnp.arange(p.shape[0]) == draft.tokens[slot]).astype(p.dtype)
    else:
        q = jnp.exp(draft.log_q[slot])
    left = jnp.maximum(scale * p - q, 0)
    return jnp.where((node < draft.num_valid) & (left.sum() > 0), left, p)


token = rule_of(token_law)
