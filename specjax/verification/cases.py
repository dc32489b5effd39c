"""Small models that bring out what a rule may get wrong, and the audit of a rule on all of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import jax
import numpy as np

from specjax.trees import Tree
from specjax.verification.enumeration import Context, DraftLaw, Exact, contexts, exact
from specjax.verification.law import LawOf

Pair = tuple[np.ndarray, np.ndarray]  # the tables of target and drafter
Shape = tuple[int, Tree]  # V and what is drafted

CHAINS: tuple[Shape, ...] = tuple(
    (vocab, Tree.chain(k)) for vocab, k in ((2, 3), (3, 1), (3, 2), (3, 3), (4, 2))
)
TREES: tuple[Shape, ...] = tuple(
    (vocab, Tree.of_widths(widths))
    for vocab, widths in (
        (3, (2,)), (3, (2, 1)), (3, (1, 2)), (3, (2, 2)), (3, (2, 1, 1)), (2, (2, 2)), (4, (2, 1)),
    )
)  # fmt: skip


def random(vocab: int, depth: int, seed: int, concentration: float = 0.7) -> np.ndarray:
    """`[contexts, V]`: a Dirichlet row for every context of up to `depth` tokens."""
    rows = len(contexts(vocab, depth))
    return np.random.default_rng(seed).dirichlet([concentration] * vocab, rows)


def one_hot(table: np.ndarray) -> np.ndarray:
    """All mass on the likeliest token."""
    return np.eye(table.shape[1])[table.argmax(-1)]


def without(table: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Zeros where `tokens`, `[contexts, V]` bool, and the rest renormalised."""
    rest = np.where(tokens, 0, table)
    return rest / rest.sum(-1, keepdims=True)


def untruncated(vocab: int) -> np.ndarray:
    """`[V]`: the row of "q truncated" before its rarest token is cut off."""
    return np.arange(vocab, 0, -1) / np.arange(vocab + 1).sum()


def _zeros(p: np.ndarray, q: np.ndarray) -> Pair:
    """In other places for other contexts, and for p and q."""
    place = np.arange(len(p))[:, None] - np.arange(p.shape[1])
    return without(p, place % p.shape[1] == 0), without(q, place % p.shape[1] == 1)


def _disjoint(p: np.ndarray, q: np.ndarray) -> Pair:
    low = np.broadcast_to(np.arange(p.shape[1]) < p.shape[1] // 2, p.shape)
    return without(p, ~low), without(q, low)


def _truncated(p: np.ndarray, q: np.ndarray) -> Pair:
    full = np.broadcast_to(untruncated(p.shape[1]), q.shape)
    return p, without(full, np.arange(p.shape[1]) == p.shape[1] - 1)


def _peaked(p: np.ndarray, q: np.ndarray) -> Pair:
    return tuple(x**4 / (x**4).sum(-1, keepdims=True) for x in (p, q))


CASES: dict[str, Callable[[np.ndarray, np.ndarray], Pair]] = {
    "random": lambda p, q: (p, q),
    "alike": lambda p, q: (p, (p + q) / 2),
    "opposite": lambda p, _: (p, p[:, ::-1]),
    "peaked": _peaked,
    "p = q": lambda p, _: (p, p),
    "disjoint": _disjoint,
    "p one-hot": lambda p, q: (one_hot(p), q),
    "q one-hot": lambda p, q: (p, one_hot(q)),
    "zeros": _zeros,
    "q truncated": _truncated,
}


@functools.lru_cache
def tables(case: str, vocab: int, depth: int) -> Pair:
    """The tables of a case, for contexts of up to `depth` tokens."""
    return CASES[case](random(vocab, depth, 1), random(vocab, depth, 77))


def run(
    law_of: LawOf, case: str, shape: Shape, *, sampled: bool = True, cycles: int = 1, **options
) -> Exact:
    """`enumeration.exact` of a case."""
    vocab, tree = shape
    target, drafter = tables(case, vocab, cycles * (tree.depth + 1))
    return exact(law_of, target, DraftLaw(drafter, tree, sampled), cycles=cycles, **options)


def stopping(context: Context, tokens: Context) -> int:
    """A controller that goes on or not after every token, from what came before the next one."""
    for count in range(len(tokens)):
        if sum(context) + sum(tokens[:count]) + count == 2:
            return count
    return len(tokens)


@dataclasses.dataclass(frozen=True)
class Audit:
    """What the cases say of a rule.

    Attributes:
      total_variation: the largest.
      where: the case of that.
      accepted: E[accepted] of whole drafts, by case and shape.
    """

    total_variation: float
    where: str
    accepted: dict[tuple[str, Shape], float]


def audit(
    law_of: LawOf,
    shapes: Iterable[Shape],
    *,
    sampled: bool = True,
    dtype: jax.typing.DTypeLike = np.float64,
) -> Audit:
    """Runs a law on all cases: drafts of every valid length, and one that stops by itself; on small
    shapes also two cycles with a stop token.

    Raises:
      ValueError: the rule's, where it cannot verify such drafts.
    """
    distances, accepted = {}, {}
    for shape in shapes:
        vocab, tree = shape
        count = len(tree.parents)
        trials = [{"num_valid": valid} for valid in (*range(count + 1), stopping)]
        if tree.depth < 3:
            twice = {"cycles": 2, "stop": 1}
            trials += [twice, twice | {"num_valid": stopping}]
        for case in CASES:
            for trial in trials:
                result = run(law_of, case, shape, sampled=sampled, dtype=dtype, **trial)
                told = {name: getattr(value, "__name__", value) for name, value in trial.items()}
                where = f"{case}, V {vocab}, parents {tree.parents}, {told}"
                distances[where] = result.total_variation
                if trial == {"num_valid": count}:
                    accepted[case, shape] = result.accepted
    worst = max(distances, key=lambda where: np.nan_to_num(distances[where], nan=np.inf))
    return Audit(distances[worst], worst, accepted)
