"""Every planted fault is betrayed, those with a law by more than rounding could."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from specjax.trees import Tree
from specjax.verification import cases, faults
from specjax.verification.block import block_law
from specjax.verification.enumeration import DraftLaw, exact
from specjax.verification.token import token_law
from specjax.verification.tree_without_replacement import tree_without_replacement_law


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.what)
def test_planted_faults_are_caught(fault):
    if fault.test is None:
        assert fault.total_variation() > 1e-4
    else:
        module, test = fault.test.split("::")
        assert callable(getattr(importlib.import_module(f"tests.verification.{module}"), test))


def by_confidence(drafter, least, *, keep):
    """Ends the draft at the first token below a confidence; `keep` leaves that token in."""

    def num_valid(context, tokens):
        node = 0
        for count, token in enumerate(tokens):
            if drafter[node, token] < least:
                return count + keep
            node = node * drafter.shape[1] + 1 + token
        return len(tokens)

    return num_valid


def test_a_draft_may_stop_behind_an_unlikely_token_but_not_before_it():
    """V = 3, K = 3: to drop the token because of what it is costs a TV of 0.22."""
    target, other = (cases.random(3, 4, seed) for seed in (3, 33))
    drafts = DraftLaw(0.4 * target + 0.6 * other, Tree.chain(3))
    for law_of, biased in ((token_law, 0.219), (block_law, 0.236)):
        kept, dropped = (
            exact(law_of, target, drafts, num_valid=by_confidence(drafts.q, 0.5, keep=keep))
            for keep in (True, False)
        )
        assert kept.total_variation <= 1e-12
        assert dropped.total_variation == pytest.approx(biased, abs=5e-4)


def test_a_sampled_tree_must_not_be_pruned():
    """V = 3, one token: dropped where q < 0.3, the text is off by 0.0767."""
    target, other = (cases.random(3, 3, seed) for seed in (7, 57))
    drafts = DraftLaw((target + other) / 2, Tree.of_widths((1,)))
    num_valid = by_confidence(drafts.q, 0.3, keep=False)
    result = exact(tree_without_replacement_law, target, drafts, num_valid=num_valid)
    assert result.total_variation == pytest.approx(0.0767, abs=5e-5)


def test_clamped_ratios_against_products_of_uniforms():
    """V = 3, K = 2: a TV of 0.19, as a simulation of it finds."""
    target, drafter = np.full((40, 3), 1 / 3), np.full((40, 3), 1 / 3)
    target[0], drafter[0] = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    target[1:4] = [[0.6, 0.3, 0.1], [0.1, 0.6, 0.3], [0.3, 0.1, 0.6]]
    drafter[1:4] = [[0.3, 0.4, 0.3], [0.4, 0.2, 0.4], [0.2, 0.5, 0.3]]
    drafts = DraftLaw(drafter, Tree.chain(2))
    result = exact(faults.products_of_clamped_ratios, target, drafts)
    assert result.total_variation == pytest.approx(0.19, abs=0.01)
    assert exact(block_law, target, drafts).total_variation <= 1e-12
