"""Decoding on a tiny model: the same text as plain decoding, and counts that can be recounted."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import StopReason
from specjax.drafters import NGram
from specjax.models.cache import KVCache
from specjax.models.transformer import causal_mask
from specjax.types import Draft
from tests.drafters.test_ngram import by_hand

PROMPTS = [
    [5, 9, 2, 5, 9],
    [7],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7],
    [11, 12],
    [20, 21, 22, 20, 21, 22, 20, 21],
]


@functools.partial(jax.jit, static_argnames="graphdef")
def next_logits(graphdef, params, tokens, length):
    """Logits after `tokens[:length]` from one pass without a cache: the reference for all."""
    model = nnx.merge(graphdef, params)
    cache = KVCache.zeros(model.config, 1, jnp.float32)
    positions = jnp.arange(tokens.shape[0])
    out = model(tokens, positions, cache, jnp.int32(0), causal_mask(tokens.shape[0]))
    return model.head(out.hidden)[length - 1]


def reference_text(target, prompt, count, size=128):
    """Greedy continuation, recomputing everything for each token."""
    tokens = list(prompt)
    for _ in range(count):
        padded = np.zeros(size, np.int32)
        padded[: len(tokens)] = tokens
        logits = next_logits(target.graphdef, target.params, padded, len(tokens))
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def texts(tiny):
    """What plain greedy decoding says after each prompt, by the reference."""
    return [reference_text(tiny, prompt, 48) for prompt in PROMPTS]


@dataclasses.dataclass(frozen=True)
class Oracle(NGram):
    """Drafts from known texts, with the draft at `wrong_at` spoilt; invalid slots are absurd.

    `texts` are whole sequences, prompt included; the one whose first token the row has is used.
    """

    texts: tuple[tuple[int, ...], ...] = ()
    wrong_at: int = 99
    valid: int = 99

    def propose(self, params, target_params, state, context, noise):
        k = self.num_draft_tokens
        size = max(context.tokens.shape[0] + k, max(map(len, self.texts)))
        padded = np.zeros((len(self.texts), size), np.int32)
        for row, text in zip(padded, self.texts, strict=True):
            row[: len(text)] = text
        row = jnp.argmax(jnp.asarray(padded[:, 0]) == context.tokens[0])
        slots = jnp.arange(k)
        tokens = jnp.asarray(padded)[row, context.length + slots]
        tokens = jnp.where(slots == self.wrong_at, (tokens + 1) % 61, tokens)
        absurd = jnp.where(slots % 2 == 0, 2**31 - 1, -(2**31))
        tokens = jnp.where(slots < self.valid, tokens, absurd)
        return Draft(tokens, None, jnp.int32(min(k, self.valid))), state


def oracle(texts, **options):
    whole = tuple(tuple(p) + tuple(t) for p, t in zip(PROMPTS, texts, strict=True))
    return Oracle(texts=whole, **options)


def test_plain_text_is_the_reference(tiny, texts):
    result = specjax.decode(tiny, None, PROMPTS, max_new_tokens=48)
    assert [row.tolist() for row in result.tokens] == texts
    assert result.tau == 1.0 and result.target_passes == 48 * len(PROMPTS)
    assert result.stop_reason == [StopReason.LENGTH] * len(PROMPTS)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_ngram_text_is_plain_text(tiny, texts, k, batch):
    result = specjax.decode(tiny, NGram(k), PROMPTS[:batch], max_new_tokens=48)
    assert [row.tolist() for row in result.tokens] == texts[:batch]


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_every_count_can_be_recounted(tiny, texts, k):
    drafter = NGram(k)
    result = specjax.decode(tiny, drafter, PROMPTS, max_new_tokens=48)
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        expected, done = [], 0
        while done < 48:
            draft = by_hand(prompt + text[:done], drafter)[: 48 - done - 1]
            kept = 0
            while kept < len(draft) and draft[kept] == text[done + kept]:
                kept += 1
            expected.append((kept, len(draft), kept + 1))
            done += kept + 1
        counts = result.accepted[row], result.drafted[row], result.committed[row]
        assert list(zip(*(column.tolist() for column in counts), strict=True)) == expected


@pytest.mark.parametrize("wrong_at", range(5))
def test_an_oracle_is_accepted_up_to_its_mistake(tiny, texts, wrong_at):
    result = specjax.decode(
        tiny, oracle(texts, num_draft_tokens=4, wrong_at=wrong_at), PROMPTS, max_new_tokens=30
    )
    assert [row.tolist() for row in result.tokens] == [text[:30] for text in texts]
    for accepted in result.accepted:
        assert (accepted[:-1] == wrong_at).all()
    assert result.alpha[:wrong_at].tolist() == [1.0] * wrong_at


@pytest.mark.parametrize("valid", range(5))
def test_invalid_slots_change_nothing(tiny, texts, valid):
    result = specjax.decode(
        tiny, oracle(texts, num_draft_tokens=4, valid=valid), PROMPTS, max_new_tokens=30
    )
    assert [row.tolist() for row in result.tokens] == [text[:30] for text in texts]
    for accepted, drafted in zip(result.accepted, result.drafted, strict=True):
        assert (accepted[:-1] == valid).all() and (drafted[:-1] == valid).all()


@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_eos_at_every_position(tiny, texts, k):
    """Inside a draft, at the bonus, at the correction, and as the very last token allowed."""
    prompt, text, budget = PROMPTS[2], texts[2], 16
    drafter = oracle(texts, num_draft_tokens=k, wrong_at=2) if k else None
    seen = set()
    for at in range(budget):
        stop = text[at]
        end = text.index(stop) + 1
        result = specjax.decode(
            tiny, drafter, prompt, max_new_tokens=budget, stop_tokens=[60, stop]
        )
        assert result.tokens[0].tolist() == text[:end]
        assert result.stop_reason == [StopReason.EOS]
        # Tokens behind the stop token are neither emitted nor counted.
        assert result.committed[0].sum() == end
        assert result.accepted[0].sum() + result.target_passes - end in (0, 1)
        assert (result.accepted[0] <= result.drafted[0]).all()
        seen.add(end)
    assert len(seen) >= 3  # the text of this model does not collapse into one token
    result = specjax.decode(tiny, drafter, prompt, max_new_tokens=budget, stop_tokens=[])
    assert result.tokens[0].tolist() == text[:budget]
    assert result.stop_reason == [StopReason.LENGTH]


def test_a_cut_draft_counts_only_up_to_the_stop_token(tiny, texts):
    text = texts[2]
    at = next(i for i in range(1, 6) if text.index(text[i]) == i)
    result = specjax.decode(
        tiny,
        oracle(texts, num_draft_tokens=8),
        PROMPTS[2],
        max_new_tokens=40,
        stop_tokens=[text[at]],
    )
    assert result.accepted[0].tolist() == [at + 1]
    assert result.drafted[0].tolist() == [at + 1]
    assert result.committed[0].tolist() == [at + 1]
    assert result.tau == at + 1


def test_budgets_of_each_row(tiny, texts):
    budgets = [1, 2, 7, 30, 48]
    for drafter in (None, NGram(8)):
        result = specjax.decode(tiny, drafter, PROMPTS, max_new_tokens=budgets)
        for row, text, budget in zip(result.tokens, texts, budgets, strict=True):
            assert row.tolist() == text[:budget]


@pytest.mark.parametrize("k", [0, 2, 8])
def test_cache_full_uses_every_row(tiny, texts, k):
    """`max_len` counts the user's tokens: all of them can be used, for every K."""
    prompt = PROMPTS[2]
    drafter = oracle(texts, num_draft_tokens=k) if k else None
    for room in (1, 6):
        result = specjax.decode(tiny, drafter, prompt, max_len=len(prompt) + room)
        assert result.tokens[0].tolist() == texts[2][:room]
        assert result.stop_reason == [StopReason.CACHE_FULL]
    result = specjax.decode(tiny, drafter, prompt, max_len=len(prompt) + 5, max_new_tokens=5)
    assert result.stop_reason == [StopReason.LENGTH]


