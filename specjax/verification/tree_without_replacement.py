"""The `tree_without_replacement` rule: recursive rejection sampling, from the root to the leaves."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import Draft
from specjax.verification.law import Law, Rows, rule_of
from specjax.verification.siblings import Siblings, require_sampled_tree


def tree_without_replacement_law(draft: Draft, target: Rows | jax.Array) -> Law:
    """Recursive rejection sampling without replacement (Jeon et al. 2024; Sequoia, algorithm 2).

    At each node its children are tried in order, each as in the `token` rule against what the
    rejected ones left of the target's distribution; the first that is accepted is the next node.

    Args:
      draft: a tree of static shape with its log q, siblings drawn without replacement.
      target: the N + 1 rows of its log-probabilities.
    """
    tree = require_sampled_tree(draft, "tree_without_replacement")
    siblings = Siblings(draft, target, tree, inherits=False)
    accept, _ = siblings.all()
    reached = {0: jnp.ones((), accept.dtype)}
    for node, children in enumerate(tree.children):
        for child in children:
            reached[child] = reached[node] * accept[child]
            reached[node] = reached[node] * (1 - accept[child])
    terminal = jnp.stack([reached[node] for node in range(len(tree.children))])
    return Law(terminal, lambda node: siblings.after_all(accept, node))


tree_without_replacement = rule_of(tree_without_replacement_law)
