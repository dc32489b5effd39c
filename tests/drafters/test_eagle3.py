"""EAGLE-3: as `speculators` computes it, decoding what it trains, and lossless."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax import drafters
from specjax.decoding import decode as decoding
from specjax.decoding.prefill import prefill
from specjax.decoding.speculative import Counts, SpeculativeState, speculative_loop
from specjax.distillation import features
from specjax.distillation.trainer import replayed
from specjax.drafters import eagle3
from specjax.drafters.eagle3 import network
from specjax.drafters.fusion import folded
from specjax.drafters.vocabulary import DraftVocabulary
from specjax.losses import Losses
from specjax.models.cache import KVCache
from specjax.models.target import Target, random_target
from specjax.models.transformer import logits_of, rotation
from specjax.noise import Noise
from specjax.sampling import Sampling
from specjax.trees import DynamicTree, Tree
from specjax.types import Committed, Context, LoadedDrafter, Trace
from specjax.verification import greedy
from tests.conftest import TINY
from tests.drafters.test_transformer_drafters import joint_law_statistic
from tests.fakes import PROMPTS, reference_text

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
CHAIN = Tree.chain(3)
TREES = {"static": Tree.of_widths((2, 2)), "dynamic": DynamicTree(10, 3, 4)}
KL = Losses(("forward_kl",), False)
SIZE = 128


def with_tree(loaded, tree):
    return dataclasses.replace(loaded, drafter=dataclasses.replace(loaded.drafter, tree=tree))


@functools.partial(jax.jit, static_argnames=("drafter", "steps"))
def unrolled(drafter, params, target_params, trace, steps):
    """Logits `[steps, T, V_d]` of training-time test."""
    head = drafter.model(params, target_params).head
    return jnp.stack([head(x) for x in drafter.ttt_outputs(params, target_params, trace, steps)])


@functools.partial(jax.jit, static_argnames=("drafter",))
def terms_of(drafter, params, target_params, trace):
    return drafter.objective(params, target_params, trace, jax.random.key(0), KL)


@functools.partial(jax.jit, static_argnames=("drafter",))
def observe(drafter, params, target_params, state, committed):
    return drafter.observe(params, target_params, state, committed)


# --- against speculators -----------------------------------------------------------------------------


def golden(name):
    """The folder's drafter, its target, and what `speculators` made of a text."""
    expected = np.load(GOLDEN / name / "expected.npz")
    config = dataclasses.replace(TINY, num_layers=4)
    params = random_target(config).params | {
        "embedding": jnp.asarray(expected["target_embedding"]),
        "head_weight": jnp.asarray(expected["target_head"]),
    }
    target = Target("golden", config, params)
    return eagle3.load(GOLDEN / name, target, CHAIN), target, expected


def golden_trace(expected):
    length = len(expected["tokens"])
    return Trace(
        jnp.asarray(expected["tokens"], jnp.int32), jnp.arange(length), jnp.ones(length, jnp.int32),
        jnp.asarray(expected["loss_mask"], jnp.float32),
        jnp.asarray(expected["features"]), jnp.asarray(expected["target_hidden"]),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["eagle3", "eagle3_qwen3"])
def test_unrolled_logits_and_losses_are_those_of_speculators(name):
    loaded, target, expected = golden(name)
    steps = len(expected["losses"])
    drafter = dataclasses.replace(loaded.drafter, ttt_steps=steps, skip_undraftable=False)
    trace = golden_trace(expected)
    logits = unrolled(drafter, loaded.params, target.params, trace, steps)
    for step in range(steps):
        valid = len(trace.tokens) - 1 - step  # behind them it has read padding
        difference = logits[step, :valid] - expected["logits"][step, :valid]
        assert np.abs(difference).max() <= 1e-4
    terms = terms_of(drafter, loaded.params, target.params, trace)
    total = 0
    for step, wanted in enumerate(expected["losses"]):
        value, weight = terms[f"forward_kl_{step + 1}"]
        assert float(weight) == expected["loss_mask"][1 + step :].sum()
        assert abs(float(value / weight) - wanted) <= 1e-4
        total += drafter.terms_of({"forward_kl": 1})[f"forward_kl_{step + 1}"] * value / weight
    assert abs(float(total) - expected["loss"]) <= 1e-4