@pytest.mark.parametrize("drafter", [None, NGram(4)])
def test_a_row_does_not_depend_on_its_batch(tiny, drafter):
    together = specjax.decode(tiny, drafter, PROMPTS, max_new_tokens=40)
    backwards = specjax.decode(tiny, drafter, PROMPTS[::-1], max_new_tokens=40, max_len=201)
    for row, prompt in enumerate(PROMPTS):
        alone = specjax.decode(tiny, drafter, prompt, max_new_tokens=40, max_len=97)
        for other, index in ((alone, 0), (backwards, len(PROMPTS) - 1 - row)):
            np.testing.assert_array_equal(together.tokens[row], other.tokens[index])
            np.testing.assert_array_equal(together.committed[row], other.committed[index])


@pytest.mark.parametrize("drafter", [None, NGram(3)])
def test_long_prompts_go_through_in_chunks(tiny, drafter, monkeypatch):
    """Prompts on both sides of a chunk's edge; the text does not depend on the chunk."""
    prompt = np.random.default_rng(0).integers(0, 61, 100).tolist()
    batch = [prompt[:n] for n in (1, 15, 16, 17, 18, 33, 100)]
    whole = specjax.decode(tiny, drafter, batch, max_new_tokens=8)
    monkeypatch.setattr("specjax.decoding.prefill.CHUNKS", (16,))
    chunked = specjax.decode(tiny, drafter, batch, max_new_tokens=8)
    for row, one, other in zip(batch, whole.tokens, chunked.tokens, strict=True):
        assert one.tolist() == other.tolist() == reference_text(tiny, row, 8)


