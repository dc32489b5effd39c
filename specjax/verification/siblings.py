"""One node's children, tried one after the other: what the rules for sampled trees share."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.trees import Tree
from specjax.types import Draft
from specjax.verification.law import Rows


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
    S / (S + 1 − a), S the mass of it. R begins as the target's row. With a = 1 at every node this is
    recursive rejection sampling; with the r of the node itself it is traversal verification.

    Attributes:
      draft: with its q.
      target: the N + 1 rows of its log-probabilities.
      tree: the draft's shape.
      inherits: a node's a begins as its r, and not as 1.
    """

    draft: Draft
    target: Rows | jax.Array
    tree: Tree
    inherits: bool

    def all(self) -> tuple[jax.Array, jax.Array]:
        """Tries all children of all nodes, one row of V numbers at a time.

        Returns:
          `[N + 1]` r of every node (1 for the anchor), and `[N + 1]` a behind its last child.
        """
        parents = np.array(
            self.tree.parents
        )  # in order: a node's own r comes before its children's
        first = np.append(True, np.diff(parents) > 0)
        ones = jnp.ones(len(parents) + 1, self.draft.log_q.dtype)

        def step(carry, edge):
            row, weight, accept, after = carry
            parent, child, is_first = edge
            row, weight = jax.lax.cond(
                is_first,
                lambda: (jnp.exp(self.target[parent]), self._begin(accept, parent)),
                lambda: (row, weight),
            )
            ratio, row, weight = self._reject(child, row, weight)
            return (row, weight, accept.at[child].set(ratio), after.at[parent].set(weight)), None

        row = jnp.zeros_like(self.target[0])
        nodes = jnp.arange(1, len(parents) + 1)
        edges = jnp.asarray(parents), nodes, jnp.asarray(first)
        (_, _, accept, after), _ = jax.lax.scan(step, (row, ones[0], ones, ones), edges)
        leaf = np.array([not children for children in self.tree.children])
        begins = jax.vmap(self._begin, (None, 0))(accept, jnp.arange(len(leaf)))
        return accept, jnp.where(leaf, begins, after)

    def after_all(self, accept: jax.Array, node: jax.Array) -> jax.Array:
        """`[V]`: R after all children of a node were rejected."""
        most = max(map(len, self.tree.children))
        table = np.zeros((len(self.tree.children), most), np.int32)
        for row, children in zip(table, self.tree.children, strict=True):
            row[: len(children)] = children

        def step(carry, child):
            return self._reject(child, *carry)[1:], None

        begin = jnp.exp(self.target[node]), self._begin(accept, node)
        return jax.lax.scan(step, begin, jnp.asarray(table)[node])[0][0]

    def _begin(self, accept: jax.Array, node: jax.Array) -> jax.Array:
        return accept[node] if self.inherits else jnp.ones((), accept.dtype)

    def _reject(
        self, child: jax.Array, row: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """r of a child, and R and a if it is rejected; child 0 and invalid ones change nothing."""
        slot = child - 1
        valid = (slot >= 0) & (slot < self.draft.num_valid)
        token = jnp.clip(self.draft.tokens[slot], 0, row.shape[0] - 1)
        drafter = jnp.exp(self.draft.log_q[slot])
        possible = valid & (drafter[token] > 0)
        ratio = weight * row[token] / jnp.where(possible, drafter[token], 1)
        left = jnp.maximum(weight * row - drafter, 0)
        mass = left.sum()
        failing = mass + (1 - weight)  # exact where the weight is near 1
        after = jnp.where(failing > 0, mass / jnp.where(failing > 0, failing, 1), 1)
        some = valid & (mass > 0)
        return (
            jnp.where(possible, jnp.minimum(ratio, 1), 0),
            jnp.where(some, left / jnp.where(some, mass, 1), row),
            jnp.where(valid, after, weight),
        )
