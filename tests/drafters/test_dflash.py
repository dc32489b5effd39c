"""DFlash: as `dflash` computes it, decoding what it trains, and lossless."""

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
from flax import nnx
from safetensors.numpy import load_file, save_file

import specjax
from specjax.checkpoints.load import load_target
from specjax.distillation.trainer import replayed
from specjax.drafters import dflash
from specjax.drafters.dflash.checkpoint import default_taps
from specjax.drafters.dflash.looking_back import look_back
from specjax.drafters.fusion import folded
from specjax.losses import Losses
from specjax.models.target import Target, random_target
from specjax.models.transformer import Block, logits_of, rotation
from specjax.noise import Noise
from specjax.sampling import Sampling
from specjax.types import Context, LoadedDrafter, Trace
from tests.conftest import TINY
from tests.drafters.test_eagle3 import observed, row_of, trace_of
from tests.drafters.test_transformer_drafters import joint_law_statistic
from tests.fakes import PROMPTS, reference_text

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
KL = Losses(("forward_kl",), False)


def with_k(loaded, k):
    drafter = dataclasses.replace(loaded.drafter, num_draft_tokens=k)
    return dataclasses.replace(loaded, drafter=drafter)


@functools.partial(jax.jit, static_argnames=("drafter", "width"))
def block_logits(drafter, params, target_params, trace, anchors, width):
    """`[n, width, V]` by the training path."""
    states = drafter.blocks_at(params, target_params, trace, anchors, width)
    return logits_of(target_params, states)


@functools.partial(jax.jit, static_argnames=("drafter", "losses"))
def terms_of(drafter, params, target_params, trace, key, losses=KL):
    return drafter.objective(params, target_params, trace, key, losses)


# --- against dflash ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden():
    """The folder's drafter, its target, what `dflash` made of a text, and the text."""
    expected = np.load(GOLDEN / "dflash/expected.npz")
    params = random_target(dataclasses.replace(TINY, num_layers=4)).params | {
        "embedding": jnp.asarray(expected["target_embedding"]),
        "head_weight": jnp.asarray(expected["target_head"]),
    }
    target = Target("golden", dataclasses.replace(TINY, num_layers=4), params)
    tokens = jnp.asarray(expected["tokens"], jnp.int32)
    length = jnp.arange(len(tokens))
    trace = Trace(
        tokens, length, jnp.ones_like(length), jnp.ones(len(tokens)),
        jnp.asarray(expected["features"]), jnp.zeros((len(tokens), 32)),
    )  # fmt: skip
    return dflash.load(GOLDEN / "dflash", target, None), target, expected, trace


def test_block_logits_are_those_of_dflash(golden):
    loaded, target, expected, trace = golden
    assert loaded.drafter.block_size == 5 and loaded.drafter.num_draft_tokens == 4
    anchors = jnp.asarray(expected["anchors"])
    logits = block_logits(loaded.drafter, loaded.params, target.params, trace, anchors, 5)
    for name in ("logits", "cached_logits"):
        assert np.abs(logits - expected[name])[:, 1:].max() <= 1e-4


def test_drafts_are_those_of_dflash(golden):
    """Through the loop's path, the cache filled in several goes."""
    loaded, target, expected, trace = golden
    for anchor, logits in zip(expected["anchors"], expected["logits"], strict=True):
        state = observed(target, loaded, trace, int(anchor), chunk=5)
        context = Context(trace.tokens, jnp.int32(anchor + 1), None)
        draft, _ = loaded.drafter.propose(loaded.params, target.params, state, context, None)
        assert draft.tokens.tolist() == logits[1:].argmax(-1).tolist()
        assert draft.num_valid == 4


def test_transcripts_are_those_of_dflash_generate():
    """It samples one token at prefill, so ours is run on the prompt and that token.

    Its last blocks are shorter, and as slots see each other, other drafts; until then every cycle is
    the same.
    """
    target = load_target(GOLDEN / "dflash_target", dtype=jnp.float32)
    loaded = dflash.load(GOLDEN / "dflash", target, None)
    expected = np.load(GOLDEN / "dflash_target/expected.npz")
    prompts = [row[:10].tolist() for row in expected["outputs"]]
    result = specjax.decode(target, loaded, prompts, max_new_tokens=23, stop_tokens=[])
    compared = 0
    for row, output in enumerate(expected["outputs"]):
        assert result.tokens[row].tolist() == output[10:].tolist()
        whole = 23 - np.cumsum(expected["produced"][row]) >= 4
        produced = expected["produced"][row][: whole.sum()]
        assert result.committed[row][: len(produced)].tolist() == produced.tolist()
        compared += len(produced)
    assert compared >= 20


