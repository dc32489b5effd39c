"""One node's children, tried one after the other: what the rules for sampled trees share."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.trees import Tree
from specjax.types import Draft


def require_sampled_tree(draft: Draft, name: str) -> Tree:
    """The static shape of a draft with its q.

    Raises:
      ValueError: the draft has none, or no q.
    """
    if draft.log_q is None:
        raise ValueError(
            f"rule {name} verifies sampled trees and needs the law q they were drawn from, which this "
            "drafter does not give: use tree_match"
        )
    if draft.tree is None:
        raise ValueError(
            f"rule {name} needs a static tree, the shape of this drafter's depends on what it drafts: "
            "use tree_match or gumbel"
        )
    return draft.tree


@dataclasses.dataclass(frozen=True)
class Siblings:
    """The target's distribution at a node as its drafted children are rejected, one by one.

    A child c was drawn from D, the drafter's law without its elder siblings. It is accepted with
    r = min(a · R(c) / D(c), 1); else R becomes the normalised (a · R − D)₊ and a becomes
    S / (S + 1 − a), S the mass of it. R begins as the target's row. With a = 1 throughout this is
    recursive rejection sampling; with the weight of the path so far it is traversal verification.

    Attributes:
      draft: a tree with its q.
      target: `[N + 1, V]` log-probabilities.
    """

    draft: Draft
    target: jax.Array

    def reject(
        self, child: jax.typing.ArrayLike, row: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What one child does.

        Args:
          child: its node number; where it is 0 or not valid, nothing happens.
          row: `[V]`, R.
          weight: `[]`, a.

        Returns:
          r, and R and a if the child is rejected.
        """
        slot = jnp.asarray(child) - 1
        valid = (slot >= 0) & (slot < self.draft.num_valid)
        token = jnp.clip(self.draft.tokens[slot], 0, row.shape[0] - 1)
        drafter = jnp.exp(self.draft.log_q[slot])
        possible = valid & (drafter[token] > 0)
        ratio = weight * row[token] / jnp.where(possible, drafter[token], 1)
        left = jnp.maximum(weight * row - drafter, 0)
        mass = left.sum()
        failing = mass + 1 - weight
        after = jnp.where(failing > 0, mass / jnp.where(failing > 0, failing, 1), 1)
        some = valid & (mass > 0)
        return (
            jnp.where(possible, jnp.minimum(ratio, 1), 0),
            jnp.where(some, left / jnp.where(some, mass, 1), row),
            jnp.where(valid, after, weight),
        )

    def all_rejected(self, tree: Tree, node: jax.Array, weight: jax.Array) -> jax.Array:
        """`[V]`: R after all children of a traced node, with a = `weight` at its beginning."""
        most = max(map(len, tree.children))
        table = np.zeros((len(tree.children), max(most, 1)), np.int32)
        for row, children in zip(table, tree.children, strict=True):
            row[: len(children)] = children
        row = jnp.exp(self.target[node])
        for child in jnp.asarray(table)[node][:most]:
            _, row, weight = self.reject(child, row, weight)
        return row
