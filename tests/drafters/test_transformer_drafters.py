"""`draft_lm` and `early_exit`: lossless, and drafting what a fresh pass would draft."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import drafters
from specjax.checkpoints.load import load_target
from specjax.drafters import NGram
from specjax.models.cache import KVCache
from specjax.models.target import Target, random_target
from specjax.models.transformer import causal_mask
from specjax.sampling import Sampling, log_probs, sample
from specjax.trees import Tree
from tests.conftest import TINY
from tests.fakes import PROMPTS, reference_text
from tests.statistics import chi_square_limit, g_statistic

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
FAMILIES = (
    *(pytest.param(x, marks=pytest.mark.slow) for x in ("llama3_scaled", "qwen2")),
    "qwen3",
    "gemma3",
)
SOME_K = [1, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 8)), 4]


@pytest.fixture(scope="module")
def small(tiny) -> Target:
    """A drafting model: the target with some noise on its weights, so that it is right sometimes."""
    noise = random_target(TINY, seed=5).params
    params = jax.tree.map(lambda x, n: x + (0.6 * n if x.ndim > 1 else 0), tiny.params, noise)
    return dataclasses.replace(tiny, params=params, name="small")


def every_drafter(target, small, k):
    return {
        "ngram": NGram(k),
        "draft_lm": drafters.draft_lm(small, target, k),
        "early_exit": drafters.early_exit(target, 2, k),
    }


@pytest.fixture(scope="module")
def texts(tiny):
    return [reference_text(tiny, prompt, 40) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["draft_lm", "early_exit"])
@pytest.mark.parametrize("k", SOME_K)
def test_greedy_text_is_plain_text(tiny, small, texts, name, k):
    drafter = every_drafter(tiny, small, k)[name]
    result = specjax.decode(tiny, drafter, PROMPTS, max_new_tokens=40)
    assert [row.tolist() for row in result.tokens] == texts
    assert 0.1 < result.alpha[0] < 1  # the drafter is neither useless nor the target itself
    single = specjax.decode(tiny, drafter, PROMPTS[1], max_new_tokens=40)
    assert single.tokens[0].tolist() == texts[1]


@pytest.mark.parametrize("k", SOME_K)
def test_the_target_as_its_own_drafter_is_always_accepted(tiny, texts, k):
    """Whole drafts leave a row of the drafter's cache out; the next draft must make up for it."""
    result = specjax.decode(tiny, drafters.draft_lm(tiny, tiny, k), PROMPTS, max_new_tokens=40)
    assert [row.tolist() for row in result.tokens] == texts
    for accepted, drafted in zip(result.accepted, result.drafted, strict=True):
        assert (accepted == drafted).all()
    assert result.tau == pytest.approx(40 / -(-40 // (k + 1)))


def kept_of_fresh_drafts(model, prompt, text, k):
    """Accepted counts, cycle by cycle, if every draft is the model's own greedy continuation."""
    done, expected = 0, []
    while done < len(text):
        draft = reference_text(model, prompt + text[:done], k)[: len(text) - done - 1]
        kept = 0
        while kept < len(draft) and draft[kept] == text[done + kept]:
            kept += 1
        expected.append(kept)
        done += kept + 1
    return expected


def test_drafts_are_what_a_fresh_pass_would_draft(tiny, small, texts):
    result = specjax.decode(tiny, drafters.draft_lm(small, tiny, 3), PROMPTS, max_new_tokens=40)
    for accepted, prompt, text in zip(result.accepted, PROMPTS, texts, strict=True):
        assert accepted.tolist() == kept_of_fresh_drafts(small, prompt, text, 3)


def test_early_exit_drafts_with_the_first_layers(tiny, texts):
    """The same with a target cut after layer 2: nothing but those layers decides."""
    config = dataclasses.replace(tiny.config, num_layers=2)
    blocks = {i: tiny.params["blocks"][i] for i in range(2)}
    cut = dataclasses.replace(tiny, config=config, params=tiny.params | {"blocks": blocks})
    result = specjax.decode(tiny, drafters.early_exit(tiny, 2, 2), PROMPTS, max_new_tokens=40)
    for accepted, prompt, text in zip(result.accepted, PROMPTS, texts, strict=True):
        assert accepted.tolist() == kept_of_fresh_drafts(cut, prompt, text, 2)


def blind(model, token):
    """The model with NaN as one token's embedding."""
    embedding = model.params["embedding"].at[token].set(jnp.nan)
    return dataclasses.replace(model, params=model.params | {"embedding": embedding})


def drafts_after(result, row, length):
    """The most drafts of a cycle that began when the row had `length` new tokens or more."""
    done = np.cumsum(result.committed[row]) - result.committed[row]
    return result.drafted[row][done >= length].max()


@pytest.mark.parametrize("temperature", [0, [0, 1, 0, 0, 0]])
def test_nothing_is_drafted_from_a_prompt_that_is_not_finite(tiny, small, texts, temperature):
    drafter = drafters.draft_lm(blind(small, 9), tiny, 3)  # in the prompts 0 and 2
    result = specjax.decode(
        tiny, drafter, PROMPTS, max_new_tokens=40, temperature=temperature, key=jax.random.key(0)
    )
    assert [result.tokens[row].tolist() for row in (0, 2, 3, 4)] == [texts[i] for i in (0, 2, 3, 4)]
    for row in (0, 2):
        assert (result.committed[row] == 1).all() and (result.drafted[row] == 0).all()
    assert drafts_after(result, 3, 0) == 3


@pytest.mark.parametrize("temperature", [0, [0, 1]])
def test_nothing_is_drafted_behind_a_token_that_is_not_finite(tiny, small, texts, temperature):
    token = next(token for token in texts[0][5:] if token not in [*texts[0][:5], *PROMPTS[0]])
    at = texts[0].index(token)
    drafter = drafters.draft_lm(blind(small, token), tiny, 3)
    result = specjax.decode(
        tiny, drafter, PROMPTS[:2], max_new_tokens=40, temperature=temperature,
        key=jax.random.key(0),
    )  # fmt: skip
    assert result.tokens[0].tolist() == texts[0]
    assert drafts_after(result, 0, 0) == 3
    assert drafts_after(result, 0, at + 1) == 0


LONG = np.split(np.random.default_rng(0).integers(3, 67, 43), [1, 10])  # 1, 9 and 33 tokens
SHORT = [row[-1:] for row in LONG]
FAMILY_OPTIONS = {"max_new_tokens": 24, "stop_tokens": []}


@functools.cache
def family_and_texts(family):
    """The golden model of a family, and its plain greedy texts after SHORT and LONG."""
    target = load_target(GOLDEN / family, dtype=jnp.float32)
    return target, [
        specjax.decode(target, None, prompts, **FAMILY_OPTIONS).tokens for prompts in (SHORT, LONG)
    ]


@pytest.mark.parametrize(
    "name",
    ["draft_lm", *(pytest.param(x, marks=pytest.mark.slow) for x in ("ngram", "early_exit"))],
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ks", [(4,), pytest.param((1, 8), marks=pytest.mark.slow)])
def test_every_family_with_every_drafter(family, name, ks):
    """Long prompts with one K only: SHORT needs no prefill, and so one program less."""
    target, (after_short, after_long) = family_and_texts(family)
    noise = np.random.default_rng(1)
    small = dataclasses.replace(
        target,
        params=jax.tree.map(
            lambda x: x + jnp.asarray(noise.normal(0, 0.05, x.shape), x.dtype), target.params
        ),
    )
    accepted, drafted = 0, 0
    for k in ks:
        drafter = every_drafter(target, small, k)[name]
        prompts, texts = (LONG, after_long) if k == 4 else (SHORT, after_short)
        result = specjax.decode(target, drafter, prompts, **FAMILY_OPTIONS)
        assert [x.tolist() for x in result.tokens] == [x.tolist() for x in texts]
        accepted += np.concatenate(result.accepted).sum()
        drafted += np.concatenate(result.drafted).sum()
    assert 0 < accepted < drafted


@pytest.mark.slow
def test_rows_with_temperature_zero_beside_others(tiny, small, texts):
    for drafter in (None, *every_drafter(tiny, small, 4).values()):
        result = specjax.decode(
            tiny, drafter, PROMPTS, max_new_tokens=40, temperature=[0, 1, 0, 1.5, 0],
            key=jax.random.key(0),
        )  # fmt: skip
        for row in (0, 2, 4):
            assert result.tokens[row].tolist() == texts[row]
        assert result.tokens[1].tolist() != texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_lm", "early_exit"])
def test_a_sampled_row_does_not_depend_on_its_batch(tiny, small, name):
    drafter = every_drafter(tiny, small, 3)[name]
    options = {
        "max_new_tokens": 30, "temperature": 1.2, "top_p": 0.95, "key": jax.random.key(7),
    }  # fmt: skip
    together = specjax.decode(tiny, drafter, PROMPTS, **options)
    fewer = specjax.decode(tiny, drafter, PROMPTS[:2], max_len=77, **options)
    for row in range(2):
        assert together.tokens[row].tolist() == fewer.tokens[row].tolist()
        assert together.accepted[row].tolist() == fewer.accepted[row].tolist()


def exact_pairs(target, prompt, temperature, top_k):
    """The law of the first two tokens, by passes without a cache."""
    sampling = Sampling(jnp.float32(temperature), jnp.int32(top_k))
    model = nnx.merge(target.graphdef, target.params)

    @jax.jit
    @jax.vmap
    def rows(tokens):
        cache = KVCache.zeros(target.config, 1, jnp.float32)
        size = len(prompt) + 1
        out = model(tokens, jnp.arange(size), cache, jnp.int32(0), causal_mask(size))
        return jax.vmap(log_probs, (0, None))(model.head(out.hidden[-2:]), sampling)

    vocab = target.config.vocab_size
    logs = np.asarray(rows(jnp.array([[*prompt, token] for token in range(vocab)])), np.float64)
    return np.exp(logs[0, 0])[:, None] * np.exp(logs[:, 1])


def joint_law_statistic(target, drafter, **options):
    """G of the first two tokens of 3 × 4096 rows of one prompt, and its limit at 1 − 1e-6."""
    prompt, rows = PROMPTS[0], 4096
    counts = np.zeros((61, 61))
    for seed in range(3):
        result = specjax.decode(
            target, drafter, [prompt] * rows, max_new_tokens=4, temperature=6.0, top_k=8,
            key=jax.random.key(seed), max_len=10, **options,
        )  # fmt: skip
        for first, second, *_ in result.tokens:
            counts[first, second] += 1
    expected = exact_pairs(target, prompt, 6.0, 8) * counts.sum()
    assert (counts[expected == 0] == 0).all()
    statistic, degrees = g_statistic(counts.ravel(), expected.ravel())
    assert degrees > 20
    return statistic, chi_square_limit(degrees)


@pytest.mark.parametrize(
    "name",
    [
        "early_exit",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("plain", "ngram", "draft_lm")),
    ],
)
def test_joint_law_of_two_tokens_in_the_real_loop(tiny, small, name):
    """A wrong correction or bonus row shows in the pairs only."""
    drafter = {"plain": None, **every_drafter(tiny, small, 2)}[name]
    statistic, limit = joint_law_statistic(tiny, drafter)
    assert statistic < limit


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_lm", "early_exit"])
def test_a_drafter_that_draws_from_another_law_than_it_reports_is_caught(
    tiny, small, name, monkeypatch
):
    def colder(log_q, gumbel):
        return sample(3 * log_q, gumbel)

    monkeypatch.setattr("specjax.drafters.autoregressive.sample", colder)
    drafter = every_drafter(tiny, small, 3)[name]  # a K of its own: nothing is compiled yet
    statistic, limit = joint_law_statistic(tiny, drafter)
    assert statistic > limit


def test_vocabularies_must_be_the_same(tiny):
    other = random_target(dataclasses.replace(TINY, vocab_size=62))
    with pytest.raises(ValueError, match="drafter random has 62 tokens, target random 61"):
        drafters.draft_lm(other, tiny)


def test_first_differing_token_is_named(tmp_path, monkeypatch):
    from tests.checkpoints.test_load import write_gguf

    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    target = load_target(write_gguf(tmp_path / "a.gguf", GOLDEN / "llama_tied"))
    assert drafters.draft_lm(target, target).name == "draft_lm:a.gguf"
    monkeypatch.setattr("tests.checkpoints.test_load.TOKENS", ["<|end|>", "<|user|>", "<|sys|>",
                        *"0123456789abcdefghijklmnopqrstuvwxyz<|>ĠĊ", "he", "ll"])  # fmt: skip
    other = load_target(write_gguf(tmp_path / "b.gguf", GOLDEN / "llama_tied"))
    with pytest.raises(ValueError, match=r"token 2 is '<\|sys\|>' and '<\|bot\|>'"):
        drafters.draft_lm(other, target)


def test_tokens_that_one_tokenizer_lacks_are_named_unless_they_are_padding(tiny):
    class Names(list):
        def convert_ids_to_tokens(self, ids):
            return [self[i] if i < len(self) else None for i in ids]

    def named(*last):
        return dataclasses.replace(tiny, tokenizer=Names([str(i) for i in range(59)] + [*last]))

    for one, other in (([], ["[PAD59]", "[PAD60]"]), (["a"], ["a", "[PAD60]"]), ([], [])):
        assert drafters.draft_lm(named(*one), named(*other))
        assert drafters.draft_lm(named(*other), named(*one))
    with pytest.raises(ValueError, match="token 60 is absent and 'b'"):
        drafters.draft_lm(named("a"), named("a", "b"))
    with pytest.raises(ValueError, match=r"token 59 is 'a' and '\[PAD59\]'"):
        drafters.draft_lm(named("a"), named("[PAD59]", "[PAD60]"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("eagle", "unknown drafter 'eagle'; known: none, ngram, early_exit, draft_lm, eagle3"),
        ("early_exit:3", "exit layer must be 1…2, got 3"),
        ("early_exit:half", "early_exit:N takes a number of layers, got 'half'"),
        ("ngram:x", "ngram:N takes its shortest match, a number, got 'x'"),
        ("ngram:0", "expected 1 ≤ min_ngram ≤ max_ngram, got 0 and 3"),
        ("draft_lm", "draft_lm needs a model"),
    ],
)
def test_specs_that_name_no_drafter(tiny, spec, message):
    with pytest.raises(ValueError, match=message):
        specjax.load_drafter(spec, tiny)


def test_specs(tiny):
    assert specjax.load_drafter("none", tiny) is None
    assert specjax.load_drafter("ngram", tiny) == NGram(8)
    assert specjax.load_drafter("ngram:2", tiny, 5) == NGram(5, min_ngram=2)
    assert specjax.load_drafter("ngram:4", tiny, 5) == NGram(5, max_ngram=4, min_ngram=4)
    with pytest.raises(
        ValueError, match="a node of 62 children needs as many tokens, there are 61"
    ):
        specjax.load_drafter("early_exit:1", tiny, tree=Tree.of_widths((62,)))
    assert specjax.load_drafter("early_exit", tiny).drafter.exit_layer == 1
    assert specjax.load_drafter("early_exit:2", tiny, 3).drafter.num_draft_tokens == 3
    for spec in ("ngram", "early_exit"):
        with pytest.raises(ValueError, match="num_draft_tokens must be at least 1, got 0"):
            specjax.load_drafter(spec, tiny, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be at least 0, got nan"),
        ({"temperature": [1.0, 1.0]}, "temperature: expected one number or 1"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"temperature": 1.0, "top_k": -1}, "top_k must be a whole number, at least 0, got -1"),
        ({"temperature": 1.0, "top_k": 2.5}, "top_k must be a whole number, at least 0, got 2.5"),
        ({"temperature": 1e39}, "temperature must be at least 0, got 1e[+]39"),
        ({"temperature": 1.0, "top_p": 1e-46}, r"top_p must be in \(0, 1\], got 1e-46"),
        ({"temperature": 1.0, "min_p": 1.0}, r"min_p must be in \[0, 1\), got 1.0"),
        ({"temperature": 1.0, "key": None}, "a temperature above 0 needs a key"),
        (
            {"temperature": 1.0, "key": jax.random.PRNGKey(0)},
            "key: expected one threefry key",
        ),
    ],
)
def test_sampling_parameters_out_of_range(tiny, options, message):
    options = {"key": jax.random.key(0)} | options
    with pytest.raises(ValueError, match=message):
        specjax.decode(tiny, NGram(2), [1, 2], **options)
