"""The whole on a real model: SmolLM2-135M-Instruct in float32, with every drafter."""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import StopReason, drafters
from specjax.checkpoints import download
from specjax.drafters import NGram
from specjax.models.cache import KVCache
from specjax.models.tokenizer import encode_prompt
from specjax.models.transformer import causal_mask
from tests.fakes import Oracle
from tests.statistics import chi_square_limit, two_sample_g_statistic

pytestmark = pytest.mark.slow

PROMPTS = [
    "Repeat this text word for word: A cheap drafter proposes a few tokens. The target checks them "
    "all in one forward pass.",
    "Hi!",
    "Write a Python function that returns the n-th Fibonacci number, and a test for it. Explain "
    "each line in a comment, and do not import anything.",
    "Why is the sky blue?",
    "List the numbers from 1 to 20, one per line.",
]


@functools.lru_cache
def plain(target):
    """Plain greedy decoding of each prompt by itself."""
    return [specjax.decode(target, None, prompt, max_new_tokens=128, max_len=256)
            for prompt in PROMPTS]  # fmt: skip


def assert_same_text(alone, result, rows):
    for row in rows:
        one = alone[row]
        index = row if len(result.tokens) > 1 else 0
        assert result.tokens[index].tolist() == one.tokens[0].tolist()
        assert result.stop_reason[index] == one.stop_reason[0]


@pytest.mark.parametrize(("k", "row"), [(1, 3), (8, 0)])
def test_ngram_text_is_plain_text(smollm2, k, row):
    alone = plain(smollm2)
    single = specjax.decode(smollm2, NGram(k), PROMPTS[row], max_new_tokens=128, max_len=256)
    assert_same_text(alone, single, [row])
    ragged = specjax.decode(smollm2, NGram(k), PROMPTS, max_new_tokens=128, max_len=256)
    assert_same_text(alone, ragged, range(5))
    # The answers end in different ways, and the drafts are worth something.
    assert {StopReason.EOS, StopReason.LENGTH} == set(ragged.stop_reason)
    assert ragged.tau > 1.1


@pytest.fixture(scope="module")
def noisy(smollm2):
    """A drafting model: the target with some noise on its weights, so that it is often right."""
    rng = np.random.default_rng(0)

    def spoilt(x):
        noise = rng.standard_normal(x.shape, np.float32) if x.ndim > 1 else 0
        return x + 0.1 * x.std() * noise

    return dataclasses.replace(smollm2, params=jax.tree.map(spoilt, smollm2.params), name="noisy")


@pytest.mark.parametrize(("name", "k"), [("early_exit", 8), ("draft_lm", 2)])
def test_text_with_a_drafting_model_is_plain_text(smollm2, noisy, name, k):
    drafter = {
        "early_exit": drafters.early_exit(smollm2, 20, k),
        "draft_lm": drafters.draft_lm(noisy, smollm2, k),
    }[name]
    result = specjax.decode(smollm2, drafter, PROMPTS, max_new_tokens=48, max_len=256)
    for tokens, alone in zip(result.tokens, plain(smollm2), strict=True):
        assert tokens.tolist() == alone.tokens[0][:48].tolist()
    assert 0.1 < result.alpha[0] < 1


def pairs(target, drafter, rows=512, calls=2):
    """Counts of the first two sampled tokens, each of 8, after a prompt of one token."""
    prompt = target.tokenizer.encode("I")[:1]
    counts = collections.Counter()
    for seed in range(calls):
        key = jax.random.key(seed + (0 if drafter else calls))
        result = specjax.decode(
            target, drafter, [prompt] * rows, max_new_tokens=2, max_len=32, temperature=1.0,
            top_k=8, key=key, stop_tokens=[],
        )  # fmt: skip
        counts.update(tuple(tokens.tolist()) for tokens in result.tokens)
    return counts


def test_joint_law_of_two_tokens_is_plain_samplings(smollm2, noisy):
    """Two samples of 1024 pairs: drafts are accepted and rejected, bonus and correction drawn."""
    samples = [pairs(smollm2, d) for d in (None, drafters.draft_lm(noisy, smollm2, 1))]
    cells = set().union(*samples)
    assert len(cells) <= 64
    counts = (np.array([sample[cell] for cell in cells]) for sample in samples)
    statistic, degrees = two_sample_g_statistic(*counts)
    assert degrees > 20 and statistic < chi_square_limit(degrees)


def test_eos_inside_a_draft_at_the_bonus_and_at_the_limit(smollm2):
    """Any token can be the stop token: with perfect drafts of 4, cycles commit 5 tokens each."""
    text = plain(smollm2)[3].tokens[0].tolist()
    prompt = encode_prompt(smollm2.tokenizer, PROMPTS[3], chat=True)
    drafter = Oracle(num_draft_tokens=4, texts=(tuple(prompt + text),))
    first = [i for i in range(40) if text.index(text[i]) == i]  # not said before
    inside = next(i for i in first if i % 5 in (1, 2) and i > 4)
    bonus = next(i for i in first if i % 5 == 4)
    for at, budget in ((inside, 60), (bonus, 60), (inside, inside + 1), (bonus, bonus + 1)):
        result = specjax.decode(smollm2, drafter, prompt, max_new_tokens=budget, max_len=256,
                                stop_tokens=[text[at]])  # fmt: skip
        assert result.tokens[0].tolist() == text[: at + 1]
        assert result.stop_reason == [StopReason.EOS]
        assert result.committed[0].sum() == at + 1
        assert result.committed[0].tolist() == [5] * (at // 5) + [at % 5 + 1]


def test_logits_equal_transformers(smollm2):
    """Prefill of one prompt against `transformers` on the same GGUF file."""
    torch = pytest.importorskip("torch", reason="the extra `parity` is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

    path = download.packaged_path("smollm2")
    published = LlamaConfig(  # given, for reading it from the file takes half a minute
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True, max_position_embeddings=8192,
    )  # fmt: skip
    reference = LlamaForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=published, dtype=torch.float32
    )
    ids = np.asarray(encode_prompt(smollm2.tokenizer, PROMPTS[2], chat=True))
    with torch.no_grad():
        out = reference(torch.from_numpy(ids)[None], output_hidden_states=True)
    model = nnx.merge(smollm2.graphdef, smollm2.params)

    @jax.jit
    def forward(tokens):
        cache = KVCache.zeros(smollm2.config, 1, jnp.float32)
        positions, mask = jnp.arange(len(ids)), causal_mask(len(ids))
        out = model(tokens, positions, cache, jnp.int32(0), mask, taps=(1, 14, 28))
        return model.head(out.hidden), out.features

    logits, features = forward(jnp.asarray(ids))
    assert np.abs(logits - out.logits[0].numpy()).max() <= 2e-3
    for slot, tap in enumerate((1, 14, 28)):
        expected = out.hidden_states[tap + 1][0].numpy()
        # The residual stream of this model has entries of several thousand.
        assert np.abs(features[:, slot] - expected).max() <= 1e-5 * np.abs(expected).max()
