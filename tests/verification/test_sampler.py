"""The sampler that turns a law into a verdict: its edges, its law, and its noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.noise import Noise
from specjax.sampling import draw, invert, sample
from specjax.types import Draft
from specjax.verification.law import sample_verdict
from specjax.verification.token import token_law


@pytest.mark.parametrize("uniform", [0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))])
def test_the_sampler_takes_only_what_has_mass(uniform):
    u = jnp.float32(uniform)
    for weights, allowed in (
        ([0, 0, 1, 0], {2}),
        ([0, 1e-30, 0, 0], {1}),
        ([1, 0, 0, 0], {0}),
        ([0, 0, 0, 1], {3}),
        ([0, 0.25, 0, 0.75, 0], {1, 3}),
    ):
        weights = jnp.asarray(weights, jnp.float32)
        assert int(invert(weights, u)) in allowed
        assert int(draw(weights, jnp.stack([u, u]), block=2)) in allowed
        assert int(draw(weights, jnp.stack([u, u]))) in allowed


def test_u_zero_does_not_accept_what_has_probability_zero():
    """u < p is strict: u = 0 must not accept where p = 0, nor reject where p = 1."""
    assert int(invert(jnp.array([1.0, 0.0]), jnp.float32(0))) == 0
    assert int(invert(jnp.array([0.0, 1.0]), jnp.float32(0))) == 1


def test_draw_has_the_law_of_its_weights():
    """The inverse of the running sums, at a grid of uniforms finer than the weights."""
    weights = jnp.asarray(np.random.default_rng(0).dirichlet([0.3] * 11))
    grid = (jnp.arange(400) + 0.5) / 400
    pairs = jnp.stack(jnp.meshgrid(grid, grid), -1).reshape(-1, 2)
    drawn = jax.vmap(lambda u: draw(weights, u, block=4))(pairs)
    counts = np.bincount(np.asarray(drawn), minlength=11) / len(pairs)
    np.testing.assert_allclose(counts, weights, atol=3 / 400)


@pytest.mark.parametrize("reused", [False, True])
def test_reused_draft_noise_is_caught(reused):
    """The first token of draft and verdict together has law p; not if they share their noise."""
    log_q = jnp.log(jnp.array([0.7, 0.1, 0.05, 0.15]))
    log_p = jnp.log(jnp.array([0.1, 0.1, 0.4, 0.4]))
    n = 40_000

    @jax.jit
    @jax.vmap
    def first_tokens(index):
        noise = Noise(jax.random.fold_in(jax.random.key(4), index), jnp.int32(2))
        token = sample(log_q, noise.draft_gumbel(0, 0, 4))
        draft = Draft(token[None].astype(jnp.int32), log_q[None], jnp.int32(1))
        law = token_law(draft, jnp.stack([log_p, log_p]))
        verdict = sample_verdict(law, noise)
        correction = verdict.next_token
        if reused:
            weights = jnp.log(law.next_weights(verdict.node))
            correction = sample(weights, noise.draft_gumbel(0, 0, 4))
        return jnp.where(verdict.node > 0, token, correction)

    counts = np.bincount(np.asarray(first_tokens(jnp.arange(n))), minlength=4)
    expected = n * np.exp(log_p)
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert (statistic > 31) == reused  # 3 degrees of freedom: p = 8e-7
