"""`gumbel` writes plain sampling's own text; it and `greedy` follow chosen tokens through any draft."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.noise import Noise
from specjax.sampling import Sampling, log_probs, sample
from specjax.trees import Tree
from specjax.types import Draft, Rule
from specjax.verification import RULES, cases, greedy
from specjax.verification.coupling import compare

gumbel = RULES["gumbel"]
SHAPES = [Tree.chain(3), Tree.of_widths((3, 1))]


@pytest.mark.parametrize("tree", SHAPES, ids=str)
@pytest.mark.parametrize("coupled", [True, False])
def test_the_text_is_plain_samplings(tree, coupled):
    for case in cases.CASES:
        pair = cases.tables(case, 4, tree.depth + 1)
        same, accepted = compare(gumbel, *pair, tree, 500, coupled=coupled)
        assert same.all()
        if case == "p = q" and coupled:
            assert (accepted == tree.depth).all()


def test_noise_of_another_position_is_caught():
    def early(draft, target_logits, sampling, noise):
        noise = dataclasses.replace(noise, position=noise.position - 1)
        return gumbel.verify(draft, target_logits, sampling, noise)

    pair = cases.tables("random", 4, 3)
    same, _ = compare(Rule(early), *pair, Tree.chain(2), 500, coupled=True)
    assert same.mean() < 0.8


@pytest.mark.parametrize("case", ["random", "alike", "opposite"])
def test_coupled_drafts_agree_with_the_published_probability(case):
    """Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x), below 1 − TV and above (1 − TV) / (1 + TV)."""
    p, q = cases.tables(case, 4, 2)
    ratios = np.maximum(p[0] / p[0][:, None], q[0] / q[0][:, None])
    expected = (1 / ratios.sum(-1)).sum()
    overlap = np.minimum(p[0], q[0]).sum()
    assert overlap / (2 - overlap) <= expected <= overlap
    n = 20_000
    _, accepted = compare(gumbel, p, q, Tree.chain(1), n, coupled=True)
    assert accepted.mean() == pytest.approx(expected, abs=5 * np.sqrt(0.25 / n))


def reachable(parents, tokens, choice, num_valid):
    """All nodes whose whole path holds the chosen tokens."""
    found = {0}
    for slot, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        if slot < num_valid and parent in found and token == choice[parent]:
            found.add(slot + 1)
    return found


@jax.jit
def greedy_node(tokens, num_valid, parents, logits):
    draft = Draft(tokens, None, num_valid, 6, parents)
    return greedy.verify(draft, logits, None, None)


@jax.jit
def gumbel_node(tokens, num_valid, parents, logits):
    draft = Draft(tokens, None, num_valid, 6, parents)
    sampling, noise = Sampling(jnp.float32(1)), Noise(jax.random.key(0), jnp.int32(4))

    def choose(row, depth):
        return sample(log_probs(row, sampling), noise.token_gumbel(noise.position + 1 + depth, 3))

    choice = jax.vmap(choose)(logits, draft.depths())
    return gumbel.verify(draft, logits, sampling, noise), choice


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_traced_trees_are_followed(data):
    """Six nodes of any shape, equal siblings and junk behind num_valid among them."""
    parents = sorted(data.draw(st.integers(0, i)) for i in range(6))
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=6, max_size=6))
    num_valid = data.draw(st.integers(0, 6))
    logits = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(7, 3))
    depths = Tree(tuple(parents)).depths
    junk = data.draw(st.sampled_from([0, 50, 2**31 - 1]))
    given_parents = np.array(parents[:num_valid] + [junk] * (6 - num_valid), np.int32)
    given_tokens = np.array(tokens[:num_valid] + [junk] * (6 - num_valid), np.int32)
    arguments = given_tokens, np.int32(num_valid), given_parents, logits.astype(np.float32)

    choice = logits.argmax(-1)
    found = reachable(parents, tokens, choice, num_valid)
    verdict = greedy_node(*arguments)
    deepest = max(depths[node] for node in found)
    assert int(verdict.node) == min(node for node in found if depths[node] == deepest)
    assert int(verdict.next_token) == choice[verdict.node]

    verdict, choice = gumbel_node(*arguments)
    node, choice = 0, np.asarray(choice)
    found = reachable(parents, tokens, choice, num_valid)
    while children := [i for i in found if i and parents[i - 1] == node]:
        node = min(children)
    assert (int(verdict.node), int(verdict.next_token)) == (node, choice[node])


@pytest.mark.parametrize("rule", [greedy, gumbel])
def test_static_and_traced_shapes_are_the_same(rule):
    tree = Tree.of_widths((2, 2))
    logits = jnp.zeros((7, 3)).at[:, 1].set(100)
    tokens = jnp.array([0, 1, 1, 2, 2, 1], jnp.int32)
    sampling, noise = Sampling(jnp.float32(1)), Noise(jax.random.key(0), jnp.int32(4))
    for num_valid, node in ((6, 6), (5, 2), (2, 2), (1, 0), (0, 0)):
        static = Draft(tokens, None, jnp.int32(num_valid), tree)
        traced = Draft(tokens, None, jnp.int32(num_valid), 2, jnp.asarray(tree.parents))
        for draft in (static, traced):
            verdict = rule.verify(draft, logits, sampling, noise)
            assert (int(verdict.node), int(verdict.next_token)) == (node, 1)
