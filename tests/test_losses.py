"""Divergences: values by hand, gradients in closed form and by differences, saturation, chunks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import losses

RNG = np.random.default_rng(0)
P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
BY_HAND = {
    "forward_kl": 0.5 * np.log(2.5) + 0.2 * np.log(0.4),
    "reverse_kl": 0.2 * np.log(0.4) + 0.5 * np.log(2.5),
    "jensen_shannon": 0.5 * np.log(0.5 / 0.35) + 0.2 * np.log(0.2 / 0.35),
    "total_variation": 0.3,
}


def softmax(z):
    return np.exp(z - z.max()) / np.exp(z - z.max()).sum()


@pytest.mark.parametrize("name", BY_HAND)
def test_values_by_hand(name):
    value = losses.DIVERGENCES[name](jnp.log(P) + 3, jnp.log(Q) - 2)
    assert float(value) == pytest.approx(BY_HAND[name], rel=1e-6)
    assert value.dtype == jnp.float32


def test_the_hybrid_goes_from_kl_to_tv():
    share = np.exp(-3 * 0.7)
    expected = share * BY_HAND["forward_kl"] + (1 - share) * 0.3
    assert float(losses.lk_hybrid(jnp.log(P), jnp.log(Q))) == pytest.approx(expected, rel=1e-6)


def closed_forms(p, q):
    below = q < p
    mean = 0.5 * (p + q)
    kl_qm = (q * np.log(q / mean)).sum()
    return {
        "forward_kl": q - p,
        "reverse_kl": q * (np.log(q / p) - (q * np.log(q / p)).sum()),
        "jensen_shannon": 0.5 * q * (np.log(q / mean) - kl_qm),
        "total_variation": -q * (below - (q * below).sum()),
    }


@pytest.mark.parametrize("name", BY_HAND)
def test_gradients_in_closed_form_and_by_differences(name):
    with jax.enable_x64(True):
        for scale in (1.0, 5.0):
            z, t = RNG.normal(0, scale, 7), RNG.normal(0, scale, 7)
            loss = losses.DIVERGENCES[name]
            gradient = np.asarray(jax.grad(loss, 1)(jnp.asarray(t), jnp.asarray(z)))
            np.testing.assert_allclose(
                gradient, closed_forms(softmax(t), softmax(z))[name], atol=1e-12
            )
            for i in range(7):
                step = 1e-6 * np.eye(7)[i]
                rise = (loss(t, z + step) - loss(t, z - step)) / 2e-6
                assert gradient[i] == pytest.approx(float(rise), abs=1e-8)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_saturated_logits_have_finite_gradients(name):
    tokens = jnp.int32(0)
    for z in ([80.0, 0, -80], [-80.0, 0, 80], [1e4, 0.0, -1e4]):
        for t in ([80.0, 0, -80], [0.0, 0, 0], [-1e4, 1e4, 0.0]):

            def loss(z, t=t):
                return losses.token_losses((name,), tokens, jnp.array(t), z)[name]

            value, gradient = jax.value_and_grad(loss)(jnp.array(z))
            assert np.isfinite(value) and np.isfinite(gradient).all()


def test_tokens_that_both_exclude_count_nowhere():
    t, z = jnp.log(jnp.array(P)), jnp.log(jnp.array(Q))
    masked = [jnp.append(x, -jnp.inf) for x in (t, z)]
    for name, loss in losses.DIVERGENCES.items():
        assert float(loss(*masked)) == pytest.approx(float(loss(t, z)), rel=1e-6), name
        gradient = jax.grad(loss, 1)(*masked)
        assert np.isfinite(gradient).all(), name
        np.testing.assert_allclose(gradient[:3], jax.grad(loss, 1)(t, z), atol=1e-6)


def test_alpha_is_the_overlap():
    values = losses.token_losses((), jnp.int32(0), jnp.log(P), jnp.log(Q))
    assert float(values["alpha"]) == pytest.approx(0.7)
    with pytest.raises(ValueError, match="unknown loss 'kl'; known: forward_kl"):
        losses.Losses(("kl",))


@pytest.mark.parametrize(("chunk", "remat"), [(1, True), (4, True), (5, False), (64, False)])
def test_chunks_change_nothing(chunk, remat):
    """Nor what lies where the weight is 0: NaN neither in value nor in gradient."""
    hidden = jnp.asarray(RNG.normal(size=(13, 4)), jnp.float32)
    head = jnp.asarray(RNG.normal(size=(9, 4)), jnp.float32)
    target = jnp.asarray(RNG.normal(size=(13, 9)), jnp.float32).at[3].set(jnp.nan)
    weights = jnp.asarray(RNG.uniform(size=13), jnp.float32).at[3].set(0)

    def loss(head):
        def one(target, hidden):
            return {"kl": losses.forward_kl(target, hidden @ head.T)}

        total, weight = losses.weighted_sums(
            one, weights, target, hidden, chunk=chunk, remat=remat
        )["kl"]
        return total / weight

    keep = np.arange(13) != 3

    def whole(head):
        values = losses.forward_kl(target[keep], hidden[keep] @ head.T)
        return (weights[keep] * values).sum() / weights.sum()

    for one, other in zip(*(jax.value_and_grad(f)(head) for f in (loss, whole)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_logits_of_all_tokens_never_exist():
    """Compiled memory of value and gradient: a few chunks, far below one [T, V]."""
    tokens, vocab, chunk = 2048, 8192, 64

    @jax.jit
    def step(hidden, head, target_hidden, weights):
        def loss(hidden):
            def one(hidden, target_hidden):
                return {"kl": losses.forward_kl(target_hidden @ head.T, hidden @ head.T)}

            return losses.weighted_sums(one, weights, hidden, target_hidden, chunk=chunk)["kl"][0]

        return jax.value_and_grad(loss)(hidden)

    array = jax.ShapeDtypeStruct
    shapes = [(tokens, 32), (vocab, 32), (tokens, 32), (tokens,)]
    compiled = step.lower(*(array(shape, jnp.float32) for shape in shapes)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5 * tokens * vocab * 4
