"""What holds for every rule that is a law: exactness, the sampler on top, and refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.noise import Noise
from specjax.sampling import Sampling
from specjax.trees import Tree
from specjax.types import Draft
from specjax.verification import RULES, cases
from specjax.verification.enumeration import DraftLaw, evaluate, numbers
from specjax.verification.law import law_of_rule

CHAIN_RULES = ("token", "block")
SIBLING_RULES = ("tree_without_replacement", "tree_traversal")
# Rule, shapes, whether drafts are sampled.
KINDS = [
    *((name, cases.CHAINS, sampled) for name in CHAIN_RULES for sampled in (True, False)),
    *((name, cases.CHAINS + cases.TREES, True) for name in SIBLING_RULES),
    ("tree_match", cases.CHAINS + cases.TREES, False),
]
LAWS = {name: law_of_rule(rule) for name, rule in RULES.items() if law_of_rule(rule)}


def described(kind):
    name, shapes, sampled = kind
    for shape in shapes:
        yield pytest.param(
            name, shape, sampled,
            id=f"{name}-V{shape[0]}-{','.join(map(str, shape[1].parents))}-{'q' if sampled else 'top'}",
        )  # fmt: skip


EVERY = [param for kind in KINDS for param in described(kind)]
FORK = 4, Tree.of_widths((2, 1))
CHAIN = 3, Tree.chain(3)
ONE_EACH = [
    *(("token", CHAIN, True), ("token", CHAIN, False), ("block", CHAIN, True)),
    *(("block", CHAIN, False), ("tree_match", FORK, False), ("tree_match", CHAIN, False)),
    *(("tree_without_replacement", FORK, True), ("tree_traversal", FORK, True)),
]


@pytest.mark.parametrize(("name", "shape", "sampled"), EVERY)
def test_exact_law(name, shape, sampled):
    """All cases and num_valid, a controller, two cycles and a stop token inside the draft."""
    result = cases.audit(LAWS[name], [shape], sampled=sampled)
    assert result.total_variation <= 1e-12, result.where


@pytest.mark.parametrize(("name", "shape", "sampled"), ONE_EACH)
def test_float32_is_close(name, shape, sampled):
    """Rounding of float32 is 6e-8; a text is a product of few such numbers."""
    for case in cases.CASES:
        for stop in (None, 1):
            exact, rounded = (
                cases.run(LAWS[name], case, shape, sampled=sampled, stop=stop, dtype=dtype)
                for dtype in (np.float64, np.float32)
            )
            assert np.abs(exact.output - rounded.output).sum() / 2 <= 1e-6
            assert abs(exact.accepted - rounded.accepted) <= 1e-6


@pytest.mark.parametrize("name", ["block", "tree_traversal"])
def test_chances_are_chances_where_p_and_q_differ_by_rounding(name):
    """A residual of 1e-7 beside 1 is lost in S + 1 − a; in S + (1 − a) it is not."""
    rng = np.random.default_rng(0)
    q = rng.dirichlet([1] * 4, (500, 3))
    p = np.concatenate([q * (1 + 2e-7 * rng.standard_normal(q.shape)), q[:, :1]], 1)
    tokens = rng.integers(4, size=(500, 3))
    ends, _ = evaluate(LAWS[name], Tree.chain(3), tokens, q, np.full(500, 3), p, np.float32)
    assert (ends >= 0).all()
    np.testing.assert_allclose(ends.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("name", CHAIN_RULES)
def test_point_masses_are_one_hot_rows(name):
    marked, spelled = (
        cases.run(LAWS[name], "q one-hot", CHAIN, sampled=sampled) for sampled in (False, True)
    )
    np.testing.assert_allclose(marked.output, spelled.output, atol=1e-15)
    np.testing.assert_allclose(marked.survival, spelled.survival, atol=1e-15)


@pytest.mark.parametrize(("name", "shape", "sampled"), ONE_EACH)
def test_what_is_not_valid_does_not_matter(name, shape, sampled):
    """Tokens beyond the vocabulary and rows of NaN behind num_valid change nothing."""
    vocab, tree = shape
    target, drafter = cases.tables("random", vocab, tree.depth + 1)
    tokens, _, q = DraftLaw(drafter, tree, sampled).drafts()
    p = target[numbers(tree, tokens, 0, vocab)]
    for valid in range(tokens.shape[1] + 1):
        count = np.full(len(tokens), valid)
        plain = evaluate(LAWS[name], tree, tokens, q, count, p)
        for junk in (2**30, -7):
            other, other_q = tokens.copy(), None if q is None else q.copy()
            other[:, valid:] = junk
            if q is not None:
                other_q[:, valid:] = np.nan
            ends, rows = evaluate(LAWS[name], tree, other, other_q, count, p)
            np.testing.assert_array_equal(ends, plain[0])
            np.testing.assert_array_equal(rows[ends > 0], plain[1][ends > 0])


@pytest.mark.parametrize(("name", "shape", "sampled"), ONE_EACH)
def test_verdicts_follow_the_law(name, shape, sampled):
    """A chi-square test of a rule as it is used, in float32 with its own noise, at one draft."""
    vocab, tree = shape
    target, drafter = cases.tables("alike", vocab, tree.depth + 1)
    tokens, _, q = DraftLaw(drafter, tree, sampled).drafts()
    tokens, q = tokens[:1], None if q is None else q[:1]
    p = target[numbers(tree, tokens, 0, vocab)]
    ends, rows = evaluate(LAWS[name], tree, tokens, q, np.array([tokens.shape[1]]), p)
    log_q = None if q is None else jnp.log(jnp.asarray(q[0], jnp.float32))
    topology = None if shape == CHAIN else tree
    draft = Draft(jnp.asarray(tokens[0], jnp.int32), log_q, jnp.int32(tokens.shape[1]), topology)
    logits = jnp.log(jnp.asarray(p[0], jnp.float32))
    n = 40_000

    @jax.jit
    @jax.vmap
    def verdicts(index):
        noise = Noise(jax.random.fold_in(jax.random.key(3), index), jnp.int32(5))
        verdict = RULES[name].verify(draft, logits, Sampling(jnp.float32(1)), noise)
        return verdict.node * vocab + verdict.next_token

    counts = np.bincount(np.asarray(verdicts(jnp.arange(n))), minlength=rows[0].size)
    expected = n * (ends[0][:, None] * rows[0] / rows[0].sum(-1, keepdims=True)).ravel()
    assert (counts[expected == 0] == 0).all()
    likely = expected > 5
    rare = counts[~likely].sum(), expected[~likely].sum()
    observed, expected = np.append(counts[likely], rare[0]), np.append(expected[likely], rare[1])
    statistic = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    freedom = likely.sum()
    assert statistic < freedom + 10 * np.sqrt(freedom) + 10  # beyond 5 standard deviations


def draft(topology=None, *, has_q=True, parents=None):
    log_q = jnp.log(jnp.full((2, 3), 1 / 3)) if has_q else None
    return Draft(jnp.array([0, 1], jnp.int32), log_q, jnp.int32(2), topology, parents)


PAIR = Tree.of_widths((2,))


@pytest.mark.parametrize(
    ("name", "wrong", "why", "instead"),
    [
        ("token", draft(PAIR), "verifies chains", "tree_traversal"),
        ("block", draft(PAIR, has_q=False), "verifies chains", "tree_match"),
        ("block", draft(2, parents=jnp.array([0, 1])), "verifies chains", "gumbel"),
        ("tree_match", draft(PAIR), "verifies deterministic trees", "tree_traversal"),
        ("tree_match", draft(), "verifies deterministic trees", "token or block"),
        ("tree_traversal", draft(PAIR, has_q=False), "needs the law q", "tree_match"),
        ("tree_traversal", draft(1, parents=jnp.array([0, 0])), "needs a static tree", "gumbel"),
        ("tree_without_replacement", draft(has_q=False), "needs the law q", "tree_match"),
        ("tree_without_replacement", draft(2, parents=jnp.array([0, 1])), "static tree", "gumbel"),
    ],
)
def test_a_draft_that_cannot_be_verified_is_refused(name, wrong, why, instead):
    noise = Noise(jax.random.key(0), jnp.int32(0))
    with pytest.raises(ValueError, match=f"^rule {name} .*{why}.*: use .*{instead}"):
        RULES[name].verify(wrong, jnp.zeros((3, 3)), Sampling(jnp.float32(1)), noise)


@pytest.mark.parametrize("name", RULES)
def test_a_pass_over_the_anchor_alone_draws_from_the_target(name):
    empty = Draft(jnp.zeros(0, jnp.int32), None, jnp.int32(0))
    logits = jnp.log(jnp.array([[0, 1.0, 0]]))
    noise = Noise(jax.random.key(0), jnp.int32(0))
    verdict = RULES[name].verify(empty, logits, Sampling(jnp.float32(1)), noise)
    assert (int(verdict.node), int(verdict.next_token)) == (0, 1)
