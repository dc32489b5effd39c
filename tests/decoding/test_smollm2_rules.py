"""Trees and `gumbel` on a real model: SmolLM2-135M-Instruct in float32."""

from __future__ import annotations

import dataclasses

import jax
import pytest

import specjax
from specjax import drafters
from specjax.drafters import NGram
from specjax.trees import Tree, best_first
from tests.decoding.test_smollm2 import PROMPTS

pytestmark = pytest.mark.slow
OPTIONS = {"max_new_tokens": 64, "max_len": 128}
SAMPLED = {"temperature": 1.0, "key": jax.random.key(0)}


@pytest.fixture(scope="module")
def texts(smollm2):
    """Plain texts, greedy and sampled."""
    return {
        mode: [
            row.tolist()
            for row in specjax.decode(smollm2, None, PROMPTS, **OPTIONS, **options).tokens
        ]
        for mode, options in (("greedy", {}), ("sampled", SAMPLED))
    }


def first_layers(target, count):
    """The target cut behind its first layers, which it shares."""
    config = dataclasses.replace(target.config, num_layers=count)
    blocks = {i: target.params["blocks"][i] for i in range(count)}
    return dataclasses.replace(target, config=config, params=target.params | {"blocks": blocks})


DRAFTERS = {
    "ngram": lambda target: NGram(6),
    "early_exit chain": lambda target: drafters.early_exit(target, 20, 3),
    "early_exit tree": lambda target: drafters.early_exit(target, 20, tree=Tree.of_widths((2, 2))),
    "draft_lm tree": lambda target: drafters.draft_lm(
        first_layers(target, 10), target, tree=best_first((0.5, 0.2, 0.1), 5)
    ),
}


def assert_same(target, name, texts, batch, **options):
    result = specjax.decode(target, DRAFTERS[name](target), PROMPTS[:batch], **OPTIONS, **options)
    assert [row.tolist() for row in result.tokens] == texts[:batch]


@pytest.mark.parametrize(
    ("name", "batch"),
    [("ngram", 1), ("early_exit chain", 5), ("draft_lm tree", 5)],
)
def test_gumbel_text_is_plain_samplings_text(smollm2, texts, name, batch):
    assert_same(smollm2, name, texts["sampled"], batch, rule="gumbel", **SAMPLED)


@pytest.mark.parametrize(("name", "batch"), [("early_exit tree", 5), ("draft_lm tree", 1)])
def test_greedy_text_of_a_tree_is_plain_text(smollm2, texts, name, batch):
    assert_same(smollm2, name, texts["greedy"], batch)
