"""Whether two texts are the same: yes, near-tie or no; and the comparison of both decodings."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafters import NGram
from specjax.evaluation.compare import compare, identical, near_tie, worst

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def result(tiny):
    return specjax.decode(tiny, None, PROMPT, max_new_tokens=12)


def replaced(result, tokens):
    return dataclasses.replace(result, tokens=[np.asarray(tokens, np.int32)])


def test_equal_texts_are_identical(tiny, result):
    assert identical(tiny, result, result) == "yes"


def test_a_clear_difference_is_no(tiny, result):
    text = result.tokens[0].tolist()
    for at in (0, 5, 11):
        other = list(text)
        other[at] = (other[at] + 1) % 61
        assert identical(tiny, result, replaced(result, other)) == "no"


def test_a_text_that_stops_early_is_no(tiny, result):
    assert identical(tiny, result, replaced(result, result.tokens[0][:-1])) == "no"
    assert identical(tiny, replaced(result, result.tokens[0][:0]), result) == "no"


def test_two_tokens_with_equal_logits_are_a_near_tie(tiny, result):
    """A head with the best token's row twice: the twin is tied exactly, a third token is not."""
    text = result.tokens[0].tolist()
    best, twin = text[0], next(token for token in range(61) if token not in text + PROMPT)
    head = tiny.params["head_weight"]
    params = tiny.params | {"head_weight": head.at[twin].set(head[best])}
    tied = dataclasses.replace(tiny, params=params)
    other = replaced(result, [twin, *text[1:]])
    assert identical(tied, result, other) == "near-tie"
    assert identical(tiny, result, other) == "no"
    # Both must be near the top: two equal logits far below it are no excuse.
    low = int(jnp.argsort(head @ jnp.ones(32))[0])
    assert not near_tie(tied, np.asarray(PROMPT), (best, low))


def test_bfloat16_text_differs_by_near_ties_at_most(tiny):
    """In half precision passes of different widths round differently; nothing else may differ."""
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params)
    target = dataclasses.replace(tiny, params=half)
    prompts = np.random.default_rng(0).integers(0, 61, (16, 6)).tolist()
    plain, speculative = (
        specjax.decode(target, drafter, prompts, max_new_tokens=50) for drafter in (None, NGram(4))
    )
    assert identical(target, plain, speculative) != "no"


def test_the_worst_row_counts():
    assert worst(["yes", "yes"]) == "yes"
    assert worst(["yes", "near-tie"]) == "near-tie"
    assert worst(["near-tie", "no", "yes"]) == "no"


def test_compare_takes_medians_of_both(tiny, monkeypatch):
    """Ten seconds a plain run, four a speculative one, the first of each left out."""
    import specjax.evaluation.compare as module

    calls = []

    def timed(target, drafter, prompts, **options):
        calls.append(drafter)
        done = specjax.decode(target, drafter, prompts, **options)
        seconds = {1: 99.0, 2: 99.0, 7: 50.0, 8: 50.0}.get(len(calls), 4.0 if drafter else 10.0)
        return dataclasses.replace(done, decode_seconds=seconds)

    monkeypatch.setattr(module, "decode", timed)
    comparison = compare(tiny, NGram(3), PROMPT, repeats=3, max_new_tokens=20)
    assert calls == [None, NGram(3)] * 4
    assert comparison.plain_tokens_per_second == 2.0
    assert comparison.speculative_tokens_per_second == 5.0
    assert comparison.speedup == 2.5
    assert comparison.identical == "yes"
