"""Drafting token by token: as many passes as some row asks for, and what is valid of the drafts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import autoregressive
from specjax.noise import Noise
from specjax.sampling import Sampling
from specjax.trees import Tree
from specjax.types import Context

K, V = 6, 9
TABLE = jnp.asarray(np.random.default_rng(8).normal(0, 2.5, (V, V)), jnp.float32)
ANCHORS = jnp.array([1, 4, 7])
UNSURE = 0.4


def one(most, anchor, ready=None, *, least_q=None, sampled=False, coupled=False, table=TABLE):
    """A chain of bigrams; its scratch counts the passes."""

    def first_pass(passes):
        return table[anchor], passes + 1

    def forward(tokens, positions, passes, mask, parents):
        return table[tokens], passes + 1

    sampling = Sampling(jnp.float32(1.0)) if sampled else None
    noise = Noise(jax.random.key(3), anchor, coupled) if sampled else None
    context = Context(None, None, None, sampling, most, least_q)
    return autoregressive.draft(
        first_pass, jnp.int32(0), forward, jnp.int32(0), Tree.chain(K), context, noise,
        first=1, vocab_size=V, masked_slots=jnp.zeros(K, bool), ready=ready,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("sampled", "coupled"))
def _batch(most, anchors, least_q, table, sampled, coupled):
    options = {"least_q": least_q, "sampled": sampled, "coupled": coupled, "table": table}
    return jax.vmap(functools.partial(one, **options))(most, anchors)


def batch(most=None, anchors=ANCHORS, least_q=None, table=TABLE, *, sampled=False, coupled=False):
    """Drafts, and the number of passes, which is the same for all rows."""
    most = None if most is None else jnp.asarray(most)
    drafts, passes = _batch(most, anchors, least_q, table, sampled, coupled)
    assert len(set(passes.tolist())) == 1
    return drafts, int(passes[0])


@pytest.mark.parametrize("sampled", [False, True])
def test_there_are_as_many_passes_as_some_row_asks_for(sampled):
    whole, passes = batch(sampled=sampled)
    assert passes == K and whole.num_valid.tolist() == [K] * 3
    assert len(set(whole.tokens.ravel().tolist())) > 2
    for most, expected in (
        ([0, 0, 0], 0), ([-3, 0, 0], 0), ([1, 1, 1], 1), ([0, 1, 0], 1), ([2, 0, 4], 4),
        ([1, 99, 1], K),
    ):  # fmt: skip
        drafts, passes = batch(most, sampled=sampled)
        assert passes == expected
        # What was drafted because another row went on is as good.
        assert drafts.num_valid.tolist() == [expected] * 3
        np.testing.assert_array_equal(drafts.tokens[:, :expected], whole.tokens[:, :expected])
        if sampled:
            np.testing.assert_array_equal(drafts.log_q[:, :expected], whole.log_q[:, :expected])


def test_a_row_without_a_batch():
    for most in (0, 1, 3):
        draft, passes = one(jnp.int32(most), ANCHORS[0])
        assert passes == draft.num_valid == most


def said(drafts):
    """`[B, K]` probabilities that the tokens were drawn with."""
    return np.exp(np.take_along_axis(np.asarray(drafts.log_q), drafts.tokens[..., None], -1))[
        ..., 0
    ]


@pytest.mark.parametrize("most", [[K, K, K], [K, 0, 0], [0, K, 0], [0, 0, K], [2, K, 3]])
def test_nothing_is_drafted_behind_an_unsure_token_of_every_row(most):
    whole, _ = batch(sampled=True)
    unsure = said(whole) < UNSURE
    until = [
        min(asked, 1 + (np.append(row, True)).argmax())
        for asked, row in zip(most, unsure, strict=True)
    ]
    drafts, passes = batch(most, sampled=True, least_q=jnp.float32(UNSURE))
    assert passes == max(until)
    assert drafts.num_valid.tolist() == [passes] * 3
    np.testing.assert_array_equal(drafts.tokens[:, :passes], whole.tokens[:, :passes])


def test_rows_are_sure_for_different_lengths():
    """Else the test above would not see a row that goes on for another, or stops."""
    whole, _ = batch(sampled=True)
    assert len({int(np.append(row, True).argmax()) for row in said(whole) < UNSURE}) == 3


@pytest.mark.parametrize("options", [{}, {"sampled": True, "coupled": True}])
def test_a_draft_without_a_law_does_not_stop(options):
    assert batch([5, 1, 1], least_q=jnp.float32(1.0), **options)[1] == 5


def test_a_row_whose_logits_are_not_finite_asks_no_further():
    """It is valid up to there, and keeps nobody else from going on."""
    whole, _ = batch()
    row, place = 0, 2
    token = int(whole.tokens[row, place])
    reached = [np.append(x == token, True).argmax() for x in np.asarray(whole.tokens)]
    blind = TABLE.at[token].set(jnp.nan)
    drafts, passes = batch(table=blind)
    valid = [min(K, 1 + x) for x in reached]
    assert drafts.num_valid.tolist() == valid
    assert passes == min(K, 1 + max(valid))  # one pass to see that its logits are not finite
    alone, passes = batch(anchors=ANCHORS[:1], table=blind)
    assert alone.num_valid.tolist() == valid[:1] and passes == valid[0] + 1 < K


def test_a_row_that_is_not_ready_asks_for_nothing():
    ready, most = jnp.array([True, False, False]), jnp.array([2, K, K])
    drafts, passes = jax.vmap(one)(most, ANCHORS, ready)
    assert passes.tolist() == [2, 2, 2] and drafts.num_valid.tolist() == [2, 0, 0]
    drafts, passes = jax.vmap(functools.partial(one, None))(ANCHORS, ready)
    assert passes.tolist() == [K] * 3 and drafts.num_valid.tolist() == [K, 0, 0]


def predicates(program):
    """Shapes of what the loops and branches of a program are decided by."""
    for equation in program.eqns:
        if equation.primitive.name == "while":
            yield from (out.aval.shape for out in equation.params["cond_jaxpr"].jaxpr.outvars)
        if equation.primitive.name == "cond":
            yield equation.invars[0].aval.shape
        for inner in jax.tree.leaves(tuple(equation.params.values())):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from predicates(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("least_q", [None, 0.3])
def test_loop_and_branch_are_one_for_the_batch(least_q):
    """With a predicate of each row vmap would select old and new arrays of log q in every step."""
    run = functools.partial(one, sampled=True, least_q=least_q)
    program = jax.make_jaxpr(jax.vmap(run))(jnp.array([1, 2, 3]), ANCHORS)
    assert [shape for shape in predicates(program.jaxpr) if shape] == []
    assert len(list(predicates(program.jaxpr))) >= 2