def test_only_tokens_whose_likeliest_can_be_drafted_teach():
    loaded, target, expected = golden("eagle3")
    trace = golden_trace(expected)
    terms = terms_of(loaded.drafter, loaded.params, target.params, trace)
    ids = loaded.drafter.vocabulary.array
    logits = (expected["target_hidden"] @ expected["target_head"].T)[1:]
    inside = np.isin(logits.argmax(-1), ids)
    log_p = jax.nn.log_softmax(logits[:, ids])
    log_q = jax.nn.log_softmax(expected["logits"][0])  # row i is of position i + 1
    kl = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
    mask = expected["loss_mask"][1:]
    value, weight = terms["forward_kl_1"]
    assert 0 < (mask & inside).sum() < mask.sum() == float(weight)
    np.testing.assert_allclose(value, (kl * mask * inside).sum(), rtol=1e-4)
    alpha = jnp.minimum(jax.nn.softmax(logits)[:, ids], jnp.exp(log_q)).sum(-1)
    np.testing.assert_allclose(terms["alpha_1"][0], (alpha * mask).sum(), rtol=1e-4)


# --- a drafter that is right sometimes ---------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tiny):
    return [reference_text(tiny, prompt, 40) for prompt in PROMPTS]


def trace_of(target, drafter, prompts, texts, size=80):
    """What the target makes of prompts and their texts, one to a row `[B, size]`."""
    lengths = np.array([[len(p), len(p) + len(t)] for p, t in zip(prompts, texts, strict=True)])
    tokens = np.zeros((len(lengths), size), np.int32)
    for row, prompt, text in zip(tokens, prompts, texts, strict=True):
        row[: len(prompt) + len(text)] = [*prompt, *text]
    slots = np.broadcast_to(np.arange(size, dtype=np.int32), tokens.shape)
    used = slots < lengths[:, 1:]
    batch = {
        "tokens": tokens,
        "loss_mask": used & (slots >= lengths[:, :1]),
        "positions": slots,
        "segments": used.astype(np.int32),
    }
    batch = jax.tree.map(jnp.asarray, batch)
    return jax.jit(features.traces, static_argnums=(0, 2))(
        target.graphdef, target.params, drafter.taps, batch
    )


def row_of(traces, row):
    return jax.tree.map(lambda x: x[row], traces)


@pytest.fixture(scope="module")
def drafter(tiny, texts) -> LoadedDrafter:
    """Trained on half of the texts, and not for long: right now and then."""
    counts = np.bincount(np.concatenate(texts), minlength=61)
    loaded = eagle3.from_config(
        tiny, 0, counts, taps=(0, 1, 2), draft_vocab_size=48, ttt_steps=2, num_draft_tokens=3
    )
    traces = trace_of(tiny, loaded.drafter, PROMPTS[::2], texts[::2])
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params, state):
        def loss(params):
            one = functools.partial(terms_of, loaded.drafter, params, tiny.params)
            terms = jax.vmap(one)(traces)
            return sum(
                factor * terms[name][0].sum() / terms[name][1].sum()
                for name, factor in loaded.drafter.terms_of({"forward_kl": 1}).items()
            )

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    params, state = loaded.params, optimizer.init(loaded.params)
    for _ in range(60):
        params, state, value = step(params, state)
    assert np.isfinite(value)
    return dataclasses.replace(loaded, params=params)


def test_greedy_text_is_plain_text(tiny, drafter, texts):
    for tree in (CHAIN, *TREES.values()):
        result = specjax.decode(tiny, with_tree(drafter, tree), PROMPTS, max_new_tokens=40)
        assert [row.tolist() for row in result.tokens] == texts
        assert 0.1 < result.alpha[0] < 1
    assert result.drafted[1][0] == 0  # a prompt of one token has no features yet


