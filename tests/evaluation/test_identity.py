"""Whether two texts are the same: yes, near-tie or no."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.evaluation.identity import identical, near_tie, worst

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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_two_tokens_with_equal_logits_are_a_near_tie(tiny, dtype):
    """A head with the best token's row twice: the twin is tied exactly, a third token is not."""
    params = jax.tree.map(lambda x: x.astype(dtype), tiny.params)
    tiny = dataclasses.replace(tiny, params=params)
    result = specjax.decode(tiny, None, PROMPT, max_new_tokens=12)
    text = result.tokens[0].tolist()
    best, twin = text[0], next(token for token in range(61) if token not in text + PROMPT)
    head = tiny.params["head_weight"]
    params = tiny.params | {"head_weight": head.at[twin].set(head[best])}
    tied = dataclasses.replace(tiny, params=params)
    other = replaced(result, [twin, *text[1:]])
    assert identical(tied, result, other) == "near-tie"
    assert identical(tiny, result, other) == "no"
    # Both must be near the top: two equal logits far below it are no excuse.
    others = [token for token in range(61) if token not in (best, twin)]
    assert not any(near_tie(tied, np.asarray(PROMPT), (best, token)) for token in others)


def test_a_broken_path_does_not_excuse_itself(tiny, result, monkeypatch):
    """Where the two computations differ by a bug, that is not taken for rounding."""
    import specjax.evaluation.identity as module

    real = module._last_logits
    monkeypatch.setattr(module, "_last_logits", lambda *a: (real(*a)[0][::-1], real(*a)[1]))
    best = int(result.tokens[0][0])
    others = [token for token in range(61) if token != best]
    assert not any(near_tie(tiny, np.asarray(PROMPT), (best, token)) for token in others)


def test_the_worst_row_counts():
    assert worst(["yes", "yes"]) == "yes"
    assert worst(["yes", "near-tie"]) == "near-tie"
    assert worst(["near-tie", "no", "yes"]) == "no"
