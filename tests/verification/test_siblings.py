"""Facts about the rules for trees, beside their exactness."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.trees import Tree
from specjax.types import Draft
from specjax.verification import cases
from specjax.verification.block import block_law
from specjax.verification.enumeration import DraftLaw, evaluate, exact, numbers
from specjax.verification.token import token_law
from specjax.verification.tree_match import tree_match_law
from specjax.verification.tree_traversal import tree_traversal_law
from specjax.verification.tree_without_replacement import tree_without_replacement_law


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("shape", cases.TREES, ids=str)
def test_traversal_accepts_at_least_what_recursive_rejection_does(case, shape):
    traversal, recursive = (
        cases.run(law_of, case, shape)
        for law_of in (tree_traversal_law, tree_without_replacement_law)
    )
    assert (traversal.survival >= recursive.survival - 1e-14).all()


@pytest.mark.parametrize(
    ("tree_law", "chain_law"),
    [(tree_traversal_law, block_law), (tree_without_replacement_law, token_law)],
)
@pytest.mark.parametrize("shape", cases.CHAINS, ids=str)
def test_on_a_chain_they_are_the_chain_rules(tree_law, chain_law, shape):
    """Ends and next-token rows, draft by draft, for every number of valid tokens."""
    vocab, tree = shape
    for case in cases.CASES:
        target, drafter = cases.tables(case, vocab, tree.depth + 1)
        tokens, probability, q = DraftLaw(drafter, tree).drafts()
        p = target[numbers(tree, tokens, 0, vocab)]
        for valid in range(tree.depth + 1):
            count = np.full(len(tokens), valid)
            one, other = (evaluate(f, tree, tokens, q, count, p) for f in (tree_law, chain_law))
            np.testing.assert_allclose(one[0], other[0], atol=1e-14)
            rows, others = (x / x.sum(-1, keepdims=True) for x in (one[1], other[1]))
            happens = (other[0] > 1e-12) & (probability[:, None] > 0)
            np.testing.assert_allclose(rows[happens], others[happens], atol=1e-12)


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("shape", cases.CHAINS + cases.TREES, ids=str)
def test_match_accepts_the_mass_of_the_tree(case, shape):
    """E[accepted] = Σ π: the target's probability of each node's path."""
    vocab, tree = shape
    target, drafter = cases.tables(case, vocab, tree.depth + 1)
    drafts = DraftLaw(drafter, tree, sampled=False)
    tokens, *_ = drafts.drafts()
    nodes, paths = numbers(tree, tokens, 0, vocab)[0], [1.0]
    for slot, parent in enumerate(tree.parents):
        paths.append(paths[parent] * target[nodes[parent], tokens[0, slot]])
    result = exact(tree_match_law, target, drafts)
    assert result.accepted == pytest.approx(sum(paths[1:]), abs=1e-14)


def match_sampled(draft, target):
    return tree_match_law(dataclasses.replace(draft, log_q=None), target)


def test_two_children_of_a_single_node():
    """A node of five tokens where one sampled child is accepted with Σ min(p, q) = 0.604."""
    rng = np.random.default_rng(2)
    p = rng.dirichlet([0.5] * 5)
    q = (p + rng.dirichlet([0.6] * 5)) / 2
    target, drafter = np.tile(p, (31, 1)), np.tile(q, (31, 1))
    pair = Tree.of_widths((2,))
    for law_of, tree, sampled, expected in (
        (token_law, Tree.chain(1), True, 0.604),
        (match_sampled, pair, True, 0.544),
        (tree_without_replacement_law, pair, True, 0.927),
        (tree_traversal_law, pair, True, 0.927),
        (tree_match_law, pair, False, 0.664),
    ):
        result = exact(law_of, target, DraftLaw(drafter, tree, sampled))
        assert result.accepted == pytest.approx(expected, abs=5e-4)
        assert result.total_variation <= 1e-12


def test_deep_trees_of_mixed_models():
    """Values of an independent numpy enumeration: V = 3, q half the target's, (2, 1, 1) and (2, 2)."""
    for widths, traversal, recursive, match in (
        ((2, 1, 1), 2.3514, 2.2461, 1.0250),
        ((2, 2), 1.9276, 1.9147, 1.4954),
        ((1, 2), 1.5805, 1.5679, 0.4757),
    ):
        tree = Tree.of_widths(widths)
        target, other = (cases.random(3, tree.depth + 1, seed) for seed in (0, 50))
        drafter = (target + other) / 2
        for law_of, sampled, expected in (
            (tree_traversal_law, True, traversal),
            (tree_without_replacement_law, True, recursive),
            (tree_match_law, False, match),
        ):
            result = exact(law_of, target, DraftLaw(drafter, tree, sampled))
            assert result.accepted == pytest.approx(expected, abs=5e-5)


def laws_agree(draft, other, p, *, nodes):
    one, two = (tree_match_law(x, jnp.log(jnp.asarray(p))) for x in (draft, other))
    np.testing.assert_allclose(one.terminal, two.terminal, atol=1e-6)
    for node in nodes:
        rows = one.next_weights(jnp.int32(node)), two.next_weights(jnp.int32(node))
        np.testing.assert_allclose(*rows, atol=1e-6)


def test_match_takes_shapes_that_depend_on_the_draft():
    """Parents as an array, junk behind num_valid included, are the static tree."""
    parents = jnp.array([0, 0, 1, 2, 77])
    tokens = jnp.array([2, 0, 1, 1, 3], jnp.int32)
    p = np.random.default_rng(0).dirichlet([1] * 4, 6)
    static = Draft(tokens, None, jnp.int32(4), Tree((0, 0, 1, 2, 2)))
    laws_agree(static, Draft(tokens, None, jnp.int32(4), 2, parents), p, nodes=range(5))


def test_match_follows_the_first_of_equal_siblings():
    """The second adds nothing, and neither does what hangs on it."""
    tree = Tree((0, 0, 0, 2))
    p = np.random.default_rng(0).dirichlet([1] * 4, 5)
    tokens = jnp.array([2, 2, 0, 1], jnp.int32)
    law = tree_match_law(Draft(tokens, None, jnp.int32(4), tree), jnp.log(jnp.asarray(p)))
    np.testing.assert_allclose(law.terminal, [p[0, 1] + p[0, 3], p[0, 2], 0, p[0, 0], 0], atol=1e-6)
    np.testing.assert_allclose(law.next_weights(jnp.int32(0)), p[0] * [0, 1, 0, 1], atol=1e-6)