def spoilt(target, token):
    """The target with an embedding row of NaN: whoever reads that token has no finite output."""
    embedding = target.params["embedding"].at[token].set(jnp.nan)
    return dataclasses.replace(target, params=target.params | {"embedding": embedding})


@pytest.mark.parametrize("k", [0, 1, 4])
def test_nan_ends_a_row_and_only_that_row(tiny, texts, k):
    """Plain decoding commits the token and nothing after it. A pass over a draft meets it sooner.

    A masked NaN still spoils what attends to its block (0 · NaN = NaN), so up to K tokens less.
    """
    bad = texts[2][10]
    drafter = oracle(texts, num_draft_tokens=k) if k else None
    result = specjax.decode(spoilt(tiny, bad), drafter, PROMPTS, max_new_tokens=30)
    assert result.stop_reason[2] == StopReason.NAN
    assert len(set(result.stop_reason)) == 2
    for prompt, text, tokens, reason in zip(
        PROMPTS, texts, result.tokens, result.stop_reason, strict=True
    ):
        if bad in prompt or bad in text[:29]:
            reached = 0 if bad in prompt else text.index(bad) + 1
            assert reason == StopReason.NAN
            assert tokens.tolist() == text[: len(tokens)]
            assert max(reached - k, 0) <= len(tokens) <= reached
        else:
            assert (tokens.tolist(), reason) == (text[:30], StopReason.LENGTH)


def test_progress_is_reported_and_changes_nothing(tiny, texts):
    seen = []
    for drafter in (None, NGram(4)):
        result = specjax.decode(
            tiny, drafter, PROMPTS, max_new_tokens=40, progress=lambda *report: seen.append(report)
        )
        assert [row.tolist() for row in result.tokens] == [text[:40] for text in texts]
    assert ("prefill", 29, 29) in seen and ("decoding", 200, 200) in seen
    assert any(what == "decoding" and 0 < done < total for what, done, total in seen)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompts were given"),
        ([[]], {}, "prompt 0 is empty"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([1, 61], {}, "token id 61 .row 0. is outside the vocabulary of 61"),
        ([[1], [-1]], {}, "token id -1 .row 1. is outside the vocabulary of 61"),
        ([[1.5, 2.0]], {}, "prompt 0: expected a text or a list of token ids, got float64"),
        ("text", {}, "this target has no tokenizer: give prompts as token ids"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ([1], {"max_new_tokens": 1.5}, "max_new_tokens must be at least 1, got 1.5"),
        ([1], {"max_new_tokens": [1, 2]}, "expected one number or 1 .one a prompt., got"),
        ([1, 2, 3], {"max_len": 3}, "a prompt of 3 tokens leaves no room .* max_len=3; raise it"),
        ([1], {"max_len": 5000}, "max_len must be 1…4096 .the target's context., got 5000"),
        ([1], {"max_len": 0}, "max_len must be 1…4096"),
        ([1] * 4096, {}, "a prompt of 4096 tokens leaves no room .* context of 4096"),
        ([1], {"rule": "typical"}, "unknown rule 'typical'; known: greedy"),
        ([1], {"stop_tokens": [61]}, "stop token 61 .row 0. is outside the vocabulary of 61"),
    ],
)
def test_bad_arguments_are_named(tiny, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        specjax.decode(tiny, NGram(2), prompts, **options)
