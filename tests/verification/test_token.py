"""The `token` rule: its exact law by enumeration, planted faults, and the sampler at its edges."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.noise import Noise
from specjax.sampling import draw, invert, sample
from specjax.types import Draft
from specjax.verification import enumeration
from specjax.verification.law import Law, sample_verdict
from specjax.verification.token import token_law


def random_rows(vocab, seed, concentration=0.7):
    def row(context):
        key = [seed, *(token + 1 for token in context)]
        return np.random.default_rng(key).dirichlet([concentration] * vocab)

    return row


def zeroed(rows, odd):
    """Rows with zeros in other places for odd contexts."""

    def row(context):
        values = rows(context).copy()
        values[(len(context) + odd) % len(values)] = 0
        return values / values.sum()

    return row


def one_hot(rows):
    return lambda context: np.eye(len(rows(context)))[rows(context).argmax()]


def half(rows, first):
    """All mass on one half of the vocabulary: disjoint supports."""

    def row(context):
        values = rows(context).copy()
        middle = len(values) // 2
        values[slice(middle, None) if first else slice(None, middle)] = 0
        return values / values.sum()

    return row


def full(vocab):
    """One row for all contexts, before truncation: the last token is the rarest."""
    return np.arange(vocab, 0, -1) / np.arange(vocab + 1).sum()


def truncated(row):
    """What top-k makes of it when k is one less than the vocabulary."""
    return np.append(row[:-1], 0) / row[:-1].sum()


P, Q = random_rows, functools.partial(random_rows, seed=77)
CASES = {
    "random": lambda v: (P(v, 1), Q(v)),
    "peaked": lambda v: (P(v, 2, 0.2), P(v, 3, 0.2)),
    "p = q": lambda v: (P(v, 1), P(v, 1)),
    "disjoint": lambda v: (half(P(v, 1), True), half(Q(v), False)),
    "p one-hot": lambda v: (one_hot(P(v, 1)), Q(v)),
    "q one-hot": lambda v: (P(v, 1), one_hot(Q(v))),
    "q truncated": lambda v: (P(v, 1), lambda _: truncated(full(v))),
    "zeros": lambda v: (zeroed(P(v, 1), 0), zeroed(Q(v), 1)),
}


@jax.enable_x64(True)
def enumerate_case(name, vocab, k, *, cycles=1, law=token_law, **options):
    horizon = cycles * (k + 1)
    target, drafter = (enumeration.table(vocab, horizon, rows) for rows in CASES[name](vocab))
    output, mean = enumeration.output_law(
        target, drafter, law, vocab=vocab, num_draft_tokens=k, horizon=horizon, cycles=cycles,
        **options,
    )  # fmt: skip
    plain = enumeration.sequence_law(target, horizon, options.get("stop"))
    return enumeration.total_variation(output, plain), mean, (target, drafter)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("vocab", "k"), [(2, 3), (3, 2), (4, 2), (3, 3)])
def test_exact_law(name, vocab, k):
    for valid in range(k + 1):
        distance, *_ = enumerate_case(name, vocab, k, num_valid=lambda _, valid=valid: valid)
        assert distance <= 1e-12


@pytest.mark.parametrize("name", ["random", "zeros", "q one-hot"])
@pytest.mark.parametrize("stop", [None, 1])
def test_exact_law_of_two_cycles(name, stop):
    """With a stop token inside drafts, and a draft length that depends on what came before."""
    for num_valid in (None, lambda context: (sum(context) + 1) % 3):
        distance, *_ = enumerate_case(name, 2, 2, cycles=2, stop=stop, num_valid=num_valid)
        assert distance <= 1e-12


def test_point_masses_are_one_hot_rows():
    marked, mean, _ = enumerate_case("q one-hot", 3, 3, point_mass=True)
    spelled, same_mean, _ = enumerate_case("q one-hot", 3, 3)
    assert marked <= 1e-12 and spelled <= 1e-12
    assert mean == pytest.approx(same_mean, abs=1e-14)


def test_float32_is_close():
    for name in CASES:
        distance, *_ = enumerate_case(name, 3, 2, dtype=jnp.float32)
        assert distance <= 1e-6


def test_acceptance_is_the_overlap():
    """K = 1: E[accepted] = Σ min(p, q) = 1 − TV(p, q)."""
    _, mean, (target, drafter) = enumerate_case("random", 4, 1)
    assert mean == pytest.approx(np.minimum(target[()], drafter[()]).sum(), abs=1e-14)


@jax.enable_x64(True)
def test_the_motivating_example_of_block_verification():
    """p = (1/3, 2/3), q = (2/3, 1/3), K = 2: token by token 10/9 are accepted."""
    target = enumeration.table(2, 3, lambda _: np.array([1, 2]) / 3)
    drafter = enumeration.table(2, 3, lambda _: np.array([2, 1]) / 3)
    _, mean = enumeration.output_law(
        target, drafter, token_law, vocab=2, num_draft_tokens=2, horizon=3
    )
    assert mean == pytest.approx(10 / 9, abs=1e-14)


def accept_always(draft, target):
    law = token_law(draft, target)
    slots = jnp.arange(law.terminal.shape[0])
    return dataclasses.replace(law, terminal=(slots == draft.num_valid).astype(target.dtype))


def residual_p(draft, target):
    return dataclasses.replace(
        token_law(draft, target), next_weights=lambda index: jnp.exp(target[index])
    )


def bonus_row_off_by_one(draft, target):
    law = token_law(draft, target)
    return dataclasses.replace(
        law,
        next_weights=lambda i: jnp.where(
            i == draft.num_valid, jnp.exp(target[jnp.maximum(i - 1, 0)]), law.next_weights(i)
        ),
    )


def q_before_truncation(draft, target):
    """Drafts come from the truncated row; the rule is told the full one."""
    told = jnp.broadcast_to(jnp.log(full(target.shape[-1])), draft.log_q.shape)
    return token_law(dataclasses.replace(draft, log_q=told), target)


def residual_of_another_slot(draft, target):
    law = token_law(draft, target)
    return dataclasses.replace(law, next_weights=lambda i: law.next_weights(jnp.maximum(i - 1, 0)))


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        (accept_always, "random"),
        (residual_p, "random"),
        (bonus_row_off_by_one, "random"),
        (q_before_truncation, "q truncated"),
        (residual_of_another_slot, "random"),
    ],
)
def test_planted_faults_are_caught(fault, case):
    distance, *_ = enumerate_case(case, 3, 2, law=fault)
    assert distance > 1e-3


def test_a_stopping_rule_that_looks_at_the_draft_is_caught():
    """Dropping the last drafted token because of what it is biases the output."""

    def drop_unlikely(draft, target):
        unlikely = draft.log_q[0, draft.tokens[0]] < np.log(0.4)
        return token_law(
            dataclasses.replace(draft, num_valid=jnp.where(unlikely, 0, draft.num_valid)), target
        )

    distance, *_ = enumerate_case("random", 3, 1, law=drop_unlikely)
    assert distance > 1e-2


@pytest.mark.parametrize("uniform", [0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))])
def test_the_sampler_takes_only_what_has_mass(uniform):
    u = jnp.float32(uniform)
    for weights, allowed in (
        ([0, 0, 1, 0], {2}),
        ([0, 1e-30, 0, 0], {1}),
        ([1, 0, 0, 0], {0}),
        ([0, 0, 0, 1], {3}),
        ([0, 0.25, 0, 0.75, 0], {1, 3}),
    ):
        weights = jnp.asarray(weights, jnp.float32)
        assert int(invert(weights, u)) in allowed
        assert int(draw(weights, jnp.stack([u, u]), block=2)) in allowed
        assert int(draw(weights, jnp.stack([u, u]))) in allowed


def test_u_zero_does_not_accept_what_has_probability_zero():
    """u < p is strict: u = 0 must not accept where p = 0, nor reject where p = 1."""
    assert int(invert(jnp.array([1.0, 0.0]), jnp.float32(0))) == 0
    assert int(invert(jnp.array([0.0, 1.0]), jnp.float32(0))) == 1


def test_draw_has_the_law_of_its_weights():
    """The inverse of the running sums, at a grid of uniforms finer than the weights."""
    weights = jnp.asarray(np.random.default_rng(0).dirichlet([0.3] * 11))
    grid = (jnp.arange(400) + 0.5) / 400
    pairs = jnp.stack(jnp.meshgrid(grid, grid), -1).reshape(-1, 2)
    drawn = jax.vmap(lambda u: draw(weights, u, block=4))(pairs)
    counts = np.bincount(np.asarray(drawn), minlength=11) / len(pairs)
    np.testing.assert_allclose(counts, weights, atol=3 / 400)


@pytest.mark.parametrize("reused", [False, True])
def test_reused_draft_noise_is_caught(reused):
    """The first token of draft and verdict together has law p; not if they share their noise."""
    log_q = jnp.log(jnp.array([0.7, 0.1, 0.05, 0.15]))
    log_p = jnp.log(jnp.array([0.1, 0.1, 0.4, 0.4]))
    n = 40_000

    @jax.jit
    @jax.vmap
    def first_tokens(index):
        noise = Noise(jax.random.fold_in(jax.random.key(4), index), jnp.int32(2))
        token = sample(log_q, noise.draft_gumbel(0, 0, 4))
        draft = Draft(token[None].astype(jnp.int32), log_q[None], jnp.int32(1))
        law = token_law(draft, jnp.stack([log_p, log_p]))
        verdict = sample_verdict(law, noise)
        correction = verdict.next_token
        if reused:
            weights = jnp.log(law.next_weights(verdict.node))
            correction = sample(weights, noise.draft_gumbel(0, 0, 4))
        return jnp.where(verdict.node > 0, token, correction)

    counts = np.bincount(np.asarray(first_tokens(jnp.arange(n))), minlength=4)
    expected = n * np.exp(log_p)
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert (statistic > 31) == reused  # 3 degrees of freedom: p = 8e-7


def test_verdicts_follow_the_law():
    """A chi-square test of the sampler with its own noise, at one draft: p-value above 1e-6."""
    log_q = jnp.log(jnp.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]]))
    log_p = jnp.log(jnp.array([[0.2, 0.3, 0.5], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]]))
    draft = Draft(jnp.array([0, 2], jnp.int32), log_q, jnp.int32(2))
    law: Law = token_law(draft, log_p)
    n = 40_000

    @jax.jit
    @jax.vmap
    def verdicts(index):
        noise = Noise(jax.random.fold_in(jax.random.key(3), index), jnp.int32(5))
        verdict = sample_verdict(token_law(draft, log_p), noise)
        return verdict.node * 3 + verdict.next_token

    counts = np.bincount(np.asarray(verdicts(jnp.arange(n))), minlength=9)
    rows = np.array([law.next_weights(jnp.int32(i)) for i in range(3)])
    expected = n * (np.array(law.terminal)[:, None] * rows / rows.sum(-1, keepdims=True)).ravel()
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < 40  # 6 degrees of freedom: p = 4.5e-7
