"""Decoding on a tiny model: the same text as plain decoding, and counts that can be recounted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import StopReason
from specjax.decoding.prefill import chunk_size
from specjax.drafters import NGram
from tests.fakes import PROMPTS, lookup, oracle, reference_text


@pytest.fixture(scope="module")
def texts(tiny):
    """What plain greedy decoding says after each prompt, by the reference."""
    return [reference_text(tiny, prompt, 48) for prompt in PROMPTS]


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
            draft = lookup(prompt + text[:done], drafter)[: 48 - done - 1]
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
        # What the stop token was: a kept draft, or the target's own token.
        kept = bool(result.accepted[0][-1] == result.committed[0][-1])
        seen.add("draft" if kept else "own")
        if not kept and result.drafted[0][-1]:
            whole = result.accepted[0][-1] == result.drafted[0][-1]
            seen.add("bonus" if whole else "correction")
    expected = {0: {"own"}, 1: {"draft", "bonus"}, 3: {"draft", "correction"}}
    assert seen >= expected.get(k, {"draft", "correction"})
    # As the very last token allowed, EOS still is the reason.
    stop = max(i for i in range(budget) if text.index(text[i]) == i)
    result = specjax.decode(
        tiny, drafter, prompt, max_new_tokens=stop + 1, stop_tokens=[text[stop]]
    )
    assert result.tokens[0].tolist() == text[: stop + 1]
    assert result.stop_reason == [StopReason.EOS]
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


@pytest.mark.parametrize("k", [0, 2, pytest.param(8, marks=pytest.mark.slow)])
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


def test_prompts_are_padded_little_and_cut_seldom():
    def chunks(rows):
        sizes = []
        while rows > 0:
            sizes.append(chunk_size(rows))
            rows -= sizes[-1]
        return sizes

    assert chunks(20) == [32] and chunks(33) == [64] and chunks(100) == [128]
    assert chunks(150) == [128, 32]  # not 256
    assert chunks(200) == [256] and chunks(700) == [512, 128, 64]
    assert all(sum(chunks(rows)) - rows < 64 for rows in range(1, 600))


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
    """The token is committed and nothing after it, whether decoding is plain or drafts go past it."""
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
            assert tokens.tolist() == text[:reached]
        else:
            assert (tokens.tolist(), reason) == (text[:30], StopReason.LENGTH)


@pytest.mark.parametrize("wrong_at", [0, 1, 3])
def test_a_wrong_draft_that_makes_nan_ends_nothing(tiny, texts, wrong_at):
    """0 · NaN is NaN, so a masked row must not be multiplied."""
    said = {token for text in [*texts, *PROMPTS] for token in text}
    bad = next(t for text in texts for token in text if (t := (token + 1) % 61) not in said)
    drafter = oracle(texts, num_draft_tokens=4, wrong_at=wrong_at)
    result = specjax.decode(spoilt(tiny, bad), drafter, PROMPTS, max_new_tokens=30)
    assert [row.tolist() for row in result.tokens] == [text[:30] for text in texts]


def test_infinite_logits_end_a_row_as_in_plain_decoding(tiny):
    """An infinite logit has an argmax that drafts can agree with; it is no ground to stand on."""
    head = tiny.params["head_weight"].at[20].multiply(3e38)
    target = dataclasses.replace(tiny, params=tiny.params | {"head_weight": head})
    prompts = np.random.default_rng(0).integers(0, 61, (8, 6)).tolist() + [[20] * 6]
    plain, speculative = (
        specjax.decode(target, drafter, prompts, max_new_tokens=8) for drafter in (None, NGram(4))
    )
    assert StopReason.NAN in plain.stop_reason
    assert plain.stop_reason == speculative.stop_reason
    for one, other in zip(plain.tokens, speculative.tokens, strict=True):
        assert one.tolist() == other.tolist()


def test_prompts_of_any_array_type(tiny, texts):
    for prompt in (np.array(PROMPTS[2], np.uint8), jnp.array(PROMPTS[2]), tuple(PROMPTS[2])):
        for prompts in (prompt, [prompt]):
            result = specjax.decode(tiny, NGram(2), prompts, max_new_tokens=8)
            assert result.tokens[0].tolist() == texts[2][:8]
    result = specjax.decode(tiny, NGram(2), jnp.array([PROMPTS[3]] * 2), max_new_tokens=2**62)
    assert result.stop_reason == [StopReason.CACHE_FULL] * 2
    assert len(result.tokens[0]) == 4096 - 2


def test_num_draft_tokens_beyond_the_context(tiny):
    with pytest.raises(ValueError, match="num_draft_tokens 4096 does not fit .* context of 4096"):
        specjax.decode(tiny, NGram(4096), [1])


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
        ([1, 61], {}, "prompt 0: token id 61 is outside the vocabulary of 61"),
        ([[1], [-1]], {}, "prompt 1: token id -1 is outside the vocabulary of 61"),
        ([[1.5, 2.0]], {}, "prompt 0: expected a text or a list of token ids, got float64"),
        ("text", {}, "this target has no tokenizer: give prompts as token ids"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens must be at least 1 .a whole number., got 0"),
        (
            [1],
            {"max_new_tokens": 1.5},
            "max_new_tokens must be at least 1 .a whole number., got 1.5",
        ),
        ([1], {"max_new_tokens": [1, 2]}, "expected one number or 1 .one a prompt., got"),
        ([1, 2, 3], {"max_len": 3}, "a prompt of 3 tokens leaves no room .* max_len=3; raise it"),
        ([1], {"max_len": 5000}, "max_len must be 1…4096 .the target's context., got 5000"),
        ([1], {"max_len": 0}, "max_len must be 1…4096"),
        ([1] * 4096, {}, "a prompt of 4096 tokens leaves no room .* context of 4096"),
        ([1], {"temperature": 1.0}, "a temperature above 0 needs a key"),
        ([1], {"temperature": 1.0, "key": 42}, r"key: expected one threefry key, .* got int"),
        ([1], {"temperature": 1.0, "key": jax.random.key(0, impl="rbg")}, "got key<rbg>"),
        ([1], {"temperature": 1.0, "key": jax.random.split(jax.random.key(0))}, r"fry> \(2,\)"),
        ([1], {"rule": "typical"}, "unknown rule 'typical'; known: block"),
        ([1], {"stop_tokens": [1.5]}, "stop_tokens: expected a list of token ids, got .1.5."),
        ([1], {"stop_tokens": 5}, "stop_tokens: expected a list of token ids, got 5"),
        ([1], {"stop_tokens": [[1, 2]]}, "stop_tokens: expected a list of token ids"),
        ([1], {"stop_tokens": [61]}, "stop token 61 is outside the vocabulary of 61"),
    ],
)
def test_bad_arguments_are_named(tiny, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        specjax.decode(tiny, NGram(2), prompts, **options)