@pytest.mark.parametrize("k", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_greedy_text_of_other_k_and_one_prompt(tiny, drafter, texts, k):
    result = specjax.decode(tiny, with_tree(drafter, Tree.chain(k)), PROMPTS[2], max_new_tokens=40)
    assert result.tokens[0].tolist() == texts[2]


@pytest.mark.parametrize(
    "shape", ["chain", "dynamic", pytest.param("static", marks=pytest.mark.slow)]
)
def test_gumbel_text_is_plain_samplings_text(tiny, drafter, shape):
    options = {
        "max_new_tokens": 40, "temperature": [1, 0.7, 1, 0.7, 1], "top_k": [0, 20, 0, 5, 0],
    }  # fmt: skip
    chosen = with_tree(drafter, {"chain": CHAIN, **TREES}[shape])
    for seed in range(2):
        key = jax.random.key(seed)
        plain = specjax.decode(tiny, None, PROMPTS, key=key, **options)
        result = specjax.decode(tiny, chosen, PROMPTS, key=key, rule="gumbel", **options)
        assert [x.tolist() for x in result.tokens] == [x.tolist() for x in plain.tokens]
        assert result.tau > 1.1


@pytest.mark.slow
def test_joint_law_of_two_tokens_in_the_real_loop(tiny, drafter):
    statistic, limit = joint_law_statistic(tiny, with_tree(drafter, Tree.chain(2)))
    assert statistic < limit


@pytest.mark.slow
def test_joint_law_with_a_dynamic_tree(tiny, drafter):
    chosen = with_tree(drafter, TREES["dynamic"])
    statistic, limit = joint_law_statistic(tiny, chosen, rule="tree_match")
    assert statistic < limit


@pytest.mark.parametrize("rule", ["token", "block", "tree_without_replacement", "tree_traversal"])
def test_rules_that_cannot_verify_a_dynamic_tree_say_so(tiny, drafter, rule):
    options = {"max_new_tokens": 4, "temperature": 1.0, "key": jax.random.key(0), "rule": rule}
    with pytest.raises(ValueError, match="tree"):
        specjax.decode(tiny, with_tree(drafter, TREES["dynamic"]), PROMPTS, **options)


# --- decoded = trained -------------------------------------------------------------------------------


def observed(target, loaded, trace, count, chunk=32):
    """The drafter's state after the first `count` rows of a text, taken in chunks."""
    drafter, state = loaded.drafter, loaded.drafter.init_state(SIZE)
    following = jnp.roll(trace.tokens, -1)
    for start in range(0, count, chunk):
        rows = (x[start : start + chunk] for x in (trace.tokens, trace.features, following))
        size = min(chunk, len(trace.tokens) - start)
        taken = jnp.int32(min(size, count - start))
        committed = Committed(*rows, jnp.int32(start), taken, jnp.arange(size))
        state = observe(drafter, loaded.params, target.params, state, committed)
    return state


def test_unrolled_logits_are_the_decoding_loops(tiny, drafter, texts):
    """Step s of the unroll over what was drafted = the law that depth s was drawn from."""
    depth = 7
    loaded = with_tree(drafter, Tree.chain(depth))
    traces = trace_of(tiny, loaded.drafter, PROMPTS, texts)
    sampling = Sampling(jnp.float32(1.0))
    for row, length in ((0, 12), (2, 35), (2, 40), (3, 20)):
        trace = row_of(traces, row)
        state = observed(tiny, loaded, trace, length - 1)
        context = Context(trace.tokens, jnp.int32(length), None, sampling)
        noise = Noise(jax.random.key(row), jnp.int32(length - 1))
        draft, _ = loaded.drafter.propose(loaded.params, tiny.params, state, context, noise)
        tokens = trace.tokens.at[length : length + depth].set(draft.tokens)
        changed = dataclasses.replace(trace, tokens=tokens)
        logits = unrolled(loaded.drafter, loaded.params, tiny.params, changed, depth)
        trained = loaded.drafter.vocabulary.spread(jax.nn.log_softmax(logits[:, length - 2]))
        inside = np.isfinite(trained)
        np.testing.assert_array_equal(inside, np.isfinite(draft.log_q))
        assert np.abs(trained[inside] - draft.log_q[inside]).max() <= 1e-4
        assert draft.num_valid == depth


def loss_by_one_mask(drafter, params, target_params, trace):
    """The objective's total from textbook pieces: one concatenated attention a step, one big mask."""
    model = drafter.model(params, target_params)
    size = len(trace.tokens)
    slots = jnp.arange(size)
    same = trace.segments[:, None] == trace.segments
    mask = (slots <= slots[:, None]) & same
    hidden, keys, values, total = model.fuse(trace.features), [], [], 0.0
    for step in range(drafter.ttt_steps):
        following = jnp.roll(trace.tokens, -1 - step)
        embedded = drafter.embed(params, target_params, following)
        inputs, stream = model.layer.read(embedded, hidden)
        config = drafter.config
        turn = rotation(config.head_dim, config.rope_theta, (), trace.positions + step)
        queries, k, v = model.layer.project(inputs, *turn)
        keys, values = [*keys, k], [*values, v]
        sees = jnp.concatenate([mask] + [slots == slots[:, None]] * step, axis=1)
        scores = jnp.einsum("tgnd,gsd->gnts", queries, jnp.concatenate(keys, axis=1))
        weights = jax.nn.softmax(jnp.where(sees, scores * config.head_dim**-0.5, -jnp.inf))
        mixed = jnp.einsum("gnts,gsd->tgnd", weights, jnp.concatenate(values, axis=1))
        hidden = model.layer.finish(stream, mixed)
        # Index i predicts what the target's state at i + 1 + step does.
        at = jnp.minimum(slots + 1 + step, size - 1)
        logits = logits_of(target_params, trace.hidden[at])
        ids = drafter.vocabulary.array
        counted = (slots + 1 + step < size) & (trace.segments[at] == trace.segments)
        weight = trace.weights[at] * counted
        taught = jnp.isin(jnp.argmax(logits, -1), ids)
        log_p, log_q = jax.nn.log_softmax(logits[:, ids]), jax.nn.log_softmax(model.head(hidden))
        kl = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
        total += drafter.step_decay**step * (weight * taught * kl).sum() / weight.sum()
    return total


@pytest.mark.parametrize("remat", [False, True])
def test_the_gradient_goes_through_the_unroll(tiny, drafter, texts, remat, monkeypatch):
    """Value and gradient are those of the plain way to write it; in blocks of queries, too."""
    monkeypatch.setattr(network, "QUERIES", 16 if remat else 512)
    chosen = dataclasses.replace(drafter.drafter, ttt_steps=3)
    trace = row_of(trace_of(tiny, chosen, PROMPTS, texts), 2)

    def loss(params):
        losses = Losses(("forward_kl",), remat)
        terms = chosen.objective(params, tiny.params, trace, jax.random.key(0), losses)
        factors = chosen.terms_of({"forward_kl": 1}).items()
        return sum(factor * terms[name][0] / terms[name][1] for name, factor in factors)

    def plain(params):
        return loss_by_one_mask(chosen, params, tiny.params, trace)

    (one, got), (other, wanted) = (
        jax.jit(jax.value_and_grad(f))(drafter.params) for f in (loss, plain)
    )
    np.testing.assert_allclose(one, other, rtol=1e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5 * np.abs(y).max() + 1e-8),
        got,
        wanted,
    )