# --- a drafter that is right sometimes ---------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tiny):
    return [reference_text(tiny, prompt, 40) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def drafter(tiny, texts) -> LoadedDrafter:
    """Trained on half of the texts, and not for long: right now and then."""
    counts = np.zeros(61, int)
    loaded = dflash.from_config(
        tiny, 0, counts, mask_token=60, num_layers=2, block_size=4, taps=(0, 1, 2), num_anchors=16
    )
    traces = trace_of(tiny, loaded.drafter, PROMPTS[::2], texts[::2])
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params, state, key):
        def loss(params):
            one = functools.partial(terms_of, loaded.drafter, params, tiny.params)
            value, weight = jax.vmap(one)(traces, jax.random.split(key, 3))["forward_kl"]
            return value.sum() / weight.sum()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    params, state = loaded.params, optimizer.init(loaded.params)
    for key in jax.random.split(jax.random.key(0), 60):
        params, state, value = step(params, state, key)
    assert np.isfinite(value)
    return dataclasses.replace(loaded, params=params)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_slots_begin_by_looking_at_what_is_just_before(qk_norm):
    """Scores of a mask fall with distance, an anchor's are higher, and other masks are not seen."""
    config = dataclasses.replace(TINY, hidden_size=128, head_dim=64, qk_norm=qk_norm)
    block = Block(config, jnp.float32, nnx.Rngs(0))
    rng = np.random.default_rng(0)
    usual = rng.normal(0, 1, (3, 128))  # rows of a kind have something in common
    context, anchors = (0.5 * usual[i] + rng.normal(0, 1, (256, 128)) for i in (0, 1))
    mask = usual[2] / np.sqrt(np.mean(usual[2] ** 2))
    params = look_back(nnx.to_pure_dict(nnx.state(block)), config, 8, context, anchors, mask)
    nnx.update(block, params)

    def scores(rows, distance):
        """Mean over rows and heads: a mask at 40, and each row so far before it."""
        turns = (rotation(64, config.rope_theta, (), jnp.full(1, at)) for at in (40, 40 - distance))
        ask, seen = turns
        queries, _, _ = block.project(jnp.asarray(mask, jnp.float32)[None], *ask)
        many = jax.tree.map(lambda x: jnp.repeat(x, len(rows), 0), seen)
        keys, _ = block.keys_values(jnp.asarray(rows, jnp.float32), *many)
        return float(jnp.einsum("gnd,gtd->gnt", queries[0], keys).mean()) * block.scale

    near, middle, far = (scores(context, distance) for distance in (1, 4, 8))
    assert near > middle + 1 > far + 3
    assert scores(anchors, 1) > near > 4
    assert abs(scores(mask[None], 1)) < 1


def test_greedy_text_is_plain_text(tiny, drafter, texts):
    result = specjax.decode(tiny, drafter, PROMPTS, max_new_tokens=40)
    assert [row.tolist() for row in result.tokens] == texts
    assert 0.1 < result.alpha[0] < 1
    assert result.drafted[1][0] == 0  # a prompt of one token has no features yet


@pytest.mark.parametrize("k", [1, pytest.param(7, marks=pytest.mark.slow)])
def test_greedy_text_of_other_k_and_one_prompt(tiny, drafter, texts, k):
    result = specjax.decode(tiny, with_k(drafter, k), PROMPTS[2], max_new_tokens=40)
    assert result.tokens[0].tolist() == texts[2]


@pytest.mark.slow
def test_gumbel_text_is_plain_samplings_text(tiny, drafter):
    options = {
        "max_new_tokens": 40, "temperature": [1, 0.7, 1, 0.7, 1], "top_k": [0, 20, 0, 5, 0],
    }  # fmt: skip
    for seed in range(2):
        key = jax.random.key(seed)
        plain = specjax.decode(tiny, None, PROMPTS, key=key, **options)
        result = specjax.decode(tiny, drafter, PROMPTS, key=key, rule="gumbel", **options)
        assert [x.tolist() for x in result.tokens] == [x.tolist() for x in plain.tokens]
        assert result.tau > 1.1


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "tree_match"])
def test_joint_law_of_two_tokens_in_the_real_loop(tiny, drafter, rule):
    """Drawn drafts, and likeliest ones under a rule for point masses."""
    statistic, limit = joint_law_statistic(tiny, with_k(drafter, 2), rule=rule)
    assert statistic < limit


