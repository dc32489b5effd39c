"""The `tree_match` rule: the target's own tokens are followed through a deterministic tree."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.types import Draft, Drafts
from specjax.verification.law import Law, Rows, rule_of


def tree_match_law(draft: Draft, target: Rows | jax.Array) -> Law:
    """Sample, then match (SpecInfer, Miao et al. 2023, "naive sampling"; EAGLE-2; Medusa).

    A token is drawn from the target at each node and followed while a child holds it. So a node is
    reached with the target's probability π of its path, and the path ends there with π · (1 − Σ p of
    its children); the next token is drawn from the rest of p. E[accepted] = Σ π over all nodes, the
    most that a fixed tree allows.

    Args:
      draft: a tree whose shape and tokens are no random choice, or a chain of point masses. Of
        siblings with the same token the first counts.
      target: the N + 1 rows of its log-probabilities.
    """
    if draft.log_q is not None:
        raise ValueError(
            "rule tree_match verifies deterministic trees, this drafter samples its tokens: use "
            "tree_without_replacement or tree_traversal, or token or block for a chain"
        )
    parents, levels = draft.shape
    parents = jnp.asarray(parents, jnp.int32)
    count = draft.tokens.shape[0]
    slots = jnp.arange(count)
    same = (draft.tokens[:, None] == draft.tokens) & (parents[:, None] == parents)
    valid = (slots < draft.num_valid) & ~jnp.any(same & (slots < slots[:, None]), -1)

    def children(node: jax.Array) -> jax.Array:
        return target[node].at[draft.tokens].get(mode="clip")  # invalid slots may hold anything

    rows = jax.lax.map(children, jnp.arange(count + 1))  # log p of all tokens after every node
    log_p = jnp.where(valid, rows[parents, slots], -jnp.inf)
    paths = jnp.exp(jnp.where(trees.reach(parents, levels), jnp.append(0.0, log_p), 0).sum(-1))
    followed = jnp.zeros_like(paths).at[parents].add(jnp.exp(log_p))

    def next_weights(node: jax.Array) -> jax.Array:
        p = jnp.exp(target[node])
        taken = jnp.where(valid & (parents == node), draft.tokens, p.shape[0])
        rest = p.at[taken].set(0, mode="drop")
        return jnp.where(rest.sum() > 0, rest, p)  # without a rest, ending here has no probability

    return Law(paths * jnp.maximum(1 - followed, 0), next_weights)


tree_match = rule_of(tree_match_law, Drafts.DETERMINISTIC)