def test_a_token_changes_nothing_before_it(tiny, drafter, texts):
    trace = row_of(trace_of(tiny, drafter.drafter, PROMPTS, texts), 2)
    at = 33
    changed = dataclasses.replace(
        trace,
        tokens=trace.tokens.at[at].set((trace.tokens[at] + 1) % 61),
        features=trace.features.at[at:].add(1.0),
    )
    one, other = (
        unrolled(drafter.drafter, drafter.params, tiny.params, x, 4) for x in (trace, changed)
    )
    for step, same in enumerate(np.abs(one - other).max(-1) == 0):
        assert same[: at - 1 - step].all() and not same[at - 1 - step]


def test_texts_of_a_row_do_not_see_each_other(tiny, drafter, texts):
    """Packed, each text gives the terms and the agreement that it gives alone."""
    traces = trace_of(tiny, drafter.drafter, PROMPTS, texts)
    one, two = row_of(traces, 0), row_of(traces, 3)
    sizes = int(one.segments.sum()), int(two.segments.sum())
    joined = jax.tree.map(
        lambda x, y: jnp.concatenate([x[: sizes[0]], y[: sizes[1]]]),
        one,
        dataclasses.replace(two, segments=2 * two.segments),
    )
    run = functools.partial(terms_of, drafter.drafter, drafter.params, tiny.params)
    parts, whole = [run(x) for x in (one, two)], run(joined)
    for name, (value, weight) in whole.items():
        assert float(weight) == sum(float(part[name][1]) for part in parts)
        np.testing.assert_allclose(value, sum(part[name][0] for part in parts), rtol=1e-4)
    agree = functools.partial(drafter.drafter.agreement, drafter.params, tiny.params)
    supervised = np.asarray(joined.weights) > 0
    alone = np.concatenate([agree(x)[:n] for x, n in zip((one, two), sizes, strict=True)])
    np.testing.assert_array_equal(np.asarray(agree(joined))[supervised], alone[supervised])


