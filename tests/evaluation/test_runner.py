"""Prompt files, and the evaluation of several drafters beside plain decoding."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import specjax
from specjax import drafters, metrics
from specjax.drafters import NGram
from specjax.evaluation.prompts import read_conversations, read_prompts
from specjax.evaluation.runner import Evaluation, evaluate, evaluate_turns, turns_room
from specjax.evaluation.speedup import Costs
from specjax.types import DecodeResult
from tests.checkpoints.test_load import GOLDEN, write_gguf
from tests.fakes import PROMPTS


def test_evaluation_pools_what_decode_counts(tiny):
    names = {"ngram": NGram(4), "early_exit": drafters.early_exit(tiny, 2, 2)}
    results = evaluate(tiny, names, PROMPTS, max_new_tokens=24, max_len=64)
    for name, result in results.items():
        alone = [
            specjax.decode(tiny, names[name], prompt, max_new_tokens=24, max_len=64)
            for prompt in PROMPTS
        ]
        committed, accepted, drafted = (
            np.concatenate([getattr(run, field)[0] for run in alone])
            for field in ("committed", "accepted", "drafted")
        )
        k = result.num_draft_tokens
        assert result.tau == metrics.tau(committed)
        np.testing.assert_array_equal(result.survival, metrics.survival(accepted, committed, k))
        np.testing.assert_array_equal(result.alpha, metrics.alpha(accepted, drafted, committed, k))
        assert result.identical == ["yes"] * len(PROMPTS)
        seconds = sum(run.decode_seconds for run in result.plain)
        assert result.plain_tokens_per_second == pytest.approx(24 * len(PROMPTS) / seconds)


def counted(rows, *, tokens, seconds):
    """A result of one batch from accepted and drafted counts of each row."""
    accepted, drafted = zip(*(map(np.array, row) for row in rows), strict=True)
    return DecodeResult(
        [], tokens, [], list(accepted), list(drafted), [row + 1 for row in accepted], [], 3, 3,
        0.0, seconds,
    )  # fmt: skip


def test_figures_of_a_hand_worked_evaluation():
    """Two rows: 3 + 1 + 1 and 1 + 1 tokens; the second row ends one cycle sooner."""
    tokens = [np.zeros(5), np.zeros(2)]
    plain = counted([([0] * 5, [0] * 5), ([0] * 2, [0] * 2)], tokens=tokens, seconds=5.0)
    drafted = counted([([2, 0, 0], [3, 3, 0]), ([0, 0], [3, 0])], tokens=tokens, seconds=4.5)
    one = Evaluation([plain], [drafted], [], [], [], 7.0, [0, 1])
    assert one.tau == pytest.approx(7 / 5)
    assert one.tau_of_prompts == pytest.approx((5 / 3 + 1) / 2)
    assert one.accepted_share == pytest.approx(2 / 9)
    assert one.passes_per_token == pytest.approx(5 / 7)
    # Three cycles of the batch; in the third nobody had a draft.
    assert one.cycle_seconds == 1.5 and one.drafting_share == pytest.approx(2 / 3)
    costs = Costs(plain=1.0, draft=0.1, verify=1.6)
    assert one.predicted_speedup(costs) == pytest.approx(5 / (2 * 1.7 + 1.1))
    assert one.speedup == pytest.approx(7 / 4.5 / (7 / 5))
    assert one.rows_a_batch == 2
    low, high = one.tau_of_prompts_interval
    assert 1 <= low < one.tau_of_prompts < high <= 5 / 3
    # A second turn of the same two conversations: no more of them to draw from.
    both = Evaluation.pooled([one, one])
    assert both.tau == one.tau and both.predicted_speedup(costs) == one.predicted_speedup(costs)
    assert both.tau_of_prompts == one.tau_of_prompts
    assert both.tau_interval == one.tau_interval and both.tau_of_prompts_interval == (low, high)
    # Above temperature 0 the text may be shorter than the plain one: 7 tokens of 14.
    longer = counted(
        [([0] * 10, [0] * 10), ([0] * 4, [0] * 4)], tokens=[np.zeros(10), np.zeros(4)], seconds=10.0
    )
    uneven = dataclasses.replace(one, plain=[longer])
    assert uneven.predicted_speedup(costs) == pytest.approx(one.predicted_speedup(costs))
    assert uneven.speedup == pytest.approx(7 / 4.5 / (14 / 10))


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A tiny target with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("talker") / "tiny.gguf"
    return specjax.load_target(write_gguf(path, GOLDEN / "llama_untied"), dtype=np.float32)


def test_a_second_turn_follows_plain_decodings_answer(talker):
    conversations = [["he", "lo"], ["abab"], ["lo", "he he", "he"]]
    options = {"max_new_tokens": 8}
    room = turns_room(talker, dict(enumerate(conversations)), 2, 8)
    drafted = {"ngram": NGram(2), "none to see": NGram(3)}
    results = evaluate_turns(talker, drafted, conversations, turns=2, max_len=room, **options)
    asked = [prompt for run in results["ngram"].plain for prompt in run.prompts]
    assert len(asked) == 5
    for first, second, turns in ((0, 3, conversations[0]), (2, 4, conversations[2])):
        answer = results["ngram"].plain[first].texts[0]
        wanted = talker.tokenizer.apply_chat_template(
            [
                {"role": "user", "content": turns[0]},
                {"role": "assistant", "content": answer},
                {"role": "user", "content": turns[1]},
            ],
            add_generation_prompt=True, return_dict=True,
        )["input_ids"]  # fmt: skip
        np.testing.assert_array_equal(asked[second], wanted)
    assert set(results["none to see"].identical) == {"yes"}
    assert list(results["ngram"].prompts) == [0, 1, 2, 0, 2]


def test_conversations_longer_than_the_context_are_named(talker):
    context = talker.config.context_length
    with pytest.raises(ValueError, match="prompt 7: a prompt of .* leaves no room"):
        turns_room(talker, {1: ["he"], 7: ["he", "he"]}, 2, context)


def test_first_turns_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"turns": ["one", "more"]}\n\n{"turns": ["two"], "id": 3}\n{"prompt": "é\u2028f"}\n'
    )
    assert read_prompts(path) == ["one", "two", "é\u2028f"]
    assert read_prompts(path, limit=2) == ["one", "two"]
    assert read_conversations(path) == [["one", "more"], ["two"], ["é\u2028f"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"turns": ["a"]}\n{"turns": []}', "line 2: expected"),
        ('{"turns": ["a"]}\n\n{"prompt": ["b"]}', "line 3: expected"),
        ('{"turns": "text"}', "line 1: expected"),
        ('{"turns": [""]}', "line 1: expected"),
        ('{"turns": [3]}', "line 1: expected"),
        ('{"turns": ["a", " "]}', "line 1: expected"),
        ("[1]", "line 1: expected"),
        ('"a prompt"', "line 1: expected"),
        ("not json", "line 1: expected .* got 'not json'"),
        ("\n\n", "no prompts in it"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path, content, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_prompt_file_that_is_no_text(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_prompts(path)
    with pytest.raises(FileNotFoundError):
        read_prompts(tmp_path / "missing.jsonl")
