"""DSpark: as `speculators` computes it, decoding what it trains, and lossless."""

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
from specjax.drafters import dflash, dspark
from specjax.drafters.dspark.heads import MarkovHead
from specjax.drafters.fusion import folded
from specjax.drafters.vocabulary import DraftVocabulary
from specjax.losses import Losses
from specjax.models.target import Target, random_target
from specjax.models.transformer import logits_of
from specjax.noise import Noise
from specjax.sampling import Sampling
from specjax.types import Context, LoadedDrafter, Trace
from tests.conftest import TINY
from tests.drafters.test_dflash import replay_equals_decoding
from tests.drafters.test_eagle3 import observed, row_of, trace_of
from tests.drafters.test_transformer_drafters import joint_law_statistic
from tests.fakes import PROMPTS, reference_text

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
LOSSES = Losses(("cross_entropy", "total_variation"), False)


@functools.partial(jax.jit, static_argnames=("drafter", "width"))
def block_of(drafter, params, target_params, trace, anchors, width):
    """States, corrected logits and confidence of blocks, by the training path."""
    states = drafter.blocks_at(params, target_params, trace, anchors, width)
    before = trace.tokens.at[anchors[:, None] + jnp.arange(width)].get(mode="clip")
    head = drafter.markov(params)
    base = logits_of(target_params, states)
    logits = base + head.bias(jax.vmap(head.along)(before, states))
    sure = drafter.confidence_logits(params, before, states) if drafter.confidence else None
    return states, base, logits, sure


@functools.partial(jax.jit, static_argnames=("drafter",))
def terms_of(drafter, params, target_params, trace, key):
    return drafter.objective(params, target_params, trace, key, LOSSES)


# --- against speculators -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dspark", "dspark_gated", "dspark_rnn"])
def test_blocks_are_those_of_speculators(name):
    expected = np.load(GOLDEN / name / "expected.npz")
    config = dataclasses.replace(TINY, num_layers=4)
    params = random_target(config).params | {
        "embedding": jnp.asarray(expected["target_embedding"]),
        "head_weight": jnp.asarray(expected["target_head"]),
    }
    target = Target("golden", config, params)
    loaded = dspark.load(GOLDEN / name, target, None)
    assert loaded.drafter.num_draft_tokens == 4 and loaded.drafter.taps == (0, 1, 2)
    tokens = jnp.asarray(expected["tokens"], jnp.int32)
    length = jnp.arange(len(tokens))
    trace = Trace(
        tokens, length, jnp.ones_like(length), jnp.ones(len(tokens)),
        jnp.asarray(expected["features"]), jnp.asarray(expected["target_hidden"]),
    )  # fmt: skip
    anchors = jnp.asarray(expected["anchors"])
    got = block_of(loaded.drafter, loaded.params, params, trace, anchors, 4)
    valid = expected["anchor_valid"]
    for mine, key in zip(
        got, ("hidden", "base_logits", "logits", "confidence_logits"), strict=True
    ):
        assert np.abs(mine - expected[key])[valid].max() <= 1e-4, key


