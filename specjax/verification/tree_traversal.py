"""The `tree_traversal` rule: block verification of a tree, from the leaves to the root."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.trees import Tree
from specjax.types import Draft
from specjax.verification.law import Law, Rows, rule_of
from specjax.verification.siblings import Siblings, require_sampled_tree


def tree_traversal_law(draft: Draft, target: Rows | jax.Array) -> Law:
    """Traversal verification (Weng et al. 2025).

    Every node carries the weight a of its path, which its children inherit as min(a · R / D, 1), as
    the running weight of `block` does. A node is left for its next child only when the whole subtree
    of the last one was rejected, and is accepted itself, with what a has become, after all of them.
    On a chain this is `block`.

    Args:
      draft: a tree of static shape with its log q, siblings drawn without replacement.
      target: the N + 1 rows of its log-probabilities.
    """
    tree = require_sampled_tree(draft, "tree_traversal")
    siblings = Siblings(draft, target, tree, inherits=True)
    accept, after = siblings.all()
    return Law(leaves_first(tree, after), lambda node: siblings.after_all(accept, node))


def leaves_first(tree: Tree, stays: jax.Array) -> jax.Array:
    """`[N + 1]`: where the path ends if nodes are tried after their children, one coin for each."""
    ends = {}

    def visit(node: int, alive: jax.Array) -> jax.Array:
        """The probability that nothing was accepted, up to and including this node's subtree."""
        for child in tree.children[node]:
            alive = visit(child, alive)
        ends[node] = alive * stays[node]
        return alive * (1 - stays[node])

    visit(0, jnp.ones((), stays.dtype))
    return jnp.stack([ends[node] for node in range(len(tree.children))])


tree_traversal = rule_of(tree_traversal_law)
