"""Shapes of drafted trees: which node continues which.

Nodes are numbered as they lie in the verified block: 0 is the anchor, node i is drafted token i − 1.
They lie level by level, and within a level in the order of their parents, so the first n nodes of
a tree are a tree. A chain is the tree whose nodes have one child each.

```
parents (0, 0, 1, 1, 2)        0 ─┬─ 1 ─┬─ 3
                                  │     └─ 4
                                  └─ 2 ─── 5
```

The functions take the parents of all drafted tokens as an array `[N]`, traced or not.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Tree:
    """A static shape: metadata of compiled programs.

    Attributes:
      parents: node number of the parent of each drafted token.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        if any(not 0 <= parent <= i for i, parent in enumerate(self.parents)):
            raise ValueError(f"a parent must come before its children, got {self.parents}")
        if list(self.parents) != sorted(self.parents):
            raise ValueError(f"children must lie in the order of their parents, got {self.parents}")

    @classmethod
    def chain(cls, num_draft_tokens: int) -> Tree:
        """K nodes, one after the other."""
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be at least 1, got {num_draft_tokens}")
        return cls(tuple(range(num_draft_tokens)))

    @classmethod
    def of_widths(cls, widths: Sequence[int]) -> Tree:
        """Every node of level d has `widths[d]` children: (2, 2) has 2 + 4 nodes."""
        if not widths or min(widths) < 1:
            raise ValueError(f"a tree needs at least one child on each level, got {list(widths)}")
        level, parents = [0], []
        for width in widths:
            first = len(parents) + 1
            parents += [node for node in level for _ in range(width)]
            level = list(range(first, len(parents) + 1))
        return cls(tuple(parents))

    @classmethod
    def of_paths(cls, paths: Sequence[Sequence[int]]) -> Tree:
        """From paths of ranks: (0,) is the root's first child, (0, 1) that one's second.

        Raises:
          ValueError: a path without its parent or its elder sibling.
        """
        ordered = sorted(map(tuple, paths), key=lambda path: (len(path), path))
        numbers = {(): 0} | {path: i for i, path in enumerate(ordered, start=1)}
        for path in ordered:
            if not path or min(path) < 0:
                raise ValueError(f"a tree path is one rank a level, from 0, got {path}")
            elder = (*path[:-1], path[-1] - 1)
            if path[:-1] not in numbers or (path[-1] > 0 and elder not in numbers):
                raise ValueError(f"tree path {path} has no parent or no elder sibling")
        if len(numbers) != len(ordered) + 1:
            raise ValueError("a tree path is given twice")
        return cls(tuple(numbers[path[:-1]] for path in ordered))

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """Of all nodes, the anchor's 0 first."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def num_nodes(self) -> int:
        """N, the anchor not counted."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Levels: the most tokens that can be accepted."""
        return self.depths[-1]

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Node numbers of the children of each node, in order."""
        return tuple(
            tuple(i + 1 for i, parent in enumerate(self.parents) if parent == node)
            for node in range(len(self.parents) + 1)
        )

    def first(self, count: int) -> Tree:
        """The tree of the first `count` drafted tokens."""
        return Tree(self.parents[:count])


@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """A tree whose shape follows what is drafted (EAGLE-2, Li et al. 2024b, §4): its static sizes.

    Level by level the `top_k` likeliest nodes are expanded by their `top_k` likeliest tokens each; of
    all nodes seen the `total_tokens` − 1 likeliest make the tree.

    Attributes:
      total_tokens: of the verified block, the anchor included.
      depth: levels. EAGLE's own code counts the passes behind the first level, one less.
      top_k: nodes that are expanded on a level, and children of each.

    Raises:
      ValueError: a size is below its least, or no level holds so many nodes.
    """

    total_tokens: int
    depth: int
    top_k: int

    def __post_init__(self):
        if self.total_tokens < 2 or self.depth < 1 or self.top_k < 1:
            raise ValueError(
                "a dynamic tree needs total_tokens ≥ 2, depth ≥ 1 and top_k ≥ 1, got "
                f"{self.total_tokens}, {self.depth} and {self.top_k}"
            )
        if self.num_nodes > self.pool:
            raise ValueError(
                f"a dynamic tree of {self.total_tokens} tokens needs {self.num_nodes} nodes, but "
                f"depth {self.depth} and top_k {self.top_k} give {self.pool} to choose from"
            )

    @property
    def num_nodes(self) -> int:
        """N, the anchor not counted."""
        return self.total_tokens - 1

    @property
    def pool(self) -> int:
        """Nodes to choose from."""
        return self.top_k + (self.depth - 1) * self.top_k**2


def best_first(rank_acceptance: Sequence[float], nodes: int, max_depth: int | None = None) -> Tree:
    """The tree of N nodes whose expected number of accepted tokens is largest.

    Sequoia (Chen et al. 2024, §4.1) finds it by dynamic programming. Where acceptance does not grow
    with rank, taking the likeliest path again and again finds it too: a node is worth the product of
    its ranks' acceptances, its first child and next sibling are worth no more.

    Args:
      rank_acceptance: probability that the child of rank 0, 1, … is the one accepted, given that its
        parent was; not increasing, sum at most 1.
      nodes: N.
      max_depth: levels at most.

    Raises:
      ValueError: the acceptances are no such probabilities, or allow no N nodes.
    """
    rates = np.asarray(rank_acceptance, np.float64)
    falling = rates.size and (np.diff(rates) <= 0).all()  # NaN does not fall
    if not (falling and rates.min() >= 0 and rates.sum() <= 1 + 1e-9):
        raise ValueError(f"expected acceptances that fall with rank, sum ≤ 1, got {rates.tolist()}")
    heap, paths = [] if max_depth == 0 else [(-rates[0], (0,))], []
    while heap and len(paths) < nodes:
        worth, path = heapq.heappop(heap)
        paths.append(path)
        if max_depth is None or len(path) < max_depth:
            heapq.heappush(heap, (worth * rates[0], (*path, 0)))
        rank = path[-1] + 1
        if rank < len(rates):
            parent = np.prod(rates[list(path[:-1])])
            heapq.heappush(heap, (-parent * rates[rank], (*path[:-1], rank)))
    if len(paths) < nodes or nodes < 1:
        raise ValueError(f"no tree of {nodes} nodes with {rates.size} ranks and depth {max_depth}")
    return Tree.of_paths(paths)


def reach(parents: jax.Array, depth: int) -> jax.Array:
    """`[N + 1, N + 1]` bool: row i holds the ancestors of node i and itself; its mask in the block."""
    up = jnp.append(0, jnp.asarray(parents)).astype(jnp.int32)
    nodes = jnp.arange(up.shape[0])
    at, seen = nodes, nodes[:, None] == nodes
    for _ in range(depth):
        at = up[at]
        seen |= at[:, None] == nodes
    return seen


def path_to(parents: jax.Array, depth: int, node: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The way to a node.

    Returns:
      `[depth + 1]` int32, the node's ancestor at depth 0, 1, …, then the node itself; and the node's
      depth, `[]` int32.
    """
    up = jnp.append(0, jnp.asarray(parents)).astype(jnp.int32)
    back = [jnp.asarray(node, jnp.int32)]
    for _ in range(depth):
        back.append(up[back[-1]])
    back = jnp.stack(back)
    at = jnp.sum(back > 0)  # the anchor is node 0
    return back[jnp.maximum(at - jnp.arange(depth + 1), 0)], at
