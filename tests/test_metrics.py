"""τ, J_k, α_k and target passes, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from specjax import metrics


def test_the_worked_example():
    # K = 3, two drafts right, one wrong: 3 tokens from one pass.
    accepted, drafted, committed = np.array([2]), np.array([3]), np.array([3])
    assert metrics.tau(committed) == 3.0
    assert metrics.target_passes(committed) == 1
    np.testing.assert_array_equal(metrics.survival(accepted, committed, 3), [1, 1, 0])
    np.testing.assert_array_equal(metrics.alpha(accepted, drafted, committed, 3), [1, 1, 0])


def test_pooled_over_rows_with_padding_and_short_drafts():
    # Row 0: a whole draft of 3 (4 tokens), nothing drafted (1), one of two kept (2).
    # Row 1: rejected at once (1), then a stop token as second of three drafts: cut to 2 (2).
    accepted = np.array([[3, 0, 1], [0, 2, 0]])
    drafted = np.array([[3, 0, 2], [3, 2, 0]])
    committed = np.array([[4, 1, 2], [1, 2, 0]])  # the last entry of row 1 is padding
    assert metrics.target_passes(committed) == 5
    assert metrics.tau(committed) == 10 / 5
    np.testing.assert_allclose(metrics.survival(accepted, committed, 3), [3 / 5, 2 / 5, 1 / 5])
    # α_1: tried in 4 cycles, kept in 3. α_2: tried in 3, kept in 2. α_3: tried once (the cut cycle
    # has no third draft), kept once.
    expected = [3 / 4, 2 / 3, 1 / 1]
    np.testing.assert_allclose(metrics.alpha(accepted, drafted, committed, 3), expected)


def test_plain_decoding_has_tau_one():
    assert metrics.tau(np.ones(7, int)) == 1.0


def test_nothing_tried_is_nan_not_zero():
    none, one = np.zeros(2, int), np.ones(2, int)
    assert np.isnan(metrics.alpha(none, none, one, 2)).all()
    assert np.isnan(metrics.tau(np.zeros(0, int)))


@pytest.mark.parametrize("seed", range(20))
def test_tau_is_one_plus_the_sum_of_survival(seed):
    rng = np.random.default_rng(seed)
    drafted = rng.integers(0, 6, 40)
    accepted = rng.integers(0, drafted + 1)
    tau = metrics.tau(accepted + 1)
    assert tau == pytest.approx(1 + metrics.survival(accepted, accepted + 1, 5).sum())


def test_the_interval_of_tau_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    inside = 0
    for trial in range(200):
        rates = rng.uniform(0.2, 0.9, 30)  # prompts differ
        rows = [1 + rng.binomial(4, rate, 20) for rate in rates]
        low, high = metrics.tau_interval(rows, draws=300, seed=trial)
        inside += low <= 1 + 4 * 0.55 <= high
    assert 175 <= inside <= 200  # 95 % of 200, and what a bootstrap of 30 misses
    assert metrics.tau_interval([np.array([3, 3])] * 4) == (3.0, 3.0)


def test_cycles_are_replayed_from_agreement():
    """By hand, K = 2. An `x` marks drafts that are the text's own, for the first and second draft."""
    marks = ["xx", "..", "x.", ".x", "xx", "xx", "xx"]
    agreement = np.array([[mark == "x" for mark in row] for row in marks])
    # Budget ends the text: both of token 0 kept (3 tokens), none of the token at 3 (1), then at 4 room
    # for two drafts beside the next token: both kept.
    told = metrics.replay(agreement, stopped=False)
    np.testing.assert_array_equal(told, [[2, 0, 2], [2, 2, 2], [3, 1, 3]])
    # One token less: room for one draft.
    told = metrics.replay(agreement[:-1], stopped=False)
    np.testing.assert_array_equal(told, [[2, 0, 1], [2, 2, 1], [3, 1, 2]])
    # A stop token ends it: it is the second draft of the last cycle, and nothing comes after it.
    told = metrics.replay(agreement[:-1], stopped=True)
    np.testing.assert_array_equal(told, [[2, 0, 2], [2, 2, 2], [3, 1, 2]])
    # The stop token is the target's own after a wrong draft.
    agreement[4, 1] = False
    told = metrics.replay(agreement[:-1], stopped=True)
    np.testing.assert_array_equal(told, [[2, 0, 1], [2, 2, 2], [3, 1, 2]])
    for stopped in (False, True):
        assert metrics.replay(agreement[:0], stopped=stopped)[0].shape == (0,)
