"""Acceptance by kind: texts and counts worked by hand, recounted, and against the metrics' totals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import specjax
from specjax import metrics
from specjax.evaluation import kinds
from specjax.evaluation.kinds import Kind
from tests.evaluation.test_html_transcript import pieces
from tests.evaluation.test_transcript import CYCLES, result
from tests.fakes import PROMPTS
from tests.models.test_tokenizer import sentencepiece, tokenizer_from_gguf

WORD, CONTINUATION, DIGIT, PUNCTUATION, SPACE, OTHER = Kind


@pytest.mark.parametrize(
    ("text", "before", "kind"),
    [
        (" the", ".", WORD),
        (" the", "of", WORD),
        ("ing", " go", CONTINUATION),
        ("rd", "3", CONTINUATION),
        ("def", "\n", WORD),
        ("x", "(", WORD),
        ("The", "", WORD),
        ("'t", " don", PUNCTUATION),
        ("t", "'", WORD),
        (" 42", "a", DIGIT),
        ("4th", "", DIGIT),
        ("),", "x", PUNCTUATION),
        (" +", "x", PUNCTUATION),
        ("😀", "", PUNCTUATION),
        ("\n\n", ".", SPACE),
        ("    ", "\n", SPACE),
        ("\n    x", ":", WORD),
        ("語", "日", CONTINUATION),
        ("\u0301s", "e", CONTINUATION),  # an accent that joins the letter before it
        ("\ufffd", "a", OTHER),
        ("\ufffds", "a", OTHER),
        ("\x00", "a", OTHER),
        ("", "a", OTHER),
    ],
)
def test_kinds_of_texts(text, before, kind):
    assert kinds.kind_of(text, before) is kind


def test_kinds_of_a_sentencepiece_text():
    """The first token keeps the space that decoding it alone would drop; `</s>` is a control token."""
    tokens = pieces("▁ab", "c", "<0x0A>", "<0xC3>", "<0xA9>", "a", "<0x37>", "<0x2E>", "</s>")
    told = kinds.kinds(result(tokens, CYCLES, sentencepiece()))
    assert told == [
        [WORD, CONTINUATION, SPACE, OTHER, OTHER, WORD, DIGIT, PUNCTUATION, OTHER],
    ]  # fmt: skip


def test_kinds_of_a_byte_level_text():
    names = ["<s>", "Ġa", "b", "Ã", "©", "Ċ", "Ġ"]
    tokenizer = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": names,
            "tokenizer.ggml.token_type": [3] + [1] * 6,
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": 0,
        }
    )
    tokens = np.array(
        [names.index(name) for name in ["b", "b", "Ġa", "Ã", "©", "Ċ", "Ġ", "b", "<s>"]]
    )
    done = dataclasses.replace(result(tokens, CYCLES, tokenizer), prompts=[np.array([1])])
    assert kinds.kinds(done) == [  # the first continues the prompt's last word
        [CONTINUATION, CONTINUATION, WORD, OTHER, OTHER, SPACE, SPACE, WORD, OTHER],
    ]  # fmt: skip


# accepted, accepted, corrected, accepted, accepted, bonus, undrafted, corrected, accepted
TOKENS = pieces("▁a", "b", "<0x0A>", "▁ab", "c", "a", "▁a", "▁ab", "</s>")


def test_acceptance_by_hand():
    counted = kinds.acceptance([result(TOKENS, CYCLES, sentencepiece())])
    assert list(counted) == list(Kind)
    # accepted, tried, committed. The bonus "a" and the undrafted " a" were not tried.
    assert counted[WORD] == (2, 3, 4)
    assert counted[CONTINUATION] == (2, 2, 3)
    assert counted[SPACE] == (0, 1, 1)
    assert counted[OTHER] == (1, 1, 1)
    assert counted[DIGIT] == counted[PUNCTUATION] == (0, 0, 0)
    assert counted[WORD].rate == pytest.approx(2 / 3) and np.isnan(counted[DIGIT].rate)
    said = kinds.figures(counted)
    assert said["word start"] == {"accepted": 2, "tried": 3, "committed": 4, "rate": 2 / 3}
    assert said["digit"]["rate"] is None


def random_result(rng, tokenizer):
    """Cycles and tokens at random, the last cycle of every third row cut by a stop token."""
    rows = []
    for row in range(12):
        drafted = rng.integers(0, 5, 30)
        accepted = rng.integers(0, drafted + 1)
        committed = accepted + 1
        if row % 3 == 0:
            accepted[-1] = drafted[-1] = committed[-1] = 2
        tokens = rng.integers(3, 267, committed.sum())
        rows.append(result(tokens, list(zip(accepted, drafted, committed, strict=True)), tokenizer))
    return [dataclasses.replace(row, num_draft_tokens=4, draft_depth=4) for row in rows]


def test_acceptance_is_what_a_recount_says():
    rows = random_result(np.random.default_rng(0), sentencepiece())
    recount = {kind: [0, 0, 0] for kind in Kind}
    for row in rows:
        (told,), at = kinds.kinds(row), 0
        for accepted, drafted, committed in zip(
            row.accepted[0], row.drafted[0], row.committed[0], strict=True
        ):
            for place in range(committed):
                recount[told[at]][0] += place < accepted
                recount[told[at]][1] += place < drafted  # the first rejected one was tried as well
                recount[told[at]][2] += 1
                at += 1
    counted = kinds.acceptance(rows)
    assert {kind: list(one) for kind, one in counted.items()} == recount
    assert min(one.tried for one in counted.values()) > 0


def totals(done):
    """Accepted and tried over all positions, as α_k has them."""
    accepted, drafted = np.concatenate(done.accepted), np.concatenate(done.drafted)
    tried = [np.sum((drafted >= k) & (accepted >= k - 1)) for k in range(1, done.draft_depth + 1)]
    rates = metrics.alpha(accepted, drafted, np.concatenate(done.committed), done.draft_depth)
    kept = [rate * count for rate, count in zip(rates, tried, strict=True) if count]
    return pytest.approx(sum(kept)), sum(tried), done.num_tokens


def test_sums_over_kinds_are_the_metrics_totals(tiny):
    done = specjax.decode(tiny, specjax.drafters.NGram(4), PROMPTS[0], max_new_tokens=64)
    done = dataclasses.replace(done, tokenizer=sentencepiece())
    for results in ([done], [done, done], random_result(np.random.default_rng(1), sentencepiece())):
        sums = np.sum(list(kinds.acceptance(results).values()), axis=0)
        assert tuple(sums) == totals(specjax.DecodeResult.pooled(results))


def test_without_a_tokenizer():
    with pytest.raises(ValueError, match="need a tokenizer"):
        kinds.acceptance([result(range(9), CYCLES)])
