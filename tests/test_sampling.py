"""Processed distributions against a sort, by hand, and at ties."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.noise import Noise, Role
from specjax.sampling import Sampling, invert, log_probs, sample


def by_sorting(logits, temperature, top_k, top_p, min_p):
    """The same order of filters, on sorted float64 values; no ties."""
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    scaled = np.asarray(logits, np.float64) / temperature
    keep = np.ones(len(logits), bool)
    if top_k:
        keep &= scaled >= np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1]
    probs = np.where(keep, np.exp(scaled - scaled.max()), 0)
    probs /= probs.sum()
    if top_p < 1:
        order = np.argsort(-probs)
        mass_before = np.cumsum(probs[order]) - probs[order]
        keep[order[mass_before >= top_p]] = False
    keep &= probs >= min_p * probs.max()
    probs = np.where(keep, probs, 0)
    return probs / probs.sum()


def parameters(temperature, top_k=0, top_p=1.0, min_p=0.0):
    return Sampling(
        jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p)
    )


@pytest.mark.parametrize("seed", range(12))
def test_filters_equal_sorting(seed):
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(2, 200))
    logits = (rng.normal(size=vocab) * rng.uniform(0.1, 8)).astype(np.float32)
    process = jax.jit(log_probs)
    for temperature in (0.0, 0.3, 1.0, 4.0):
        for top_k in (0, 1, 5, vocab, 10 * vocab):
            for top_p in (1.0, 0.9, 0.35, 1e-6):
                for min_p in (0.0, 0.05, 0.9):
                    options = temperature, top_k, top_p, min_p
                    got = np.exp(process(logits, parameters(*options)))
                    np.testing.assert_allclose(got, by_sorting(logits, *options), atol=2e-6)


def test_filters_that_nobody_uses_may_be_absent():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=50), jnp.float32)
    np.testing.assert_allclose(
        log_probs(logits, Sampling(jnp.float32(0.7))),
        log_probs(logits, parameters(0.7)),
        atol=1e-6,
    )


def test_ties_at_a_threshold_are_all_kept():
    logits = jnp.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    kept = np.isfinite(log_probs(logits, parameters(1.0, top_k=2)))
    assert kept.tolist() == [False, True, True, True, True, False]
    equal = log_probs(jnp.zeros(8), parameters(1.0, top_p=0.3))
    np.testing.assert_allclose(equal, np.log(np.full(8, 1 / 8)), atol=1e-6)


def test_temperature_zero_is_one_hot_at_the_lowest_of_equals():
    rows = log_probs(jnp.array([2.0, 5.0, 5.0, -jnp.inf]), parameters(0.0, top_k=3, top_p=0.5))
    assert rows.tolist() == [-jnp.inf, 0.0, -jnp.inf, -jnp.inf]


def test_excluded_tokens_stay_excluded():
    logits = jnp.array([0.0, -jnp.inf, 1.0, -jnp.inf])
    for options in ({}, {"top_k": 4}, {"top_p": 0.999999}, {"min_p": 1e-9}):
        probs = np.exp(log_probs(logits, parameters(1.0, **options)))
        assert probs[1] == probs[3] == 0
        assert probs.sum() == pytest.approx(1, abs=1e-6)


def test_logits_of_half_precision_are_processed_in_float32():
    assert log_probs(jnp.zeros(4, jnp.bfloat16), parameters(1.0)).dtype == jnp.float32


def test_gumbel_max_has_the_law_of_its_row():
    log_p = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1, 0.0]))
    n = 40_000
    noise = Noise(jax.random.key(0), jnp.int32(3))
    drawn = jax.vmap(lambda i: sample(log_p, noise.token_gumbel(i, 5)))(jnp.arange(n))
    counts, expected = np.bincount(drawn, minlength=5), n * np.exp(log_p)
    assert counts[4] == 0
    assert ((counts - expected)[:4] ** 2 / expected[:4]).sum() < 31  # 3 degrees: p = 8e-7


def test_no_token_without_mass_is_drawn():
    """Also where a long sum rises by rounding alone, between blocks of nothing."""
    weights = jnp.zeros(70_000).at[jnp.array([3, 40_000, 69_000])].set(jnp.array([1e-7, 1.0, 0.3]))
    for uniform in (0.0, 1e-8, 1e-7, 0.5, 0.769, 0.7693, 0.99999994):
        assert int(invert(weights, jnp.float32(uniform))) in (3, 40_000, 69_000)


@pytest.mark.slow
def test_rare_tokens_are_drawn_as_often_as_they_should():
    """Tokens of 1e-7 each, 2e-3 together: float32's usual Gumbel noise draws less than half."""
    log_p = jnp.log(jnp.append(jnp.full(20_000, 1e-7), 0.998))
    noise = Noise(jax.random.key(1), jnp.int32(0))
    draws = jax.jit(lambda i: sample(log_p, noise.token_gumbel(i, 20_001)))
    rare = sum(int(draws(i)) < 20_000 for i in range(20_000))
    assert 40 - 5 * 40**0.5 < rare < 40 + 5 * 40**0.5


@pytest.mark.parametrize(
    ("logits", "options"),
    [
        ([500.0, 1.0, 499.0], {"temperature": 1e-36}),
        ([50.0, 1.0], {"temperature": 2e-38}),
        ([3.0, 2.0, 1.0], {"temperature": 1.0, "top_p": 1e-38}),
        ([3.0, 2.0, 1.0], {"temperature": 1.0, "top_k": 2**31 - 1}),
    ],
)
def test_extreme_parameters_leave_the_likeliest_token(logits, options):
    probs = np.exp(log_probs(jnp.array(logits), parameters(**options)))
    assert probs[0] > 0.6 and probs.sum() == pytest.approx(1, abs=1e-6)


def test_noise_has_roles():
    """Different roles, slots, positions and requests share nothing; equal ones everything."""

    def bits(key):
        return jax.random.key_data(key).tolist()

    request = jax.random.key(1)
    keys = {
        (int(position), int(role), slot): bits(
            Noise(request, jnp.int32(position)).cycle_key(role, slot)
        )
        for position in (4, 5)
        for role in Role
        for slot in (0, 1)
    }
    assert len({tuple(value) for value in keys.values()}) == len(keys)
    noise = Noise(request, jnp.int32(4))
    # Token noise belongs to the token's position, whichever cycle asks.
    later = Noise(request, jnp.int32(6))
    assert noise.token_gumbel(jnp.int32(7), 9).tolist() == later.token_gumbel(7, 9).tolist()
    assert noise.draft_gumbel(0, 0, 9).tolist() != noise.token_gumbel(jnp.int32(5), 9).tolist()
    other = Noise(jax.random.key(2), jnp.int32(4))
    assert bits(other.cycle_key(Role.DRAFT)) != bits(noise.cycle_key(Role.DRAFT))