def test_replayed_cycles_are_the_loops(tiny, drafter, texts):
    result = specjax.decode(tiny, drafter, PROMPTS, max_new_tokens=40, stop_tokens=[])
    traces = trace_of(tiny, drafter.drafter, PROMPTS, texts)
    agree = functools.partial(drafter.drafter.agreement, drafter.params, tiny.params)
    agreement = np.asarray(jax.vmap(agree)(traces))
    for row in (0, 2, 3, 4):
        supervised = np.asarray(traces.weights[row] > 0)
        (cycles,) = replayed(agreement[row], supervised, np.asarray(traces.tokens[row]), ())
        counted = result.accepted[row], result.drafted[row], result.committed[row]
        np.testing.assert_array_equal(cycles, counted)


@pytest.mark.parametrize("shape", ["chain", "dynamic"])
def test_its_cache_holds_true_features_and_stale_state_never_matters(tiny, drafter, texts, shape):
    loaded = with_tree(drafter, {"chain": CHAIN, **TREES}[shape])
    ids = [np.asarray(prompt, np.int32) for prompt in PROMPTS]
    rows = decoding._rows(ids, np.full(len(ids), 40), SIZE, SIZE)
    empty = KVCache.zeros(tiny.config, SIZE, tiny.dtype), loaded.drafter.init_state(SIZE)
    rows, cache, own = prefill(
        tiny.graphdef, tiny.params, loaded.drafter, loaded.params, rows,
        *decoding._broadcast(empty, len(ids)), longest=max(map(len, ids)),
    )  # fmt: skip
    state = SpeculativeState(
        rows, cache, own, Counts.zeros(len(ids), SIZE, loaded.drafter), jnp.int32(0)
    )
    traces = trace_of(tiny, loaded.drafter, PROMPTS, texts)
    fresh = jax.vmap(lambda row: observed(tiny, loaded, row, 75).cache)(traces)
    slots, cycle = jnp.arange(SIZE), 0
    while state.rows.running.any():
        cycle += 1
        stale = (slots >= state.rows.length[:, None] - 1)[:, None, :, None]
        poisoned = [jnp.where(stale, 1e30, x) for x in jax.tree.leaves(state.drafter_state.cache)]
        cache = jax.tree.unflatten(jax.tree.structure(state.drafter_state.cache), poisoned)
        own = dataclasses.replace(state.drafter_state, cache=cache)
        state = speculative_loop(
            tiny.graphdef, tiny.params, loaded.drafter, loaded.params, greedy,
            dataclasses.replace(state, drafter_state=own), None, None, jnp.full(8, -1, jnp.int32),
            jnp.int32(cycle), widths=(1, loaded.drafter.num_draft_tokens + 1),
        )  # fmt: skip
        valid = (slots < state.rows.length[:, None] - 1)[:, None, :, None]
        pairs = map(jax.tree.leaves, (state.drafter_state.cache, fresh))
        for one, other in zip(*pairs, strict=True):
            assert jnp.abs(jnp.where(valid, one - other, 0)).max() <= 2e-4
    tokens, lengths = np.asarray(state.rows.tokens), np.asarray(state.rows.length)
    for row, length, prompt, text in zip(tokens, lengths, PROMPTS, texts, strict=True):
        assert row[len(prompt) : length].tolist() == text


def test_nothing_is_drafted_once_an_output_was_not_finite(tiny, drafter, texts):
    table = tiny.params["embedding"].at[9].set(jnp.nan)  # in the prompts 0 and 2
    blind = dataclasses.replace(drafter, params=drafter.params | {"embedding": table})
    result = specjax.decode(tiny, blind, PROMPTS, max_new_tokens=40)
    for row in (0, 2):
        assert result.tokens[row].tolist() == texts[row]
        assert (result.drafted[row] == 0).all()
    assert result.tokens[4].tolist() == texts[4] and result.drafted[4].max() == 3


# --- the dynamic tree --------------------------------------------------------------------------------


def grown(log_q, tree):
    """EAGLE-2's tree in plain Python: the kept paths, in the order in which they were seen."""

    def children(path):
        row = log_q(path)
        return [int(x) for x in np.argsort(-row, kind="stable")[: tree.top_k]]

    worth, frontier, pool = {(): 0.0}, [()], []
    for _ in range(tree.depth):
        level = [(*path, token) for path in frontier for token in children(path)]
        for path in level:
            worth[path] = worth[path[:-1]] + float(log_q(path[:-1])[path[-1]])
        pool += level
        best = sorted(level, key=lambda path: -worth[path])[: tree.top_k]
        frontier = [path for path in level if path in best]
    kept = sorted(pool, key=lambda path: -worth[path])[: tree.num_nodes]
    return [path for path in pool if path in kept]