# --- decoded = trained -------------------------------------------------------------------------------


def test_trained_blocks_are_the_decoding_loops(tiny, drafter, texts):
    """Slot k of a packed block = the law that draft k is drawn from; ragged contexts."""
    traces = trace_of(tiny, drafter.drafter, PROMPTS, texts)
    for row, length in ((0, 12), (2, 35), (2, 40), (3, 20)):
        trace = row_of(traces, row)
        state = observed(tiny, drafter, trace, length - 1)
        context = Context(trace.tokens, jnp.int32(length), None, Sampling(jnp.float32(1.0)))
        noise = Noise(jax.random.key(row), jnp.int32(length - 1))
        draft, _ = drafter.drafter.propose(drafter.params, tiny.params, state, context, noise)
        anchors = jnp.array([length - 1, length - 4])
        logits = block_logits(drafter.drafter, drafter.params, tiny.params, trace, anchors, 4)
        trained = jax.nn.log_softmax(logits[0, 1:])
        assert np.abs(trained - draft.log_q).max() <= 1e-4


def test_a_block_sees_nothing_from_its_anchor_on_nor_other_blocks(tiny, drafter, texts):
    trace = row_of(trace_of(tiny, drafter.drafter, PROMPTS, texts), 2)
    run = functools.partial(block_logits, drafter.drafter, drafter.params, tiny.params)
    anchor = 33
    changed = dataclasses.replace(
        trace,
        tokens=trace.tokens.at[anchor + 1 :].add(1) % 61,
        features=trace.features.at[anchor:].add(1.0),
    )
    one = run(trace, jnp.array([anchor, 12, 20]), 4)
    other = run(changed, jnp.array([anchor, 50, 30]), 4)
    np.testing.assert_array_equal(one[0], other[0])
    assert (one[1:] != other[1:]).all(-1).any()
    nearer = dataclasses.replace(trace, features=trace.features.at[anchor - 1].add(1.0))
    assert (run(nearer, jnp.array([anchor, 12, 20]), 4)[0] != one[0]).any()


def test_terms_are_those_of_every_block_by_itself(tiny, drafter, texts):
    """Value and weight of the loss, decayed, and α by slot; two texts in one row."""
    traces = trace_of(tiny, drafter.drafter, PROMPTS, texts)
    one, two = row_of(traces, 0), row_of(traces, 3)
    sizes = int(one.segments.sum()), int(two.segments.sum())
    trace = jax.tree.map(
        lambda x, y: jnp.concatenate([x[: sizes[0]], y[: sizes[1]]]),
        one,
        dataclasses.replace(two, segments=2 * two.segments),
    )
    chosen = dataclasses.replace(drafter.drafter, decay=2.0)
    key = jax.random.key(1)
    terms = terms_of(chosen, drafter.params, tiny.params, trace, key)
    anchors, valid = chosen.anchors_of(trace, key)
    weights, segments = np.asarray(trace.weights), np.asarray(trace.segments)
    assert valid.all() and len(set(np.asarray(anchors).tolist())) == 16
    logits = block_logits(chosen, drafter.params, tiny.params, trace, anchors, 4)
    loss = np.zeros(2)
    alpha = np.zeros((3, 2))
    for anchor, block in zip(np.asarray(anchors), logits, strict=True):
        assert weights[anchor] > 0
        for k in (1, 2, 3):
            after = anchor + k - 1
            if after >= len(weights) or segments[after] != segments[anchor] or not weights[after]:
                continue
            log_p = jax.nn.log_softmax(logits_of(tiny.params, trace.hidden[after]))
            log_q = jax.nn.log_softmax(block[k])
            share = np.exp(-(k - 1) / 2.0)
            loss += share * float((jnp.exp(log_p) * (log_p - log_q)).sum()), share
            alpha[k - 1] += float(jnp.minimum(jnp.exp(log_p), jnp.exp(log_q)).sum()), 1
    np.testing.assert_allclose(terms["forward_kl"], loss, rtol=1e-4)
    for k in (1, 2, 3):
        np.testing.assert_allclose(terms[f"alpha_{k}"], alpha[k - 1], rtol=1e-4)
    remat = terms_of(chosen, drafter.params, tiny.params, trace, key, Losses(("forward_kl",), True))
    np.testing.assert_allclose(remat["forward_kl"], terms["forward_kl"], rtol=1e-5)


