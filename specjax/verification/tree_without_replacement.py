"""The `tree_without_replacement` rule: recursive rejection sampling, from the root to the leaves."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import Draft
from specjax.verification.law import Law, rule_of
from specjax.verification.siblings import Siblings, require_sampled_tree


def tree_without_replacement_law(draft: Draft, target: jax.Array) -> Law:
    """Recursive rejection sampling without replacement (Jeon et al. 2024; Sequoia, algorithm 2).

    At each node its children are tried in order, each as in the `token` rule against what the
    rejected ones left of the target's distribution; the first that is accepted is the next node.

    Args:
      draft: a tree of static shape with its log q, siblings drawn without replacement.
      target: `[N + 1, V]` log-probabilities.
    """
    tree = require_sampled_tree(draft, "tree_without_replacement")
    siblings = Siblings(draft, target)
    one = jnp.ones((), target.dtype)
    reached = {0: one}
    for node, children in enumerate(tree.children):
        row = jnp.exp(target[node])
        for child in children:
            accept, row, _ = siblings.reject(child, row, one)
            reached[child] = reached[node] * accept
            reached[node] = reached[node] * (1 - accept)
    terminal = jnp.stack([reached[node] for node in range(len(tree.children))])
    return Law(terminal, lambda node: siblings.all_rejected(tree, node, one))


tree_without_replacement = rule_of(tree_without_replacement_law)
