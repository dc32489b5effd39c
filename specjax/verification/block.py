"""The `block` rule: the draft is accepted or rejected as a whole, and so more of it is kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import Draft
from specjax.verification.law import Law, Rows, require_chain, rule_of
from specjax.verification.token import log_ratio, residual


def block_law(draft: Draft, target: Rows | jax.Array) -> Law:
    """Block verification (Sun et al. 2024, algorithm 2).

    With the running weight P_i = min(P_{i−1} · p(x_i) / q(x_i), 1), P_0 = 1, at least ℓ drafts are
    accepted with probability P_ℓ, given x_1…x_ℓ: a ratio below 1 can be bought back by a later one
    above 1. No rule that sees the drafted path only accepts more (theorem 2); `token` has
    Π min(p / q, 1) instead. With S_i = Σ (P_i p − q)₊ the draft ends at i, given that it ends no
    later, with probability S_i / (S_i + 1 − P_i), at the last valid draft with P_n. The next token is
    drawn from (P_i p − q)₊, or from p behind the last.

    Args:
      draft: K tokens with their log q, or point masses (q is 1 at the token).
      target: the K + 1 rows of its log-probabilities.
    """
    require_chain(draft, "block")
    count = draft.tokens.shape[0]

    def step(log_weight: jax.Array, slot: jax.Array) -> tuple[jax.Array, tuple]:
        log_p = target[slot]
        weight = jnp.exp(log_weight)  # P_i
        if draft.log_q is None:
            mass = weight * -jnp.expm1(log_p[jnp.clip(draft.tokens[slot], 0, log_p.shape[0] - 1)])
        else:
            mass = jnp.maximum(weight * jnp.exp(log_p) - jnp.exp(draft.log_q[slot]), 0).sum()
        return jnp.minimum(log_weight + log_ratio(draft, log_p, slot), 0), (weight, mass)

    nothing = jnp.zeros((), target[0].dtype)
    last, (weights, sums) = jax.lax.scan(step, nothing, jnp.arange(count))
    weights, sums = jnp.append(weights, jnp.exp(last)), jnp.append(sums, nothing)
    failing = sums + (1 - weights)  # exact where a weight is near 1
    stays = jnp.where(failing > 0, sums / jnp.where(failing > 0, failing, 1), 1)
    nodes = jnp.arange(count + 1)
    stays = jnp.where(
        nodes < draft.num_valid, stays, jnp.where(nodes > draft.num_valid, 0, weights)
    )
    stays = stays.at[0].set(1)  # something is always committed
    later = jnp.cumprod((1 - stays)[::-1])[::-1]  # Π_{j ≥ i} (1 − stays_j)
    terminal = stays * jnp.append(later[1:], 1)
    return Law(terminal, lambda node: residual(draft, target, node, weights[node]))


block = rule_of(block_law)