def test_texts_of_a_row_do_not_see_each_other(tiny, drafter, texts):
    """Packed, each text's blocks and agreement are those that it has alone."""
    traces = trace_of(tiny, drafter.drafter, PROMPTS, texts)
    one, two = row_of(traces, 0), row_of(traces, 3)
    sizes = int(one.segments.sum()), int(two.segments.sum())
    joined = jax.tree.map(
        lambda x, y: jnp.concatenate([x[: sizes[0]], y[: sizes[1]]]),
        one,
        dataclasses.replace(two, segments=2 * two.segments),
    )
    run = functools.partial(block_logits, drafter.drafter, drafter.params, tiny.params)
    anchors = jnp.array([5, 9, 30])
    together = run(joined, jnp.concatenate([anchors, anchors + sizes[0]]), 4)
    alone = jnp.concatenate([run(x, anchors, 4) for x in (one, two)])
    assert np.abs(together - alone).max() <= 1e-4
    agree = functools.partial(drafter.drafter.agreement, drafter.params, tiny.params)
    supervised = np.asarray(joined.weights) > 0
    apart = np.concatenate([agree(x)[:n] for x, n in zip((one, two), sizes, strict=True)])
    np.testing.assert_array_equal(np.asarray(agree(joined))[supervised], apart[supervised])


def test_nothing_is_drafted_once_a_row_was_not_finite(tiny, drafter, texts):
    norm = {"scale": drafter.params["fused_norm"]["scale"].at[0].set(jnp.nan)}
    blind = dataclasses.replace(drafter, params=drafter.params | {"fused_norm": norm})
    result = specjax.decode(tiny, blind, PROMPTS[:2], max_new_tokens=40)
    assert [row.tolist() for row in result.tokens] == texts[:2]
    assert max(row.max() for row in result.drafted) == 0


def test_anchors(tiny, drafter, texts):
    trace = row_of(trace_of(tiny, drafter.drafter, PROMPTS, texts), 2)
    wanted = np.flatnonzero(trace.weights)
    key = jax.random.key(0)

    def drawn(**changes):
        chosen = dataclasses.replace(drafter.drafter, num_anchors=64, **changes)
        anchors, valid = chosen.anchors_of(trace, key)
        return sorted(np.asarray(anchors)[np.asarray(valid)].tolist())

    assert drawn() == wanted.tolist()  # from the prompt's last token on
    assert drawn(strict_anchors=True) == wanted[1:].tolist()
    assert drawn(random_anchors=False) == wanted[::3].tolist()


def replay_equals_decoding(target, loaded, texts):
    """Asserts that cycles replayed along the greedy texts are those that decoding counts."""
    result = specjax.decode(target, loaded, PROMPTS, max_new_tokens=40, stop_tokens=[])
    traces = trace_of(target, loaded.drafter, PROMPTS, texts)
    agree = functools.partial(loaded.drafter.agreement, loaded.params, target.params)
    agreement = np.asarray(jax.jit(jax.vmap(agree))(traces))
    for row in (0, 2, 3, 4):
        supervised = np.asarray(traces.weights[row] > 0)
        (cycles,) = replayed(agreement[row], supervised, np.asarray(traces.tokens[row]), ())
        counted = result.accepted[row], result.drafted[row], result.committed[row]
        np.testing.assert_array_equal(cycles, counted)


def test_replayed_cycles_are_the_loops(tiny, drafter, texts):
    replay_equals_decoding(tiny, drafter, texts)


def with_windows(loaded, causal=True):
    """The same weights, every layer seeing 6 positions."""
    config = dataclasses.replace(
        loaded.drafter.config, sliding_layers=(True, True), sliding_window=6,
        sliding_rope_theta=loaded.drafter.config.rope_theta,
    )  # fmt: skip
    drafter = dataclasses.replace(loaded.drafter, config=config, causal_windows=causal)
    return dataclasses.replace(loaded, drafter=drafter)


def test_sliding_layers_see_their_window_only(tiny, drafter, texts):
    """Slot k, at 36 + k, sees the positions behind 30 + k; what lies ahead in the block, if it may."""
    trace = row_of(trace_of(tiny, drafter.drafter, PROMPTS, texts), 2)

    def states(loaded, trace, width=4):
        blocks_at = jax.jit(loaded.drafter.blocks_at, static_argnames="width")
        return blocks_at(drafter.params, tiny.params, trace, jnp.array([36]), width=width)[0]

    def negated(index):
        features = trace.features.at[index].multiply(-1)
        return dataclasses.replace(trace, features=features)

    plain = states(with_windows(drafter), trace)
    np.testing.assert_array_equal(states(with_windows(drafter), negated(30)), plain)
    assert np.abs(states(with_windows(drafter), negated(31)) - plain)[0].max() > 1e-3
    assert np.abs(states(drafter, negated(30)) - states(drafter, trace))[0].max() > 1e-3
    for causal in (True, False):
        chosen = with_windows(drafter, causal)
        ahead = np.abs(states(chosen, trace, 4)[:2] - states(chosen, trace, 2)).max()
        assert ahead < 1e-5 if causal else ahead > 1e-3


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sliding_layers_decode_as_they_are_trained(tiny, drafter, texts, causal):
    replay_equals_decoding(tiny, with_windows(drafter, causal), texts)


