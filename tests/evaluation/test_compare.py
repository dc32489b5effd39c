"""The comparison of plain and speculative decoding."""

from __future__ import annotations

import dataclasses

import jax

import specjax
import specjax.evaluation.compare as module
from specjax.drafters import NGram
from specjax.evaluation.compare import compare


def test_compare_takes_medians_of_both(tiny, monkeypatch):
    """Ten seconds a plain run, four a speculative one, the first of each left out."""
    calls = []

    def timed(target, drafter, prompts, **options):
        calls.append(drafter)
        done = specjax.decode(target, drafter, prompts, **options)
        seconds = {1: 99.0, 2: 99.0, 7: 50.0, 8: 50.0}.get(len(calls), 4.0 if drafter else 10.0)
        return dataclasses.replace(done, decode_seconds=seconds)

    monkeypatch.setattr(module, "decode", timed)
    comparison = compare(tiny, NGram(3), [3, 1, 4, 1, 5], repeats=3, max_new_tokens=20)
    assert calls == [None, NGram(3)] * 4
    assert comparison.plain_tokens_per_second == 2.0
    assert comparison.speculative_tokens_per_second == 5.0
    assert comparison.speedup == 2.5
    assert comparison.identical == "yes"


def test_sampled_texts_are_not_compared(tiny):
    options = {"max_new_tokens": 4, "temperature": 2.0, "key": jax.random.key(0)}
    assert compare(tiny, NGram(3), [3, 1, 4, 1, 5], repeats=1, **options).identical is None