# --- a drafter that is right sometimes ---------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tiny):
    return [reference_text(tiny, prompt, 40) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def drafter(tiny, texts) -> LoadedDrafter:
    """Trained on half of the texts, and not for long: right now and then."""
    loaded = dspark.from_config(
        tiny, 0, np.zeros(61, int), mask_token=60, num_layers=2, block_size=3, taps=(0, 1, 2),
        num_anchors=16, markov_rank=8, markov_head="rnn",
    )  # fmt: skip
    traces = trace_of(tiny, loaded.drafter, PROMPTS[::2], texts[::2])
    optimizer = optax.adam(3e-3)
    wanted = loaded.drafter.terms_of({"cross_entropy": 1.0, "total_variation": 1.0})
    assert wanted == {"cross_entropy": 1.0, "total_variation": 1.0, "confidence": 1.0}

    @jax.jit
    def step(params, state, key):
        def loss(params):
            one = functools.partial(terms_of, loaded.drafter, params, tiny.params)
            terms = jax.vmap(one)(traces, jax.random.split(key, 3))
            return sum(f * terms[n][0].sum() / terms[n][1].sum() for n, f in wanted.items())

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    params, state = loaded.params, optimizer.init(loaded.params)
    for key in jax.random.split(jax.random.key(0), 60):
        params, state, value = step(params, state, key)
    assert np.isfinite(value)
    return dataclasses.replace(loaded, params=params)


def test_greedy_text_is_plain_text(tiny, drafter, texts):
    result = specjax.decode(tiny, drafter, PROMPTS, max_new_tokens=40)
    assert [row.tolist() for row in result.tokens] == texts
    assert 0.1 < result.alpha[0] < 1
    assert result.drafted[1][0] == 0  # a prompt of one token has no features yet


def test_gumbel_text_is_plain_samplings_text(tiny, drafter):
    options = {"max_new_tokens": 40, "temperature": [1, 0.7, 1, 0.7, 1], "top_k": [0, 20, 0, 5, 0]}
    key = jax.random.key(1)
    plain = specjax.decode(tiny, None, PROMPTS, key=key, **options)
    result = specjax.decode(tiny, drafter, PROMPTS, key=key, rule="gumbel", **options)
    assert [x.tolist() for x in result.tokens] == [x.tolist() for x in plain.tokens]
    assert result.tau > 1.1


def test_joint_law_of_two_tokens_in_the_real_loop(tiny, drafter):
    """q depends on the token before, and the draft carries that q."""
    statistic, limit = joint_law_statistic(tiny, drafter)
    assert statistic < limit


# --- decoded = trained -------------------------------------------------------------------------------


def test_trained_blocks_are_the_decoding_loops(tiny, drafter, texts):
    """Slot k of a block behind the drafted tokens = the law that draft k + 1 is drawn from."""
    traces = trace_of(tiny, drafter.drafter, PROMPTS, texts)
    for row, length in ((0, 12), (2, 35), (2, 40), (3, 20)):
        trace = row_of(traces, row)
        state = observed(tiny, drafter, trace, length - 1)
        context = Context(trace.tokens, jnp.int32(length), None, Sampling(jnp.float32(1.0)))
        noise = Noise(jax.random.key(row), jnp.int32(length - 1))
        draft, _ = drafter.drafter.propose(drafter.params, tiny.params, state, context, noise)
        tokens = trace.tokens.at[length : length + 3].set(draft.tokens)
        drafted = dataclasses.replace(trace, tokens=tokens)
        anchors = jnp.array([length - 1, length - 5])
        _, _, logits, _ = block_of(
            drafter.drafter, drafter.params, tiny.params, drafted, anchors, 3
        )
        assert np.abs(jax.nn.log_softmax(logits[0]) - draft.log_q).max() <= 1e-4


@pytest.mark.parametrize("said", [None, DraftVocabulary(tuple(range(0, 61, 2)), 61)])
def test_terms_are_those_of_every_block_by_itself(tiny, drafter, texts, said):
    """Decayed from slot 0, and only up to a block's first token that is not learnt.

    With a vocabulary of the loss the laws are those of its tokens alone, and others are not said.
    """
    drafter = dataclasses.replace(
        drafter, drafter=dataclasses.replace(drafter.drafter, loss_vocabulary=said)
    )
    ids = np.arange(61) if said is None else said.array
    trace = row_of(trace_of(tiny, drafter.drafter, PROMPTS, texts), 2)
    trace = dataclasses.replace(trace, weights=trace.weights.at[35:38].set(0))
    key = jax.random.key(1)
    terms = terms_of(drafter.drafter, drafter.params, tiny.params, trace, key)
    anchors, valid = drafter.drafter.anchors_of(trace, key)
    _, _, logits, sure = block_of(drafter.drafter, drafter.params, tiny.params, trace, anchors, 3)
    weights, names = np.asarray(trace.weights), ("cross_entropy", "total_variation", "confidence")
    sums = {name: np.zeros(2) for name in names}
    assert valid.all()
    for anchor, block, confidence in zip(np.asarray(anchors), logits, sure, strict=True):
        for k in range(3):
            if not weights[anchor + k]:
                break
            p = jax.nn.softmax(logits_of(tiny.params, trace.hidden[anchor + k])[ids])
            q, share = jax.nn.softmax(block[k][ids]), np.exp(-k / 4.0)
            token = np.flatnonzero(ids == trace.tokens[anchor + k + 1])
            alpha = jnp.minimum(p, q).sum()
            chance = jax.nn.sigmoid(confidence[k])
            values = (
                -jnp.log(q[token[0]]) if token.size else 0.0,
                1 - alpha,
                -alpha * jnp.log(chance) - (1 - alpha) * jnp.log(1 - chance),
            )
            for name, value in zip(names, values, strict=True):
                sums[name] += share * float(value), share
    for name in names:
        np.testing.assert_allclose(terms[name], sums[name], rtol=1e-4)


def test_confidence_moves_trunk_and_table_but_not_the_bias(tiny, drafter, texts):
    """Only its aim has no gradient; with `detach_confidence` nothing but the head itself moves."""
    trace = row_of(trace_of(tiny, drafter.drafter, PROMPTS, texts), 2)

    def moved(chosen):
        def loss(params):
            return terms_of(chosen, params, tiny.params, trace, jax.random.key(0))["confidence"][0]

        gradient = jax.grad(loss)(drafter.params)
        gradient["fuse"].pop("feature_scale")
        return jax.tree.map(lambda x: bool(jnp.abs(x).max() > 0), gradient)

    whole = moved(drafter.drafter)
    assert whole["markov"] == {
        "embedding": True, "head_weight": False, "mix": False, "mix_bias": False,
    }  # fmt: skip
    assert whole["fuse"]["fusion"] and all(jax.tree.leaves(whole["confidence"]))
    alone = moved(dataclasses.replace(drafter.drafter, detach_confidence=True))
    assert all(jax.tree.leaves(alone.pop("confidence"))) and not any(jax.tree.leaves(alone))


def test_replayed_cycles_are_the_loops(tiny, drafter, texts):
    replay_equals_decoding(tiny, drafter, texts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_bfloat16_keeps_its_types(tiny, texts, kind):
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, tiny.params)
    target = dataclasses.replace(tiny, params=narrow)
    loaded = dspark.from_config(
        target, 0, np.zeros(61, int), mask_token=60, num_layers=1, block_size=3, taps=(0, 1),
        num_anchors=8, markov_rank=8, markov_head=kind,
    )  # fmt: skip
    # As a trainer hands them over: vectors stay float32.
    wide = jax.tree.map(lambda x: x if x.ndim > 1 else x.astype(jnp.float32), loaded.params)
    loaded = dataclasses.replace(loaded, params=wide)
    trace = row_of(trace_of(target, loaded.drafter, PROMPTS, texts), 2)
    terms = terms_of(loaded.drafter, wide, narrow, trace, jax.random.key(0))
    assert all(np.isfinite(value) for value, _ in terms.values())
    result = specjax.decode(target, loaded, PROMPTS[:1], max_new_tokens=6)
    plain = specjax.decode(target, None, PROMPTS[:1], max_new_tokens=6)
    assert result.tokens[0].tolist() == plain.tokens[0].tolist()


# --- checkpoints -------------------------------------------------------------------------------------


def test_an_export_is_the_drafter(tiny, drafter, tmp_path):
    dspark.export(drafter, tiny, tmp_path)
    again = dspark.load(tmp_path, tiny, None)
    trained = dataclasses.replace(drafter.drafter, num_anchors=512, decay=0.0)
    assert again.drafter == trained
    jax.tree.map(np.testing.assert_array_equal, again.params, folded(drafter.params))
    with pytest.raises(ValueError, match="is a DSpark drafter: dspark:"):
        dflash.load(tmp_path, tiny, None)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"markov_rank": 0}, {}, "without a Markov head is not supported"),
        ({"sample_from_anchor": False}, {}, "whose anchor predicts nothing"),
        (
            {"markov_head_type": "lstm"},
            {},
            "unknown Markov head 'lstm'; known: vanilla, gated, rnn",
        ),
        ({}, {"markov_head.markov_w1.weight": None}, "missing: markov_head.markov_w1.weight"),
        ({}, {"confidence_head.proj.weight": None}, "missing: confidence_head.proj.weight"),
    ],
)
def test_what_does_not_fit_is_named(tiny, drafter, tmp_path, config, tensors, message):
    dspark.export(drafter, tiny, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(raw))
    kept = load_file(tmp_path / "model.safetensors") | tensors
    save_file({k: x for k, x in kept.items() if x is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        dspark.load(tmp_path, tiny, None)


def test_a_frequent_tokens_gradient_is_summed_in_float32():
    """In bfloat16 a sum of ones ends at 256."""
    head = MarkovHead("vanilla", 7, 4, 3, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    graphdef, params = nnx.split(head)
    tokens = jnp.full((500, 2), 5)

    def total(params):
        hidden = jnp.zeros((2, 4), jnp.bfloat16)
        along = jax.vmap(nnx.merge(graphdef, params).along, (0, None))(tokens, hidden)
        return along.astype(jnp.float32).sum()

    gradient = jax.grad(total)(params)["embedding"][...]
    np.testing.assert_array_equal(gradient, 1000 * np.eye(7)[5][:, None] * np.ones(3))