# --- checkpoints -------------------------------------------------------------------------------------


def test_an_export_is_the_drafter(tiny, drafter, tmp_path):
    dflash.export(drafter, tiny, tmp_path)
    again = dflash.load(tmp_path, tiny, None)
    assert again.drafter == dataclasses.replace(drafter.drafter, num_anchors=512)
    jax.tree.map(np.testing.assert_array_equal, again.params, folded(drafter.params))


def changed_export(drafter, target, folder, config, tensors):
    dflash.export(drafter, target, folder)
    raw = json.loads((folder / "config.json").read_text())
    nested = raw["dflash_config"] | config.pop("dflash_config", {})
    (folder / "config.json").write_text(json.dumps(raw | config | {"dflash_config": nested}))
    kept = load_file(folder / "model.safetensors") | tensors
    save_file({k: x for k, x in kept.items() if x is not None}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"vocab_size": 62}, {}, "does not fit random: it has a vocabulary of 62, not 61"),
        ({"hidden_size": 64}, {}, "does not fit random: it has hidden size 64, not 32"),
        ({"num_target_layers": 9}, {}, "it has a target of layers 9, not 3"),
        ({"dflash_config": {"target_layer_ids": [0, 1, 3]}}, {}, r"taps \[3\] name no block"),
        ({"dflash_config": {"mask_token_id": 61}}, {}, "mask token 61 is outside the vocabulary"),
        ({"dflash_config": {"mask_token_id": None}}, {}, "config.json has no mask_token_id"),
        ({"architectures": ["DFlash2DraftModel"]}, {}, "is a DFlash 2 drafter"),
        ({}, {"candidate_selector.predecessor_codebook": np.zeros(1, np.float32)}, "a DFlash 2"),
        ({"markov_rank": 0}, {}, "its anchor's slot predicts, too, as in DSpark"),
        ({}, {"embed_tokens.weight": np.zeros((61, 32), np.float32)}, "is not that of random"),
        ({"is_causal": True}, {}, "is_causal with layers of full attention is not supported"),
        ({"output_multiplier": 2.0}, {}, "output_multiplier=2.0 is not supported"),
        ({}, {"hidden_norm.weight": None}, "missing: hidden_norm.weight"),
    ],
)
def test_what_does_not_fit_is_named(tiny, drafter, tmp_path, config, tensors, message):
    changed_export(drafter, tiny, tmp_path, dict(config), tensors)
    with pytest.raises(ValueError, match=message):
        dflash.load(tmp_path, tiny, None)


def test_what_looks_wrong_is_told(tiny, drafter, tmp_path, caplog):
    changed_export(drafter, tiny, tmp_path, {}, {})
    dflash.load(tmp_path, tiny, 7)
    assert "was trained on blocks of 4; longer ones gain nothing" in caplog.text
    deep = random_target(dataclasses.replace(TINY, num_layers=12))
    loaded = dflash.from_config(
        deep, 0, np.zeros(61, int), mask_token=60, num_layers=1, block_size=4, taps=(2, 6, 10)
    )
    dflash.export(loaded, deep, tmp_path / "deep")
    dflash.load(tmp_path / "deep", deep, None)
    assert "look shifted by one: the usual ones are [1, 5, 9]" in caplog.text


def test_mask_tokens_that_the_text_has_are_refused(tiny):
    counts = np.arange(61)
    for token in (5, 60):
        with pytest.raises(ValueError, match="never says, like 0$"):
            dflash.from_config(tiny, 0, counts, mask_token=token, taps=(0, 1))
    with pytest.raises(ValueError, match="mask_token 61 is outside the vocabulary of 61"):
        dflash.from_config(tiny, 0, counts, mask_token=61, taps=(0, 1))


def test_usual_taps():
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)
    assert default_taps(40, 5) == (1, 10, 19, 28, 37)
    assert default_taps(32, 5) == (1, 8, 15, 22, 29)
    assert default_taps(30, 1) == (15,)
