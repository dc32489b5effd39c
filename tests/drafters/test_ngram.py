"""Prompt lookup against a search in plain Python, and worked by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import NGram
from specjax.types import Context
from tests.fakes import lookup


@functools.partial(jax.jit, static_argnames="drafter")
def jitted(drafter, context):
    return drafter.propose((), (), (), context, None)


def propose(drafter, tokens, size=24):
    padded = np.full(size, 99, np.int32)  # stale slots hold a token that also occurs in the text
    padded[: len(tokens)] = tokens
    context = Context(jnp.asarray(padded), jnp.int32(len(tokens)), None)
    draft, state = jitted(drafter, context)
    assert draft.log_q is None and state == ()
    return draft.tokens.tolist()[: int(draft.num_valid)]


@pytest.mark.parametrize("options", [{}, {"min_ngram": 2}, {"max_ngram": 1}, {"max_ngram": 5}])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_equals_a_plain_search(options, k):
    drafter = NGram(num_draft_tokens=k, **options)
    rng = np.random.default_rng(k)
    for length in [1, 2, 3, 4, 23, 24] * 6:
        tokens = rng.integers(0, rng.integers(1, 5), length).tolist()
        assert propose(drafter, tokens) == lookup(tokens, drafter), tokens


def test_the_longest_match_wins_over_a_later_one():
    tokens = [1, 2, 3, 7, 9, 3, 8, 1, 2, 3]
    assert propose(NGram(2), tokens) == [7, 9]
    assert propose(NGram(2, max_ngram=1), tokens) == [8, 1]


def test_the_latest_of_equal_matches_wins():
    assert propose(NGram(1), [5, 1, 5, 2, 5]) == [2]


def test_a_loop_is_drafted_past_its_end():
    assert propose(NGram(7), [4, 1, 2, 3, 1, 2, 3]) == [1, 2, 3, 1, 2, 3, 1]
    assert propose(NGram(4), [6, 6]) == [6, 6, 6, 6]


def test_nothing_is_drafted_without_a_match():
    assert propose(NGram(3), [1]) == []
    assert propose(NGram(3), [1, 2, 3]) == []
    # The stale slots after the text hold the anchor's own token.
    assert propose(NGram(3), [1, 2, 99]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens must be at least 1, got 0"),
        ({"min_ngram": 0}, "expected 1 ≤ min_ngram ≤ max_ngram, got 0 and 3"),
        ({"max_ngram": 2, "min_ngram": 3}, "expected 1 ≤ min_ngram ≤ max_ngram, got 3 and 2"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        NGram(**options)
