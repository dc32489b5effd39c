"""The greedy rule against a loop in plain Python."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.sampling import argmax
from specjax.types import Draft
from specjax.verification import greedy


def by_hand(tokens, choices, num_valid):
    accepted = 0
    while accepted < num_valid and tokens[accepted] == choices[accepted]:
        accepted += 1
    return accepted, choices[accepted]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_equals_the_scalar_rule(data):
    k, vocab = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    ids = st.integers(0, vocab - 1)
    choices = data.draw(st.lists(ids, min_size=k + 1, max_size=k + 1))
    tokens = data.draw(st.lists(ids, min_size=k, max_size=k))
    num_valid = data.draw(st.integers(0, k))
    logits = np.full((k + 1, vocab), -1.0, np.float32)
    logits[np.arange(k + 1), choices] = 1.0
    draft = Draft(jnp.asarray(tokens, jnp.int32), None, jnp.int32(num_valid))
    verdict = greedy.verify(draft, jnp.asarray(logits), None, None)
    expected = by_hand(tokens, choices, num_valid)
    assert (int(verdict.node), int(verdict.next_token)) == expected


def test_the_worked_example():
    logits = jnp.eye(9)[jnp.array([4, 5, 8, 0])]
    draft = Draft(jnp.array([4, 5, 6]), None, jnp.int32(3))
    verdict = greedy.verify(draft, logits, None, None)
    assert (int(verdict.node), int(verdict.next_token)) == (2, 8)


def test_invalid_slots_are_never_accepted():
    logits = jnp.eye(4)[jnp.array([1, 2, 3])]
    draft = Draft(jnp.array([1, 2]), None, jnp.int32(1))  # slot 1 happens to agree
    verdict = greedy.verify(draft, logits, None, None)
    assert (int(verdict.node), int(verdict.next_token)) == (1, 2)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
def test_argmax_takes_the_lowest_of_equals(shape):
    logits = np.random.default_rng(0).integers(0, 3, shape).astype(np.float32)
    np.testing.assert_array_equal(argmax(jnp.asarray(logits)), logits.argmax(-1))


def test_argmax_of_infinities_and_nan():
    logits = jnp.array([[-jnp.inf, 0, -jnp.inf], [-jnp.inf] * 3, [0, jnp.nan, 1]])
    # A NaN row has no choice: V, which is no id.
    np.testing.assert_array_equal(argmax(logits), [1, 0, 3])
