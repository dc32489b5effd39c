"""The `tree_traversal` rule: block verification of a tree, from the leaves to the root."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import Draft
from specjax.verification.law import Law, rule_of
from specjax.verification.siblings import Siblings, require_sampled_tree


def tree_traversal_law(draft: Draft, target: jax.Array) -> Law:
    """Traversal verification (Weng et al. 2025).

    Every node carries the weight a of its path, which its children inherit as min(a · R / D, 1), as
    the running weight of `block` does. A node is left for its next child only when the whole subtree
    of the last one was rejected, and is accepted itself, with what a has become, after all of them.
    On a chain this is `block`.

    Args:
      draft: a tree of static shape with its log q, siblings drawn without replacement.
      target: `[N + 1, V]` log-probabilities.
    """
    tree = require_sampled_tree(draft, "tree_traversal")
    siblings = Siblings(draft, target)
    begins = {0: jnp.ones((), target.dtype)}  # a before the children of each node, and after them
    ends = {}
    for node, children in enumerate(tree.children):
        row, weight = jnp.exp(target[node]), begins[node]
        for child in children:
            begins[child], row, weight = siblings.reject(child, row, weight)
        ends[node] = weight

    terminal = {}

    def visit(node: int, alive: jax.Array) -> jax.Array:
        """The probability that nothing was accepted, up to and including this node's subtree."""
        for child in tree.children[node]:
            alive = visit(child, alive)
        terminal[node] = alive * ends[node]
        return alive * (1 - ends[node])

    visit(0, jnp.ones((), target.dtype))
    nodes = range(len(tree.children))
    weights = jnp.stack([begins[node] for node in nodes])
    return Law(
        jnp.stack([terminal[node] for node in nodes]),
        lambda node: siblings.all_rejected(tree, node, weights[node]),
    )


tree_traversal = rule_of(tree_traversal_law)
