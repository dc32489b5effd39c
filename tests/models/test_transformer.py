"""The transformer against `transformers`: all at once, token by token, ragged; taps; masks."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.checkpoints.load import load_target
from specjax.models.cache import KVCache, write_rows
from specjax.models.transformer import causal_mask, check_taps

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
NAMES = ("llama_tied", "llama_untied", "llama3_scaled", "qwen2", "qwen3", "gemma3")
# Float32 over three layers whose logits reach ±60: measured differences are below 5e-5.
TOLERANCE = 2e-4


@pytest.fixture(scope="module", params=NAMES)
def golden(request):
    target = load_target(GOLDEN / request.param, dtype=jnp.float32)
    return target, np.load(GOLDEN / request.param / "expected.npz")


def run_in_chunks(target, tokens, lengths, size, taps=()):
    """Logits `[B, T, V]` and features, `size` tokens a pass; rows are written as decoding does."""
    model = nnx.merge(target.graphdef, target.params)
    batch, total = tokens.shape
    cache = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (batch, *x.shape)),
        KVCache.zeros(target.config, total + 3, jnp.float32),
    )

    @jax.jit
    def step(block, start, count, cache):
        def one(block, start, count, cache):
            positions = start + jnp.arange(size)
            out = model(block, positions, cache, start, causal_mask(size), taps)
            return model.head(out.hidden), out.features, write_rows(cache, out.rows, start, count)

        return jax.vmap(one)(block, start, count, cache)

    logits, features = [], []
    for start in range(0, total, size):
        block = np.zeros((batch, size), np.int32)
        here = tokens[:, start : start + size]
        block[:, : here.shape[1]] = here
        count = np.clip(lengths - start, 0, size)
        out, tapped, cache = step(block, np.full(batch, start), count, cache)
        logits.append(out)
        features.append(tapped)
    return np.concatenate(logits, 1)[:, :total], np.concatenate(features, 1)[:, :total]


@pytest.mark.parametrize("size", [40, 1, 16])
def test_logits_equal_transformers(golden, size):
    target, expected = golden
    tokens, lengths = expected["tokens"], np.array([40, 40])
    logits, _ = run_in_chunks(target, tokens, lengths, size)
    assert np.abs(logits - expected["logits"]).max() <= TOLERANCE


def test_ragged_rows_equal_transformers(golden):
    target, expected = golden
    lengths = np.array([40, 23])
    tokens = expected["tokens"].copy()
    tokens[1, 23:] = 0  # padding
    logits, _ = run_in_chunks(target, tokens, lengths, 8)
    for row, length in enumerate(lengths):
        difference = logits[row, :length] - expected["logits"][row, :length]
        assert np.abs(difference).max() <= TOLERANCE


def test_taps_are_hidden_states_after_their_block(golden):
    target, expected = golden
    _, features = run_in_chunks(target, expected["tokens"], np.array([40, 40]), 40, taps=(1, 0))
    hidden = expected["hidden_states"]
    assert np.abs(features[:, :, 0] - hidden[:, :, 2]).max() <= TOLERANCE
    assert np.abs(features[:, :, 1] - hidden[:, :, 1]).max() <= TOLERANCE


def test_tap_of_the_last_block_is_not_normed(golden):
    target, expected = golden
    _, features = run_in_chunks(target, expected["tokens"], np.array([40, 40]), 40, taps=(2,))
    model = nnx.merge(target.graphdef, target.params)
    normed = model.final_norm(features[:, :, 0])
    assert np.abs(normed - expected["hidden_states"][:, :, 3]).max() <= TOLERANCE
    assert np.abs(features[:, :, 0] - expected["hidden_states"][:, :, 3]).max() > 0.1


def test_taps_outside_the_target_are_named():
    target = load_target(GOLDEN / "llama_tied", dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"taps \[3, -1\] name no block: the target has 0…2"):
        check_taps((0, 3, -1), target.config)


def test_embed_clamps_absurd_ids(tiny):
    model = nnx.merge(tiny.graphdef, tiny.params)
    ids = jnp.array([-1, -(2**31), 61, 2**31 - 1])
    expected = tiny.params["embedding"][jnp.array([0, 0, 60, 60])]
    np.testing.assert_array_equal(model.embed(ids), expected)


def test_write_rows_drops_what_does_not_count(tiny):
    cache = jax.tree.map(lambda x: x + 5, KVCache.zeros(tiny.config, 6, jnp.float32))
    rows = jax.tree.map(lambda x: x[:, :4] + 2, cache)
    for start, count, written in ((1, 2, (1, 2)), (4, 4, (4, 5)), (3, 0, ()), (6, 4, ())):
        after = write_rows(cache, rows, jnp.int32(start), jnp.int32(count))
        expected = np.where(np.isin(np.arange(6), written), 7, 5)
        np.testing.assert_array_equal(after.k[2], np.broadcast_to(expected[:, None], (2, 6, 8)))


@pytest.mark.parametrize("name", NAMES)
def test_a_bfloat16_model_computes_in_bfloat16(name):
    target = load_target(GOLDEN / name, dtype=jnp.bfloat16)
    model = nnx.merge(target.graphdef, target.params)
    cache = KVCache.zeros(target.config, 4, jnp.bfloat16)
    out = model(jnp.arange(3), jnp.arange(3), cache, jnp.int32(0), causal_mask(3), taps=(0, 2))
    assert {x.dtype for x in jax.tree.leaves(out)} == {jnp.dtype(jnp.bfloat16)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(target.params):
        assert leaf.dtype == (jnp.float32 if path[-1].key == "scale" else jnp.bfloat16)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_norms_round_where_transformers_does(name):
    """Gemma rounds unit · (1 + w) once; the others round unit and weight before the product."""
    target = load_target(GOLDEN / name, dtype=jnp.bfloat16)
    norm = nnx.merge(target.graphdef, target.params).final_norm
    x = jnp.asarray(np.random.default_rng(0).normal(size=(50, 32)), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    unit = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + target.config.rms_norm_eps)
    scale = np.asarray(norm.scale[...])
    assert not np.array_equal(scale, scale.astype(jnp.bfloat16))
    if name == "gemma3":
        expected = (unit * scale).astype(jnp.bfloat16)
    else:
        expected = unit.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
    np.testing.assert_array_equal(norm(x), expected)


@pytest.mark.slow
def test_golden_files_are_what_transformers_gives(golden):
    torch = pytest.importorskip("torch", reason="the extra `parity` is not installed")
    from transformers import AutoModelForCausalLM

    target, expected = golden
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / target.name, dtype=torch.float32)
    tokens = np.random.default_rng(9).integers(0, target.config.vocab_size, (3, 29))
    with torch.no_grad():
        reference = model(torch.from_numpy(tokens)).logits.numpy()
        stored = model(torch.from_numpy(expected["tokens"])).logits.numpy()
    logits, _ = run_in_chunks(target, tokens, np.full(3, 29), 29)
    assert np.abs(logits - reference).max() <= TOLERANCE
    assert np.abs(stored - expected["logits"]).max() <= 1e-4
