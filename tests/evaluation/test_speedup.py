"""The law of speed-up against the papers' numbers, a simulation, and its own inverse."""

from __future__ import annotations

import numpy as np
import pytest

from specjax import metrics
from specjax.evaluation import speedup as law
from specjax.evaluation.speedup import Costs, Law


# α, K, and the speed-up of Leviathan et al. 2023, table 1, where drafts are free.
@pytest.mark.parametrize(
    ("alpha", "k", "expected"),
    [
        (0.6, 2, 1.96),
        (0.7, 3, 2.53),
        (0.8, 2, 2.44),
        (0.8, 5, 3.69),
        (0.9, 2, 2.71),
        (0.9, 10, 6.86),
    ],
)
def test_expected_tokens_are_leviathans(alpha, k, expected):
    assert law.expected_tokens(alpha, k) == pytest.approx(expected, abs=0.005)
    assert law.expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    assert law.expected_tokens([alpha] * k, k) == pytest.approx(law.expected_tokens(alpha, k))
    assert law.speedup(alpha, k, 0.0) == law.expected_tokens(alpha, k)


def test_expected_tokens_of_positions_that_differ():
    assert law.expected_tokens([0.5, 0.2], 0) == 1
    assert law.expected_tokens([0.5, 0.2], 2) == pytest.approx(1 + 0.5 + 0.1)
    assert law.expected_tokens([0.5, 0.2], 3) == pytest.approx(1 + 0.5 + 0.1 + 0.02)
    with pytest.raises(ValueError, match=r"α must lie in 0…1"):
        law.expected_tokens(1.2, 2)


@pytest.mark.parametrize(
    ("beta", "alpha", "k", "speed"),
    [(0.01, 0.8, 14, 4.23), (0.02, 0.5, 4, 1.79), (0.05, 0.9, 13, 4.67), (0.1, 0.7, 4, 1.98),
     (0.2, 0.6, 2, 1.40), (0.2, 0.95, 10, 2.87)],
)  # fmt: skip
def test_best_length(beta, alpha, k, speed):
    best, reached = law.best_length(alpha, beta)
    assert (best, reached) == (k, pytest.approx(speed, abs=0.006))


def test_no_draft_pays_where_it_costs_more_than_it_is_accepted():
    assert law.best_length(0.3, 0.31) == (0, 1.0)
    assert law.best_length(0.3, 0.29)[0] == 1


@pytest.mark.parametrize("wanted", [1.5, 3.0])
def test_what_a_wish_needs_gives_it(wanted):
    alpha = law.needed_alpha(wanted, 0.05)
    assert law.best_length(alpha, 0.05)[1] == pytest.approx(wanted)
    assert law.best_length(alpha - 1e-6, 0.05)[1] < wanted
    beta = law.needed_beta(wanted, 0.8)
    assert law.best_length(0.8, beta)[1] == pytest.approx(wanted)
    assert law.needed_beta(10.0, 0.8) is None and law.needed_alpha(5.0, 0.3) is None


def test_alpha_is_found_whatever_k():
    rng = np.random.default_rng(0)
    for k in (1, 4, 9):
        accepted = np.cumprod(rng.random((20_000, k)) < 0.7, axis=1).sum(1)
        found = law.estimated_alpha(accepted, np.full(len(accepted), k))
        assert found == pytest.approx(0.7, abs=0.01)
        assert metrics.tau(accepted + 1) == pytest.approx(law.expected_tokens(0.7, k), rel=0.02)
    assert np.isnan(law.estimated_alpha(np.zeros(3, int), np.zeros(3, int)))


def test_a_law_is_fitted_to_what_it_gave():
    costs = {
        k: Costs(0.02, 0.02 * (0.1 + 0.05 * k), 0.02 * v) for k, v in ((2, 1.2), (4, 1.4), (8, 2.0))
    }
    fitted = Law.fit([0.6, 0.5, float("nan")], costs)
    assert fitted.alpha == (0.6, 0.5)
    assert (fitted.start, fitted.beta) == (pytest.approx(0.1), pytest.approx(0.05))
    assert fitted.v(0) == 1 and fitted.v(6) == pytest.approx(1.7)
    tokens = 1 + 0.6 + 0.3 + 0.15 + 0.075
    assert fitted.predicted(4) == pytest.approx(tokens / (0.1 + 0.2 + 1.4))
    assert fitted.best([1, 2, 4, 8]) == max((1, 2, 4, 8), key=fitted.predicted)
    # In every third cycle nothing is drafted, and a plain step taken.
    sometimes = Law.fit([0.6, 0.5], costs, 2 / 3)
    assert sometimes.predicted(4) == pytest.approx(tokens / (0.1 + 0.2 + 1.4 * 2 / 3 + 1 / 3))
    with pytest.raises(ValueError, match="needs α_1 and two K"):
        Law.fit([float("nan")], costs)
