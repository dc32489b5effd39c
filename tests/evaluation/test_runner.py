"""Prompt files, and the evaluation of several drafters beside plain decoding."""

from __future__ import annotations

import numpy as np
import pytest

import specjax
from specjax import drafters, metrics
from specjax.drafters import NGram
from specjax.evaluation.prompts import read_prompts
from specjax.evaluation.runner import evaluate
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


def test_first_turns_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"turns": ["one", "more"]}\n\n{"turns": ["two"], "id": 3}\n{"turns": ["é\u2028f"]}\n'
    )
    assert read_prompts(path) == ["one", "two", "é\u2028f"]
    assert read_prompts(path, limit=2) == ["one", "two"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"turns": ["a"]}\n{"turns": []}', "line 2: expected"),
        ('{"turns": ["a"]}\n\n{"prompt": "b"}', "line 3: expected"),
        ('{"turns": "text"}', "line 1: expected"),
        ('{"turns": [""]}', "line 1: expected"),
        ('{"turns": [3]}', "line 1: expected"),
        ("[1]", "line 1: expected"),
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