@pytest.mark.parametrize(
    "tree", [DynamicTree(10, 3, 4), DynamicTree(8, 4, 2), DynamicTree(3, 1, 2)]
)
def test_a_dynamic_tree_is_eagle_2s(tiny, drafter, texts, tree):
    """Built anew in Python, each node's law from the unroll over the text that its path makes."""
    loaded = with_tree(drafter, tree)
    trace = row_of(trace_of(tiny, loaded.drafter, PROMPTS, texts), 2)
    length = 38
    state = observed(tiny, loaded, trace, length - 1)
    context = Context(trace.tokens, jnp.int32(length), None)
    draft, _ = loaded.drafter.propose(loaded.params, tiny.params, state, context, None)

    @functools.cache
    def log_q(path):
        text = trace.tokens.at[length : length + len(path)].set(jnp.asarray(path, jnp.int32))
        changed = dataclasses.replace(trace, tokens=text)
        steps = unrolled(loaded.drafter, loaded.params, tiny.params, changed, tree.depth)
        logits = steps[len(path), length - 2]
        return np.asarray(loaded.drafter.vocabulary.spread(jax.nn.log_softmax(logits)))

    paths = [()]
    for parent, token in zip(np.asarray(draft.parents), np.asarray(draft.tokens), strict=True):
        paths.append((*paths[parent], int(token)))
    assert paths[1:] == grown(log_q, tree)
    assert draft.num_valid == tree.num_nodes and draft.topology == tree.depth
    assert (np.diff(draft.parents) >= 0).all()


def test_sizes_of_a_dynamic_tree():
    assert DynamicTree(60, 8, 10).pool == 10 + 7 * 100
    with pytest.raises(
        ValueError, match="15 tokens needs 14 nodes, but depth 2 and top_k 3 give 12"
    ):
        DynamicTree(15, 2, 3)
    with pytest.raises(ValueError, match="depth ≥ 1 and top_k ≥ 1, got 1, 2 and 3"):
        DynamicTree(1, 2, 3)


# --- checkpoints -------------------------------------------------------------------------------------


def test_an_export_is_the_drafter(tiny, drafter, tmp_path):
    eagle3.export(drafter, tiny, tmp_path)
    again = eagle3.load(tmp_path, tiny, CHAIN)
    assert again.drafter == dataclasses.replace(drafter.drafter, ttt_steps=7)
    jax.tree.map(np.testing.assert_array_equal, again.params, folded(drafter.params))
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert raw["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_golden_folders_say_what_they_are():
    loaded, _, _ = golden("eagle3_qwen3")
    assert loaded.drafter.taps == (0, 1, 2) and loaded.drafter.config.qk_norm
    assert loaded.drafter.config.rms_norm_eps == 1e-6 and "embedding" not in loaded.params
    assert len(loaded.drafter.vocabulary) == 24


def changed_export(drafter, target, folder, config, tensors):
    """An export with some keys of its config and some tensors replaced; None takes one out."""
    eagle3.export(drafter, target, folder)
    raw = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(raw))
    kept = load_file(folder / "model.safetensors") | tensors
    save_file({k: x for k, x in kept.items() if x is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"vocab_size": 62}, {}, "does not fit random: it has a target vocabulary of 62, not 61"),
        ({"hidden_size": 64}, {}, "does not fit random: it has hidden size 64, not 32"),
        ({"num_hidden_layers": 2}, {}, "it has layers 2, not 1"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, {}, r"taps \[3\] name"),
        ({"norm_before_fc": True}, {}, "norm_before_fc is not supported"),
        ({}, {"d2t": None}, "48 draft tokens, but no d2t says which of 61"),
        ({}, {"d2t": np.zeros(47, np.int64)}, r"d2t is of shape \(47,\), expected \(48,\)"),
        ({}, {"d2t": -np.arange(48)}, "d2t: draft vocabulary: ids must ascend, got 0 before 0"),
        ({}, {"embed_tokens.weight": np.zeros((60, 32), np.float32)}, "misshaped: embed_tokens"),
        (
            {},
            {"d2t": np.full(48, 14)},
            "d2t: draft vocabulary: token 61 is outside the target's 61",
        ),
        ({}, {"lm_head.weight": None}, "48 draft tokens need an lm_head of their own"),
        ({"model_type": "gemma3_text"}, {}, "layers of 'gemma3_text' are not supported"),
        ({"layer_types": ["sliding_attention"]}, {}, "sliding layers are not supported"),
        ({}, {"fc.weight": None}, "missing: fc.weight"),
        ({}, {"fc.weight": np.zeros((32, 64), np.float32)}, r"misshaped: fc.weight \[32, 64\]"),
    ],
)
def test_what_does_not_fit_is_named(tiny, drafter, tmp_path, config, tensors, message):
    changed_export(drafter, tiny, tmp_path, config, tensors)
    with pytest.raises(ValueError, match=message):
        eagle3.load(tmp_path, tiny, CHAIN)


