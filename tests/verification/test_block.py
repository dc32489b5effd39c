"""Facts about the rules for chains: `token`, `block`, and where they meet."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.trees import Tree
from specjax.verification import cases
from specjax.verification.block import block_law
from specjax.verification.enumeration import DraftLaw, evaluate, exact, numbers
from specjax.verification.token import token_law


def accepted(law_of, case, shape):
    return cases.run(law_of, case, shape).accepted


@pytest.mark.parametrize("case", cases.CASES)
def test_token_accepts_the_overlap(case):
    """K = 1: E[accepted] = Σ min(p, q) = 1 − TV(p, q), the most there is; block has it too."""
    target, drafter = cases.tables(case, 3, 2)
    for law_of in (token_law, block_law):
        overlap = np.minimum(target[0], drafter[0]).sum()
        assert accepted(law_of, case, (3, Tree.chain(1))) == pytest.approx(overlap, abs=1e-14)


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("shape", cases.CHAINS, ids=str)
def test_block_accepts_at_least_what_token_does(case, shape):
    """For every k and not only on average; at temperature 0 (p one-hot) exactly the same."""
    block, token = (cases.run(law_of, case, shape).survival for law_of in (block_law, token_law))
    assert (block >= token - 1e-14).all()
    if case in ("p one-hot", "p = q", "disjoint"):
        np.testing.assert_allclose(block, token, atol=1e-14)


def test_block_gains():
    for case in ("random", "alike", "opposite", "q truncated"):
        shape = (3, Tree.chain(3))
        assert accepted(block_law, case, shape) > accepted(token_law, case, shape) + 0.005


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("shape", cases.CHAINS, ids=str)
def test_block_accepts_a_prefix_with_its_weight(case, shape):
    """Pr[accepted ≥ ℓ | x_1…x_ℓ] = P_ℓ = min(P_{ℓ−1} p / q, 1), whatever is drafted behind it."""
    vocab, tree = shape
    count = tree.depth
    target, drafter = cases.tables(case, vocab, count + 1)
    tokens, probability, q = DraftLaw(drafter, tree).drafts()
    nodes = numbers(tree, tokens, 0, vocab)
    ends, _ = evaluate(block_law, tree, tokens, q, np.full(len(tokens), count), target[nodes])
    for length in range(1, count + 1):
        reached, prefix_mass, weights = {}, {}, {}
        for draft, path, mass, end in zip(tokens, nodes, probability, ends, strict=True):
            prefix = path[length]
            reached[prefix] = reached.get(prefix, 0) + mass * end[length:].sum()
            prefix_mass[prefix] = prefix_mass.get(prefix, 0) + mass
            weight = 1.0
            for token, context in zip(draft[:length], path[:length], strict=True):
                if prefix_mass[prefix] > 0:
                    weight = min(weight * target[context, token] / drafter[context, token], 1)
            weights[prefix] = weight
        for prefix, mass in prefix_mass.items():
            assert reached[prefix] == pytest.approx(mass * weights[prefix], abs=1e-14)


def test_the_motivating_example_of_block_verification():
    """p = (1/3, 2/3), q = (2/3, 1/3), K = 2: token accepts 10/9, block 11/9 (Sun et al., §2)."""
    rows = 1 + 2 + 4 + 8
    target, drafter = np.tile([1 / 3, 2 / 3], (rows, 1)), np.tile([2 / 3, 1 / 3], (rows, 1))
    for law_of, expected in ((token_law, 10 / 9), (block_law, 11 / 9)):
        result = exact(law_of, target, DraftLaw(drafter, Tree.chain(2)))
        assert result.accepted == pytest.approx(expected, abs=1e-14)
