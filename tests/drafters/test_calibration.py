"""Sequential temperature scaling: it finds what is off, and a drafter uses what was found."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import specjax
from specjax.drafters import dspark
from specjax.drafters.dspark import calibration
from tests.fakes import PROMPTS


def rounds(rng, count, depth, distortion):
    """Cycles whose confidence is off: its logits are the true ones times a number a slot."""
    logits = rng.normal(0.5, 1.5, (count, depth))
    true = 1 / (1 + np.exp(-logits))
    accepted = np.cumprod(rng.random((count, depth)) < true, axis=1).sum(1)
    return 1 / (1 + np.exp(-logits * distortion)), accepted


def test_scaling_finds_the_temperatures():
    rng = np.random.default_rng(0)
    distortion = np.array([2.0, 0.5, 4.0])
    told, accepted = rounds(rng, 40_000, 3, distortion)
    full = np.full(len(told), 3)
    found = calibration.fit_temperatures(told, accepted, full)
    assert np.all(np.abs(np.log2(found / distortion)) <= 0.5)
    fresh, accepted = rounds(rng, 40_000, 3, distortion)
    for slot in range(3):
        survived = accepted > slot
        before = calibration.reliability(np.cumprod(fresh, axis=1)[:, slot], survived).error
        after = calibration.reliability(
            calibration.predicted_survival(fresh, found)[:, slot], survived
        ).error
        assert after < 0.015 < 0.04 < before


def test_true_confidence_is_left_alone():
    told, accepted = rounds(np.random.default_rng(1), 40_000, 2, np.ones(2))
    found = calibration.fit_temperatures(told, accepted, np.full(len(told), 2))
    assert np.all(np.abs(np.log2(found)) <= 0.25)


def test_reliability_by_hand():
    told = np.array([0.11, 0.12, 0.93, 0.94, 1.0])
    happened = np.array([False, True, True, True, False])
    # Bins of width 1/4, two of them empty: 0.115 told and ½ happened; 0.9567 told and 2/3 happened.
    found = calibration.reliability(told, happened, bins=4)
    np.testing.assert_allclose(found.predicted, [0.115, 2.87 / 3])
    np.testing.assert_allclose(found.happened, [1 / 2, 2 / 3])
    np.testing.assert_array_equal(found.count, [2, 3])
    expected = 2 / 5 * abs(0.115 - 0.5) + 3 / 5 * abs(2.87 / 3 - 2 / 3)
    assert found.error == pytest.approx(expected)
    assert found.mean_predicted == pytest.approx(told.mean())
    assert found.mean_happened == pytest.approx(3 / 5)


def test_reliability_of_nothing_is_nan_not_zero():
    found = calibration.reliability(np.zeros(0), np.zeros(0, bool))
    assert found.count.size == 0 and np.isnan([found.error, found.mean_predicted]).all()


def test_only_cycles_that_had_the_draft_count():
    told = np.full((6, 2), 0.5)
    accepted, drafted = np.array([1, 0, 1, 0, 1, 0]), np.array([1, 1, 1, 1, 1, 1])
    with pytest.raises(ValueError, match="draft 2 was in play in none of 6 cycles"):
        calibration.fit_temperatures(told, accepted, drafted)


def test_what_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        calibration.fit_temperatures(np.full((2, 1), np.nan), np.zeros(2, int), np.ones(2, int))


# --- in a drafter ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafter(tiny):
    return dspark.from_config(
        tiny, 0, np.zeros(61, int), mask_token=60, num_layers=1, block_size=3, taps=(0, 1),
        markov_rank=8,
    )  # fmt: skip


def test_temperatures_of_confidence(tiny, drafter):
    """Logits are divided by them, slot by slot; the last is that of all further slots."""
    cold = dataclasses.replace(drafter.drafter, confidence_temperatures=(2.0, 0.5))
    options = {"max_new_tokens": 1}
    prompt = PROMPTS[2]
    raw = specjax.decode(tiny, drafter, prompt, **options).confidence[0]
    scaled = specjax.decode(
        tiny, dataclasses.replace(drafter, drafter=cold), prompt, **options
    ).confidence[0]
    logits = np.log(raw / (1 - raw))
    np.testing.assert_allclose(scaled, 1 / (1 + np.exp(-logits / [2.0, 0.5, 0.5])), rtol=1e-4)


def test_temperatures_are_exported_and_forgotten_where_training_goes_on(tiny, drafter, tmp_path):
    cold = dataclasses.replace(drafter.drafter, confidence_temperatures=(2.0, 0.5))
    dspark.export(dataclasses.replace(drafter, drafter=cold), tiny, tmp_path)
    assert dspark.load(tmp_path, tiny, None).drafter.confidence_temperatures == (2.0, 0.5)
    again = dspark.from_config(tiny, 0, np.zeros(61, int), model=str(tmp_path))
    assert again.drafter.confidence_temperatures == ()


@pytest.mark.parametrize("given", ["2.0", "null", "[0.0]", '["2.0"]', "[-1.0, 1.0]", "[NaN]"])
def test_temperatures_that_are_none(tiny, drafter, tmp_path, given):
    dspark.export(drafter, tiny, tmp_path)
    config = (tmp_path / "config.json").read_text()
    assert config.rstrip().endswith("}")
    changed = config.rstrip()[:-1].rstrip() + f', "confidence_temperatures": {given}}}'
    (tmp_path / "config.json").write_text(changed)
    with pytest.raises(
        ValueError, match=r"confidence_temperatures must be a list of numbers above 0"
    ):
        dspark.load(tmp_path, tiny, None)