def test_an_embedding_that_is_not_there_is_the_targets(tiny, drafter, tmp_path, caplog):
    changed_export(drafter, tiny, tmp_path, {}, {"embed_tokens.weight": None})
    with caplog.at_level("INFO"):
        assert "embedding" not in eagle3.load(tmp_path, tiny, CHAIN).params
    assert "has no embed_tokens: the target's is used" in caplog.text


def test_a_drafter_of_another_target_is_refused(tiny, drafter, tmp_path):
    drafters.export(drafter, tiny, tmp_path)
    assert specjax.load_drafter(tmp_path, tiny).drafter.taps == (0, 1, 2)
    other = random_target(TINY, seed=9)
    with pytest.raises(ValueError, match="was trained for random, and random has other weights"):
        specjax.load_drafter(str(tmp_path), other)


def test_a_draft_vocabulary_of_counts():
    vocabulary = DraftVocabulary.of_counts(np.array([0, 5, 2, 5, 2]), 3, "draft_vocab_size")
    assert vocabulary.ids == (1, 2, 3)
    index, inside = vocabulary.locate(jnp.array([0, 1, 3, 4]))
    assert index.tolist()[1:3] == [0, 2] and inside.tolist() == [False, True, True, False]
    spread = vocabulary.spread(jnp.array([1.0, 2.0, 3.0]))
    assert spread.tolist() == [-np.inf, 1, 2, 3, -np.inf]
    for size in (0, 6):
        with pytest.raises(ValueError, match=f"draft_vocab_size must be 1…5, got {size}"):
            DraftVocabulary.of_counts(np.ones(5), size, "draft_vocab_size")


def test_a_drafter_with_the_whole_vocabulary_and_the_targets_head(tiny, texts, tmp_path, caplog):
    loaded = eagle3.from_config(tiny, 0, np.ones(61), taps=(0, 2), num_draft_tokens=2)
    assert loaded.drafter.vocabulary is None and loaded.params["head_weight"].shape == (61, 32)
    params = {name: x for name, x in loaded.params.items() if name != "head_weight"}
    for drafter in (loaded, dataclasses.replace(loaded, params=params)):
        result = specjax.decode(tiny, drafter, PROMPTS[:1], max_new_tokens=12)
        assert result.tokens[0].tolist() == texts[0][:12]
    eagle3.export(drafter, tiny, tmp_path)  # of two taps and with the target's head
    assert "serve EAGLE-3 drafters of three taps" in caplog.text
    again = eagle3.load(tmp_path, tiny, Tree.chain(2))
    assert again.params.keys() == params.keys()


@pytest.mark.slow
def test_options_of_normed_queries_and_streams(tiny, drafter, texts):
    """They change the drafts and not the text; bfloat16 keeps its types through all of it."""
    loaded = eagle3.from_config(tiny, 0, np.ones(61), taps=(0, 1), qk_norm=True, num_draft_tokens=2)
    normed = dataclasses.replace(loaded.drafter, norm_before_residual=True)
    chosen = dataclasses.replace(loaded, drafter=normed)
    result = specjax.decode(tiny, chosen, PROMPTS[:1], max_new_tokens=12)
    assert result.tokens[0].tolist() == texts[0][:12]
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, tiny.params)
    target = dataclasses.replace(tiny, params=narrow)
    loaded = eagle3.from_config(target, 0, np.ones(61), taps=(0, 1), num_draft_tokens=2)
    result = specjax.decode(target, loaded, PROMPTS[:1], max_new_tokens=6)
    plain = specjax.decode(target, None, PROMPTS[:1], max_new_tokens=6)
    assert result.tokens[0].tolist() == plain.tokens[0].tolist()
