"""The enumerator itself, where it can be checked by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.trees import Tree
from specjax.verification import cases
from specjax.verification.enumeration import DraftLaw, contexts, exact, number
from specjax.verification.law import Law
from specjax.verification.token import log_ratios, token_law


def test_contexts_are_numbered_as_a_heap():
    names = contexts(3, 3)
    assert names[:5] == [(), (0,), (1,), (2,), (0, 0)]
    assert [number(name, 3) for name in names] == list(range(len(names)))


def test_plain_sampling_multiplies_rows():
    target = cases.random(2, 2, 0)
    result = exact(token_law, target, DraftLaw(target, Tree.chain(1)), stop=1)
    law = dict(zip(contexts(2, 2), result.plain, strict=True))
    first, second = target[0], target[number((0,), 2)]
    expected = {(1,): first[1], (0, 0): first[0] * second[0], (0, 1): first[0] * second[1]}
    assert {text: mass for text, mass in law.items() if mass} == pytest.approx(expected)


@pytest.mark.parametrize("shape", cases.CHAINS + cases.TREES, ids=str)
def test_drafts_have_probability_one_together(shape):
    vocab, tree = shape
    for case in cases.CASES:
        _, drafter = cases.tables(case, vocab, tree.depth + 1)
        _, probability, _ = DraftLaw(drafter, tree).drafts()
        assert probability.sum() == pytest.approx(1, abs=1e-14)


def test_siblings_are_drawn_without_replacement():
    q = np.array([[0.5, 0.3, 0.2]])
    tokens, probability, rows = DraftLaw(q, Tree.of_widths((2,))).drafts()
    found = {tuple(map(int, pair)): x for pair, x in zip(tokens, probability, strict=True)}
    assert len(found) == 6 and found[1, 0] == pytest.approx(0.3 * 0.5 / 0.7)
    np.testing.assert_allclose(rows[[*found].index((1, 0))], [q[0], [5 / 7, 0, 2 / 7]])


def test_without_mass_left_siblings_are_any_others():
    tokens, probability, rows = DraftLaw(np.eye(3)[:1], Tree.of_widths((2,))).drafts()
    found = {tuple(map(int, x)): y for x, y in zip(tokens, probability, strict=True) if y}
    assert found == {(0, 1): 0.5, (0, 2): 0.5} and (rows[probability > 0, 1] == 0).all()


def test_a_deterministic_tree_holds_the_likeliest():
    q = np.array([[0.2, 0.5, 0.3], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.0, 1.0, 0.0]])
    tokens, _, rows = DraftLaw(q, Tree.of_widths((2, 1)), sampled=False).drafts()
    assert rows is None and tokens.tolist() == [[1, 2, 0, 1]]


def test_more_children_than_tokens_are_refused():
    with pytest.raises(ValueError, match="more children than the 2 tokens"):
        DraftLaw(np.ones((3, 2)) / 2, Tree.of_widths((3,))).drafts()


def test_a_law_that_is_none_is_no_proof():
    """`token` without its clamp: weighted by chances above 1 and below 0, its output is exactly p."""

    def unclamped(draft, target):
        ratios = jnp.exp(log_ratios(draft, target))
        reached = jnp.cumprod(jnp.append(1.0, ratios))

        def weights(node):
            slot = jnp.minimum(node, draft.tokens.shape[0] - 1)
            p = jnp.exp(target[node])
            left = jnp.where(draft.log_q[slot] == -jnp.inf, p, 0)
            return jnp.where((node < draft.num_valid) & (left.sum() > 0), left, p)

        return Law(reached * (1 - jnp.append(ratios, 0)), weights)

    p, q = cases.random(3, 3, 0), cases.random(3, 3, 1)
    result = exact(unclamped, p, DraftLaw(q, Tree.chain(1)))
    assert np.abs(result.output - result.plain).sum() < 1e-12 and not result.proper
    assert result.total_variation == np.inf
    assert exact(token_law, p, DraftLaw(q, Tree.chain(1))).proper
