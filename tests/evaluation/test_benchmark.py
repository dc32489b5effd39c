"""The figures of a breakdown by hand, and that its parts run what the decode loop runs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import NGram
from specjax.evaluation import benchmark
from specjax.evaluation.benchmark import Breakdown, Timing, breakdown, simulated
from specjax.models.shapes import SHAPES
from specjax.models.target import Target
from specjax.noise import Noise
from specjax.types import Draft
from specjax.verification import greedy


def exactly(seconds):
    return Timing(seconds, seconds, seconds)


def test_figures_by_hand():
    result = Breakdown(
        plain=exactly(0.010), cycle=exactly(0.025), draft=exactly(0.004), verify=exactly(0.020),
        tau=3.0, weight_bytes=200_000_000, read_bandwidth=exactly(40e9),
    )  # fmt: skip
    assert result.bandwidth_share == pytest.approx(0.5)  # 20 GB/s of 40
    assert result.overhead_share == pytest.approx(0.04)  # 1 ms of 25
    assert result.speedup == pytest.approx(1.2)  # 3 tokens in 25 ms against 30 ms
    assert result.predicted_speedup == pytest.approx(1.25)
    assert result.measured_over_predicted == pytest.approx(0.96)


def test_simulated_acceptance_is_geometric():
    draft = Draft(jnp.zeros(3, jnp.int32), None, jnp.int32(3))
    logits = jnp.zeros((4, 5))

    @jax.jit
    @jax.vmap
    def accepted(index):
        noise = Noise(jax.random.fold_in(jax.random.key(0), index), jnp.int32(9))
        return simulated(0.7)(draft, logits, None, noise).accepted

    counts = np.bincount(np.asarray(accepted(jnp.arange(20_000))), minlength=4)
    expected = 20_000 * np.array([0.3, 0.21, 0.147, 0.343])
    assert ((counts - expected) ** 2 / expected).sum() < 31  # 3 degrees: p = 8e-7


@pytest.mark.parametrize(("alpha", "tau"), [(0.0, 1.0), (1.0, 4.0)])
def test_tau_follows_the_simulated_acceptance(tiny, alpha, tau, monkeypatch):
    """A drafter that always drafts, a rule that takes all or nothing."""
    import specjax.drafters as drafters

    loaded = drafters.early_exit(tiny, 1, 3)
    result = breakdown(
        tiny, loaded.drafter, loaded.params, simulated(alpha), batch=2, max_len=64, length=8,
        steps=4, repeats=2,
    )  # fmt: skip
    assert result.tau == tau
    for part in ("plain", "cycle", "draft", "verify"):
        timing = getattr(result, part)
        assert 0 < timing.fastest <= timing.median <= timing.slowest


def test_weight_bytes_are_what_a_step_reads(tiny):
    """Of an untied embedding a step reads one row only."""
    options = {"max_len": 64, "length": 8, "steps": 2, "repeats": 1}
    everything = sum(x.nbytes for x in jax.tree.leaves(tiny.params))
    result = breakdown(tiny, NGram(2), (), greedy, **options)
    assert result.weight_bytes == everything - 61 * 32 * 4
    config = dataclasses.replace(tiny.config, tie_embeddings=True)
    params = {key: value for key, value in tiny.params.items() if key != "head_weight"}
    result = breakdown(Target("tied", config, params), NGram(2), (), greedy, **options)
    assert result.weight_bytes == everything - 61 * 32 * 4


def test_rows_must_have_room(tiny):
    with pytest.raises(ValueError, match="16 cycles of K=8 need max_len ≥ 208, got 128"):
        breakdown(tiny, NGram(8), (), greedy, max_len=128)


def test_parts_depend_on_their_steps(tiny):
    """No step can be hoisted out of its loop: the result changes with their number."""
    rng = np.random.default_rng(0)
    from specjax.decoding import decode as decoding
    from specjax.models.cache import KVCache

    rows = decoding._rows([rng.integers(0, 61, 8)], np.array([40]), 64, 64)
    cache = decoding._broadcast(KVCache.zeros(tiny.config, 64, jnp.float32), 1)
    keys = jax.random.split(jax.random.key(0), 1)
    tokens = [
        benchmark.verify_alone(
            tiny.graphdef, tiny.params, greedy, (), rows, cache, None, keys, k=2, steps=steps
        ).tolist()
        for steps in range(1, 8)
    ]
    assert len({tuple(x) for x in tokens}) > 1


@pytest.mark.parametrize(
    ("name", "billions"),
    [("smollm2_135m", 0.1345), ("qwen3_0_6b", 0.596), ("qwen3_8b", 8.19), ("llama31_8b", 8.03)],
)
def test_shapes_have_the_published_size(name, billions):
    from flax import nnx

    from specjax.models.transformer import Transformer

    model = nnx.eval_shape(lambda: Transformer(SHAPES[name], rngs=nnx.Rngs(0)))
    count = sum(np.prod(x.shape) for x in jax.tree.leaves(nnx.state(model)))
    assert count / 1e9 == pytest.approx(billions, rel=0.003)
