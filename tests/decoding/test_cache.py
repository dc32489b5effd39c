"""The cache in the loop: stale state never matters, it is never copied, programs are reused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import drafters
from specjax.decoding import decode as decoding
from specjax.decoding.autoregressive import PlainState, plain_loop
from specjax.decoding.prefill import prefill, prefill_chunk
from specjax.decoding.speculative import Counts, SpeculativeState, speculative_loop
from specjax.drafters import NGram, dflash, eagle3
from specjax.models.cache import KVCache
from specjax.models.config import ModelConfig
from specjax.models.target import random_target
from specjax.models.transformer import Transformer, causal_mask
from specjax.verification import RULES, greedy
from tests.fakes import PROMPTS, oracle, reference_text

SIZE, BUDGET = 96, 40


def start(target, drafter, prompts=PROMPTS, size=SIZE, budget=BUDGET):
    """A batch after prefill, as `specjax.decode` makes it; but the cache is full of huge values."""
    ids = [np.asarray(prompt, np.int32) for prompt in prompts]
    rows = decoding._rows(ids, np.full(len(ids), budget), size, size)
    empty = jax.tree.map(lambda x: x - 1e30, KVCache.zeros(target.config, size, target.dtype))
    cache, state = decoding._broadcast((empty, ()), len(ids))
    rows, cache, state = prefill(
        target.graphdef, target.params, drafter, (), rows, cache, state,
        longest=max(map(len, ids)),
    )  # fmt: skip
    if drafter is None:
        return PlainState(rows, cache, jnp.int32(0))
    return SpeculativeState(rows, cache, state, Counts.zeros(len(ids), size, drafter), jnp.int32(0))


def run(target, drafter, state, until):
    stops = jnp.zeros(0, jnp.int32)
    if drafter is None:
        return plain_loop(
            target.graphdef, target.params, state, None, None, stops, jnp.int32(until)
        )
    return speculative_loop(
        target.graphdef, target.params, drafter, (), greedy, state, None, None, stops,
        jnp.int32(until), widths=(1, drafter.num_draft_tokens + 1),
    )  # fmt: skip


def poisoned(state):
    """Huge finite values in all rows that are not committed, absurd ids in all unused slots."""
    rows = state.rows
    slots = jnp.arange(SIZE)
    stale = slots >= rows.length[:, None] - 1
    sign = jnp.where(slots % 2 == 0, 1e30, -1e30)[:, None]
    cache = jax.tree.map(lambda x: jnp.where(stale[:, None, :, None], sign, x), state.cache)
    ids = jnp.where(slots % 2 == 0, 2**31 - 1, -(2**31)).astype(jnp.int32)
    tokens = jnp.where(slots >= rows.length[:, None], ids, rows.tokens)
    return dataclasses.replace(state, cache=cache, rows=dataclasses.replace(rows, tokens=tokens))


@pytest.fixture(scope="module")
def texts(tiny):
    return [reference_text(tiny, prompt, BUDGET) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["plain", "ngram", "oracle"])
def test_stale_state_never_matters(tiny, texts, name):
    drafter = {
        "plain": None,
        "ngram": NGram(4),
        "oracle": oracle(texts, num_draft_tokens=4, wrong_at=2),
    }[name]
    state, cycle = start(tiny, drafter), 0
    while state.rows.running.any():
        cycle += 1
        state = run(tiny, drafter, poisoned(state), cycle)
    for tokens, length, prompt, text in zip(
        np.asarray(state.rows.tokens), state.rows.length, PROMPTS, texts, strict=True
    ):
        assert tokens[len(prompt) : length].tolist() == text


def test_cache_equals_a_fresh_prefill_after_every_cycle(tiny, texts):
    drafter = oracle(texts, num_draft_tokens=3, wrong_at=1)
    model = nnx.merge(tiny.graphdef, tiny.params)

    @jax.jit
    def fresh(tokens):
        empty = KVCache.zeros(tiny.config, 1, jnp.float32)
        return model(tokens, jnp.arange(SIZE), empty, jnp.int32(0), causal_mask(SIZE)).rows

    state, cycle = start(tiny, drafter), 0
    while True:
        expected = jax.vmap(fresh)(state.rows.tokens)
        committed = jnp.arange(SIZE) < state.rows.length[:, None] - 1
        for cached, rows in zip(
            jax.tree.leaves(state.cache), jax.tree.leaves(expected), strict=True
        ):
            difference = jnp.where(committed[:, None, :, None], cached - rows, 0)
            # Keys reach ±30; passes of different shapes differ by rounding only.
            assert jnp.abs(difference).max() <= 2e-4
        if not state.rows.running.any():
            break
        cycle += 1
        state = run(tiny, drafter, state, cycle)
    assert cycle >= 10


def temporaries(kind, max_len, sampled, batch=2):
    """Bytes of temporary memory of a compiled loop, and of its attention scores in one layer."""
    config = ModelConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=2,
        num_kv_heads=2, head_dim=128, tie_embeddings=True, context_length=8192,
    )  # fmt: skip
    target = random_target(config)
    counts, small = np.zeros(61, int), {"taps": (0, 1), "num_draft_tokens": 4}
    loaded = {
        "draft_lm": lambda: drafters.draft_lm(target, target, 4),
        "early_exit": lambda: drafters.early_exit(target, 2, 4),
        "eagle3": lambda: eagle3.from_config(target, 0, counts, draft_vocab_size=40, **small),
        "dflash": lambda: dflash.from_config(
            target, 0, counts, mask_token=60, num_layers=2, block_size=5, **small
        ),
    }.get(kind, lambda: None)()
    drafter = {"plain": None}.get(kind, loaded.drafter if loaded else NGram(4))
    params = loaded.params if loaded else ()
    width = {"plain": 1, "prefill": 32}.get(kind, 5)
    rows = decoding._rows([np.ones(3, np.int32)] * batch, np.full(batch, 64), max_len, max_len)
    empty = KVCache.zeros(config, max_len, jnp.float32)
    state = drafter.init_state(max_len) if drafter else ()
    cache, state = decoding._broadcast((empty, state), batch)
    zero, stops = jnp.int32(0), jnp.zeros(0, jnp.int32)
    rule, sampling, keys = greedy, None, None
    if sampled:
        sampling = decoding.sampling_of(batch, 0.8, 20, 0.9, 0.01)
        rule, keys = RULES["token"], decoding._request_keys(jax.random.key(0), batch)
    if kind == "plain":
        lowered = plain_loop.lower(
            target.graphdef, target.params, PlainState(rows, cache, zero), sampling, keys, stops,
            zero,
        )  # fmt: skip
    elif kind != "prefill":
        carry = SpeculativeState(rows, cache, state, Counts.zeros(batch, 64, drafter), zero)
        lowered = speculative_loop.lower(
            target.graphdef, target.params, drafter, params, rule, carry, sampling, keys, stops,
            zero, widths=(1, 5),
        )  # fmt: skip
    else:
        lowered = prefill_chunk.lower(
            target.graphdef, target.params, drafter, (), rows, cache, state, zero, size=width
        )
    memory = lowered.compile().memory_analysis()
    return memory.temp_size_in_bytes, 4 * batch * config.num_heads * width * max_len


@pytest.mark.parametrize(
    ("kind", "sampled"),
    [
        ("prefill", False),
        *((kind, False) for kind in ("plain", "draft_lm", "eagle3")),
        *(
            pytest.param(kind, False, marks=pytest.mark.slow)
            for kind in ("ngram", "early_exit", "dflash")
        ),
        *(
            pytest.param(kind, True, marks=pytest.mark.slow)
            for kind in ("plain", "draft_lm", "dflash")
        ),
    ],
)
def test_no_cache_is_ever_copied(kind, sampled):
    small, small_scores = temporaries(kind, 512, sampled)
    large, large_scores = temporaries(kind, 4096, sampled)
    one_array = 4 * 2 * 2 * 128 * (4096 - 512)  # what one copied K or V of one layer would add
    allowed = 3 * (large_scores - small_scores) + 2**17  # scores, their exponentials, token slots
    assert large - small <= allowed < one_array


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_programs_are_reused(tiny, monkeypatch, temperature):
    """One trace per (bucket, batch, drafter, widths), whatever prompts, budgets, temperature, key."""
    traces = []
    call = Transformer.__call__

    def counted(self, tokens, *rest, **options):
        traces.append(tokens.shape)
        return call(self, tokens, *rest, **options)

    monkeypatch.setattr(Transformer, "__call__", counted)
    jax.clear_caches()
    options = {"temperature": temperature, "key": jax.random.key(0)}
    others = {"temperature": 2 * temperature, "key": jax.random.key(1)}
    specjax.decode(tiny, NGram(3), PROMPTS[:2], max_new_tokens=20, **options)
    # A prefill chunk, and one pass for each of the two widths.
    assert sorted(traces) == [(1,), (4,), (32,)]
    del traces[:]
    for prompts, budget in ((PROMPTS[1:3], 9), (PROMPTS[3:], 60), ([[1], [2]], [1, 2])):
        for stops in ([], [7], [7, 8, 9]):
            specjax.decode(
                tiny, NGram(3), prompts, max_new_tokens=budget, stop_tokens=stops, **others
            )
    assert traces == []
    specjax.decode(tiny, None, PROMPTS[:2], max_new_tokens=20, **options)
    assert sorted(traces) == [(1,), (32,)]


@pytest.mark.parametrize("drafter", [None, NGram(3)])
def test_one_cache_is_alive_while_decoding(tiny, drafter):
    """Arrays that are alive during prefill and decoding: the state, and no second cache."""
    before = sum(x.nbytes for x in jax.live_arrays())
    alive = []

    def progress(*_):
        alive.append(sum(x.nbytes for x in jax.live_arrays()) - before)

    specjax.decode(tiny, drafter, PROMPTS, max_new_tokens=40, max_len=2048, progress=progress)
    cache = 2 * 3 * len(PROMPTS) * 2 * 2048 * 8 * 4  # K and V, layers, rows, groups, S, head_dim
    assert len(alive) >= 3
    assert max(alive) < 1.5 * cache
