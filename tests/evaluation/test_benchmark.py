"""The figures of a breakdown by hand, and that its parts run what the decode loop runs."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters
from specjax.decoding import decode as decoding
from specjax.drafters import NGram
from specjax.evaluation import benchmark
from specjax.evaluation.benchmark import Breakdown, Simulated, Timing, breakdown
from specjax.evaluation.speedup import Costs
from specjax.models.cache import KVCache
from specjax.models.shapes import SHAPES
from specjax.models.target import Target
from specjax.noise import Noise
from specjax.sampling import Sampling
from specjax.types import Draft, Rule
from specjax.verification import RULES, greedy
from tests.fakes import count_draft_passes


def exactly(seconds):
    return Timing(seconds, seconds, seconds)


def test_figures_by_hand():
    result = Breakdown(
        plain=exactly(0.010), cycle=exactly(0.025), draft=exactly(0.004), verify=exactly(0.020),
        rule=exactly(0.001), tau=3.0, weight_bytes=200_000_000, read_bandwidth=exactly(40e9),
    )  # fmt: skip
    assert result.bandwidth_share == pytest.approx(0.5)  # 20 GB/s of 40
    assert result.overhead_share == pytest.approx(0.04)  # 1 ms of 25
    assert result.rule_share == pytest.approx(0.04)
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
        return Simulated(0.7)(draft, logits, None, noise).node

    counts = np.bincount(np.asarray(accepted(jnp.arange(20_000))), minlength=4)
    expected = 20_000 * np.array([0.3, 0.21, 0.147, 0.343])
    assert ((counts - expected) ** 2 / expected).sum() < 31  # 3 degrees: p = 8e-7


def test_costs_of_all_lengths_are_measured_in_turn(tiny, monkeypatch):
    """One plain step for all of them, in the same rounds; a slow run in seven moves nothing."""
    taken = []

    def in_turn(parts, repeats):
        taken.extend(parts)
        seconds = {"plain": 2.0, (1, "draft"): 3.0, (1, "verify"): 4.0, (2, "draft"): 5.0}
        return {name: [seconds.get(name, 8.0)] * (repeats - 1) + [1000.0] for name in parts}

    monkeypatch.setattr(benchmark, "_in_turn", in_turn)
    pairs = {k: (NGram(k), ()) for k in (1, 2)}
    costs = benchmark.costs(tiny, pairs, greedy, max_len=80, steps=2)
    assert taken == ["plain", (1, "draft"), (1, "verify"), (2, "draft"), (2, "verify")]
    assert costs == {1: Costs(1.0, 1.5, 2.0), 2: Costs(1.0, 2.5, 4.0)}


def test_runs_of_two_kinds_count_as_both():
    assert benchmark._middle([1.0, 3.0, 1.0, 3.0, 9.0]) == pytest.approx(7 / 3)
    assert benchmark._middle([4.0]) == 4.0


@pytest.mark.parametrize(("alpha", "tau"), [(0.0, 1.0), (1.0, 4.0)])
def test_tau_follows_the_simulated_acceptance(tiny, alpha, tau, monkeypatch):
    """A drafter that always drafts, a rule that takes all or nothing."""
    loaded = drafters.early_exit(tiny, 1, 3)
    result = breakdown(
        tiny, loaded.drafter, loaded.params, Rule(Simulated(alpha)), batch=2, max_len=64, length=8,
        steps=4, repeats=2,
    )  # fmt: skip
    assert result.tau == tau
    for part in ("plain", "cycle", "draft", "verify"):
        timing = getattr(result, part)
        assert 0 < timing.fastest <= timing.median <= timing.slowest


def test_a_simulated_rule_has_the_tau_of_its_alpha_with_any_drafter(tiny):
    """A drafter that hardly ever finds a match: each of its drafts counts as K tokens all the same."""
    k, alpha, batch, steps = 3, 0.7, 128, 12
    result = breakdown(
        tiny, NGram(k, min_ngram=3), (), Rule(Simulated(alpha)), batch=batch, max_len=64, length=8,
        steps=steps, repeats=1,
    )  # fmt: skip
    committed = 1 + np.arange(k + 1)
    law = alpha ** np.arange(k + 1) * np.append(np.full(k, 1 - alpha), 1)
    tau = (1 - alpha ** (k + 1)) / (1 - alpha)
    assert law @ committed == pytest.approx(tau)
    error = np.sqrt((law @ committed**2 - tau**2) / (batch * steps))
    assert abs(result.tau - tau) < 5 * error


def watch_parts(monkeypatch, look):
    """Calls `look` with the arguments of every part that is timed, before it runs."""

    def watched(call, *arguments, **options):
        look(arguments)
        return call(*arguments, **options)

    for name in ("plain_loop", "speculative_loop", "draft_alone", "verify_alone"):
        part = functools.partial(watched, getattr(benchmark, name))
        monkeypatch.setattr(benchmark, name, part)


@pytest.mark.slow
def test_sampling_reaches_every_part(tiny, monkeypatch):
    seen = []
    watch_parts(monkeypatch, lambda arguments: seen.append(
        [x for x in arguments if isinstance(x, Sampling)]))  # fmt: skip
    loaded = drafters.draft_lm(tiny, tiny, 2)
    result = breakdown(
        tiny, loaded.drafter, loaded.params, RULES["token"], batch=2, max_len=64, length=8, steps=8,
        repeats=1, temperature=0.8, top_k=20, top_p=0.9,
    )  # fmt: skip
    for (sampling,) in seen:
        assert sampling.temperature.tolist() == [np.float32(0.8)] * 2
        assert sampling.top_k.tolist() == [20, 20]
        assert sampling.top_p.tolist() == [np.float32(0.9)] * 2 and sampling.min_p is None
    assert len(seen) == 8
    assert 1 < result.tau <= 3
    with pytest.raises(ValueError, match="temperature must be at least 0, got -1"):
        breakdown(tiny, NGram(2), (), greedy, temperature=-1)


@pytest.mark.slow
def test_a_narrow_cycle_drafts_little(tiny, monkeypatch):
    """The costs that a controller is told hold a draft of w − 1 tokens for every width w."""
    taken, _ = count_draft_passes(monkeypatch)
    loaded = drafters.early_exit(tiny, 1, 2)
    steps, repeats = 3, 1
    seconds = benchmark.cycle_seconds(
        tiny, loaded.drafter, (), greedy, batch=2, max_len=64, steps=steps, repeats=repeats
    )
    jax.effects_barrier()
    assert list(seconds) == [1, 2, 3]
    assert len(taken) == steps * (repeats + 1) * (0 + 1 + 2)


@pytest.mark.slow
def test_all_is_prepared_before_the_clock_starts(tiny, monkeypatch):
    """On a device that works asynchronously the making of caches would be timed, too."""
    ready, kept, wait = set(), [], jax.block_until_ready

    def waited(tree):
        kept.append(jax.tree.leaves(tree))  # alive, so that no id comes twice
        ready.update(map(id, kept[-1]))
        return wait(tree)

    monkeypatch.setattr(jax, "block_until_ready", waited)

    def look(arguments):
        arrays = [x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array)]
        assert arrays and ready.issuperset(map(id, arrays))

    watch_parts(monkeypatch, look)
    breakdown(tiny, NGram(2), (), greedy, max_len=64, length=8, steps=2, repeats=1)


@dataclasses.dataclass(frozen=True)
class Reporting(NGram):
    """Drafts with a log q whose largest entry is −3."""

    def propose(self, *arguments):
        draft, state = super().propose(*arguments)
        log_q = jnp.full((self.num_draft_tokens, 61), -jnp.inf).at[:, 7].set(-3)
        return dataclasses.replace(draft, log_q=log_q), state


def test_drafting_alone_computes_log_q(tiny):
    """What it returns depends on every log q, so that XLA cannot leave them out."""
    rows = decoding._rows([np.arange(8)] * 2, np.array([40, 40]), 64, 64)
    cache = decoding._broadcast(KVCache.zeros(tiny.config, 64, jnp.float32), 2)
    keys = jax.random.split(jax.random.key(0), 2)
    arguments = rows, cache, (), None, keys
    _, read = benchmark.draft_alone(tiny.params, Reporting(3), (), greedy, *arguments, steps=5)
    assert read == -3 * 2 * 3 * 5  # rows, K, steps


@pytest.mark.slow
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
    rows = decoding._rows([rng.integers(0, 61, 8)], np.array([40]), 64, 64)
    cache = decoding._broadcast(KVCache.zeros(tiny.config, 64, jnp.float32), 1)
    keys = jax.random.split(jax.random.key(0), 1)
    draft = Draft(jnp.zeros((1, 2), jnp.int32), None, jnp.full(1, 2, jnp.int32))
    tokens = [
        benchmark.verify_alone(
            tiny.graphdef, tiny.params, greedy, (), rows, cache, draft, None, keys, steps=steps
        ).tolist()
        for steps in range(1, 8)
    ]
    assert len({tuple(x) for x in tokens}) > 1


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2_135m", 0.1345),
        ("qwen25_1_5b", 1.544),
        ("qwen3_0_6b", 0.596),
        ("qwen3_8b", 8.19),
        ("llama31_8b", 8.03),
    ],
)
def test_shapes_have_the_published_size(name, billions):
    from flax import nnx

    from specjax.models.transformer import Transformer

    model = nnx.eval_shape(lambda: Transformer(SHAPES[name], rngs=nnx.Rngs(0)))
    count = sum(np.prod(x.shape) for x in jax.tree.leaves(nnx.state(model)))
    assert count / 1e9 == pytest.approx(billions, rel=0.003)
