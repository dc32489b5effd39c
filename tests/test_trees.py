"""Shapes of trees, against loops in plain Python and the published dynamic program."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.trees import Tree, best_first, path_to, reach

EXAMPLE = Tree((0, 0, 1, 1, 2))  # of the module's docstring


@st.composite
def trees(draw):
    """Any tree of up to eight nodes: parents that do not fall are shallow first."""
    count = draw(st.integers(1, 8))
    return Tree(tuple(sorted(draw(st.integers(0, i)) for i in range(count))))


def ancestors(tree, node):
    """The node, its parent, … the anchor."""
    return [node, *(ancestors(tree, tree.parents[node - 1]) if node else [])]


def test_the_example():
    assert EXAMPLE.depths == (0, 1, 1, 2, 2, 2) and EXAMPLE.depth == 2
    assert EXAMPLE.children == ((1, 2), (3, 4), (5,), (), (), ())
    assert EXAMPLE.first(3) == Tree((0, 0, 1))


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((1,), "parent must come before"),
        ((0, -1), "parent must come before"),
        ((0, 1, 0), "must"),
    ],
)
def test_parents_that_are_no_tree(parents, message):
    with pytest.raises(ValueError, match=message):
        Tree(parents)


def test_chains_and_widths():
    assert Tree.chain(3) == Tree.of_widths((1, 1, 1)) == Tree((0, 1, 2))
    assert Tree.of_widths((2, 2)) == Tree((0, 0, 1, 1, 2, 2))
    assert Tree.of_widths((2, 1, 1)) == Tree((0, 0, 1, 2, 3, 4))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Tree.chain(0)
    for widths in ((), (2, 0)):
        with pytest.raises(ValueError, match="at least one child on each level"):
            Tree.of_widths(widths)


def test_paths():
    paths = [(1, 0), (0,), (1,), (0, 1), (0, 0)]
    assert Tree.of_paths(paths) == EXAMPLE
    for wrong, message in (
        ([(0,), (2,)], "no elder sibling"),
        ([(0,), (1, 0)], "no parent"),
        ([(0,), (0,)], "given twice"),
    ):
        with pytest.raises(ValueError, match=message):
            Tree.of_paths(wrong)


@settings(deadline=None, max_examples=40)
@given(trees())
def test_reach_and_path_are_the_ancestors(tree):
    mask = np.asarray(reach(jnp.asarray(tree.parents), tree.depth))
    for node in range(len(tree.parents) + 1):
        way = ancestors(tree, node)[::-1]
        assert np.flatnonzero(mask[node]).tolist() == sorted(way)
        path, depth = path_to(jnp.asarray(tree.parents), tree.depth, jnp.int32(node))
        assert int(depth) == tree.depths[node]
        assert path[: depth + 1].tolist() == way and path.shape == (tree.depth + 1,)


def test_they_can_be_traced():
    parents = jnp.asarray(EXAMPLE.parents)
    traced = jax.jit(reach, static_argnums=1)(parents, 2)
    np.testing.assert_array_equal(traced, reach(parents, 2))
    paths, depths = jax.vmap(path_to, (None, None, 0))(parents, 2, jnp.arange(6))
    assert depths.tolist() == list(EXAMPLE.depths) and paths[5].tolist() == [0, 2, 5]


@given(trees(), st.integers(0, 8))
def test_the_first_nodes_are_a_tree(tree, count):
    assert tree.first(count).depths == tree.depths[: count + 1]


def worth(tree, rates):
    """Expected accepted tokens: the sum over nodes of the product of their ranks' acceptances."""
    total, of = 0.0, [1.0]
    for node, parent in enumerate(tree.parents, start=1):
        of.append(of[parent] * rates[tree.children[parent].index(node)])
        total += of[node]
    return total


def dynamic_program(rates, nodes, levels):
    """Sequoia's recursion (Chen et al. 2024, §4.1): how many nodes each child's subtree gets."""

    @functools.cache
    def subtree(count, levels):  # below a node, itself counted: its own 1 and its children's
        return 1 + children(count - 1, levels - 1, 0)

    @functools.cache
    def children(count, levels, rank):
        if count == 0:
            return 0.0
        if levels == 0 or rank == len(rates):
            return -np.inf
        return max(
            rates[rank] * subtree(own, levels) + children(count - own, levels, rank + 1)
            for own in range(1, count + 1)
        )

    return children(nodes, levels, 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("levels", [2, 3, 5, None])
def test_best_first_is_the_dynamic_program(seed, levels):
    rates = np.sort(np.random.default_rng(seed).dirichlet([0.5] * 6))[:0:-1]
    for nodes in (1, 2, 7, 15):
        tree = best_first(rates, nodes, levels)
        assert len(tree.parents) == nodes and tree.depth <= (levels or nodes)
        best = dynamic_program(tuple(rates), nodes, levels or nodes)
        assert worth(tree, rates) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize(
    ("rates", "nodes", "levels", "message"),
    [
        ((0.3, 0.5), 2, None, "fall with rank"),
        ((0.7, 0.6), 2, None, "sum ≤ 1"),
        ((0.5, -0.1), 2, None, "fall with rank"),
        ((), 2, None, "fall with rank"),
        ((float("nan"),), 2, None, "fall with rank"),
        ((0.5,), 1, 0, "no tree of 1 nodes"),
        ((0.5,), 3, 2, "no tree of 3 nodes"),
        ((0.5,), 0, None, "no tree of 0 nodes"),
    ],
)
def test_acceptances_that_make_no_tree(rates, nodes, levels, message):
    with pytest.raises(ValueError, match=message):
        best_first(rates, nodes, levels)
