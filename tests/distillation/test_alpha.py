"""Trained = decoded: replayed α is counted α at T = 0, and the mean of Σ min(p, q) at T = 1."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import metrics
from specjax.distillation import data, steps
from specjax.distillation.trainer import replayed
from specjax.drafters.draft_lm import draft_lm, from_layers
from tests.fakes import all_logits

K = 3
PROMPTS = [[5, 9, 2, 5, 9], [7, 1], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]


@pytest.fixture(scope="module")
def drafter(tiny):
    """Two of the tiny target's three layers: right about half of the time."""
    return draft_lm(from_layers(tiny, 2), tiny, K)


def test_replayed_is_counted_when_greedy(tiny, drafter):
    """Cycle for cycle, whether a budget or a stop token ended the text."""
    budgets = [40, 23, 31]
    free = specjax.decode(tiny, drafter, PROMPTS, max_new_tokens=budgets)
    stop = int(free.tokens[0][25])
    for stop_tokens in ((), (stop,)):
        result = specjax.decode(
            tiny, drafter, PROMPTS, max_new_tokens=budgets, stop_tokens=stop_tokens
        )
        texts = [np.append(p, t) for p, t in zip(result.prompts, result.tokens, strict=True)]
        examples = [
            data.Example(text.astype(np.int32), np.arange(len(text)) >= len(prompt))
            for text, prompt in zip(texts, result.prompts, strict=True)
        ]
        (batch,) = data.evaluation_batches(examples, batch_size=1, sequence_length=128)
        recipe = steps.Recipe(tiny.graphdef, drafter.drafter, None, (), jnp.float32)
        arrays = steps.agreement_step(recipe, drafter.params, tiny.params, batch)
        row = *(np.asarray(x)[0] for x in arrays), batch["tokens"][0]
        for number, cycles in enumerate(replayed(*row, stop_tokens)):
            counted = result.accepted[number], result.drafted[number], result.committed[number]
            np.testing.assert_array_equal(cycles, counted)
        assert result.accepted[0].sum() >= 5
    assert result.stop_reason[0].name == "EOS"


@pytest.mark.slow
def test_counted_alpha_is_the_mean_overlap_when_sampling(tiny, drafter):
    """Counted α_k lies within five standard errors of the mean Σ min(p, q) at the states it counts."""
    prompts = [PROMPTS[0]] * 24
    result = specjax.decode(
        tiny, drafter, prompts, max_new_tokens=120, temperature=1.0, key=jax.random.key(3)
    )
    small = from_layers(tiny, 2)
    overlap = [[] for _ in range(K)]
    for tokens, accepted, drafted, committed in zip(
        result.tokens, result.accepted, result.drafted, result.committed, strict=True
    ):
        text = np.append(PROMPTS[0], tokens)
        p, q = (jax.nn.softmax(all_logits(model, text)) for model in (tiny, small))
        alpha = np.asarray(jnp.minimum(p, q).sum(-1))
        anchor = len(PROMPTS[0]) - 1
        for kept, depth, moved in zip(accepted, drafted, committed, strict=True):
            for k in range(min(kept + 1, depth)):  # tried: all before it were accepted
                overlap[k].append(alpha[anchor + k])
            anchor += moved
    for k, (counted, states) in enumerate(zip(result.alpha, overlap, strict=True)):
        mean, tried = np.mean(states), len(states)
        error = np.sqrt(np.mean(np.array(states) * (1 - np.array(states))) / tried)
        assert abs(counted - mean) < 5 * error, k
        assert tried > 100 and 0.1 < mean < 0.95


def test_teacher_forced_alpha_is_another_thing(tiny, drafter):
    """On one text: the mean over every position, not over those that decoding tries."""
    agreement = np.array([[True] * K, [True] * K, [False] * K, [True, False, False], [True] * K])
    accepted, drafted, committed = metrics.replay(agreement, stopped=False)
    assert agreement[:, 0].mean() == 0.8
    assert metrics.alpha(accepted, drafted, committed, K)[0] == 1.0
