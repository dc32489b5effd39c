"""Exact laws of small cases: proves a rule lossless, without sampling noise.

Models are tables over a small vocabulary: context (a tuple of tokens) → row of probabilities. A cycle
draws every possible draft with its exact probability, asks the rule's law what becomes of it, and the
law of the first H tokens is summed up. If one cycle is lossless in every context, any number is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Draft
from specjax.verification.law import LawOf

Context = tuple[int, ...]
Table = Mapping[Context, np.ndarray]
Output = dict[Context, float]


def table(vocab: int, depth: int, rows: Callable[[Context], np.ndarray]) -> Table:
    """All contexts of up to `depth` tokens, each with its row."""
    contexts = (
        context
        for length in range(depth + 1)
        for context in itertools.product(range(vocab), repeat=length)
    )
    return {context: np.asarray(rows(context), np.float64) for context in contexts}


def sequence_law(target: Table, horizon: int, stop: int | None = None) -> Output:
    """The law of the first `horizon` tokens of plain sampling, cut behind the stop token."""
    law: Output = {}
    _continue(law, (), 1.0, target, horizon, stop)
    return law


def _continue(
    law: Output, context: Context, mass: float, target: Table, horizon: int, stop: int | None
) -> None:
    """Adds what plain sampling makes of a context that has some mass."""
    if len(context) >= horizon or (context and context[-1] == stop):
        law[context[:horizon]] = law.get(context[:horizon], 0.0) + mass
        return
    for token, probability in enumerate(target[context]):
        if probability > 0:
            _continue(law, (*context, token), mass * probability, target, horizon, stop)


def _drafts(drafter: Table, context: Context, k: int, vocab: int) -> Iterator:
    """(draft, its probability, its rows `[K, V]`) of all drafts with positive probability."""
    for tokens in itertools.product(range(vocab), repeat=k):
        rows = [drafter[context + tokens[:i]] for i in range(k)]
        probability = np.prod([row[token] for row, token in zip(rows, tokens, strict=True)])
        if probability > 0:
            yield tokens, float(probability), np.array(rows)


def output_law(
    target: Table,
    drafter: Table,
    law_of: LawOf,
    *,
    vocab: int,
    num_draft_tokens: int,
    horizon: int,
    cycles: int = 1,
    num_valid: Callable[[Context], int] | None = None,
    point_mass: bool = False,
    stop: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float64,
) -> tuple[Output, float]:
    """The exact law of the first tokens that speculative decoding commits.

    Args:
      target, drafter: rows for all contexts of up to `horizon` (target) or
        cycles · (K + 1) − 1 (drafter) tokens.
      law_of: the rule's law.
      vocab, num_draft_tokens: V and K.
      horizon: tokens compared; at least cycles · (K + 1). Past the cycles the target goes on.
      cycles: cycles that are enumerated one after another.
      num_valid: the controller: length of the draft, from the tokens before it; K by default.
      point_mass: the drafter's rows are one-hot and passed as such (`log_q` is None).
      stop: a stop token; what is committed after it is dropped.
      dtype: in which the law is computed.

    Returns:
      The law of the sequences, and the mean number of accepted tokens of the first cycle.
    """
    law: Output = {}
    evaluate = jax.jit(_evaluate, static_argnames="law_of")

    def cycle(context: Context, mass: float, left: int) -> float:
        if not left or (context and context[-1] == stop):
            _continue(law, context, mass, target, horizon, stop)
            return 0.0
        drafts = list(_drafts(drafter, context, num_draft_tokens, vocab))
        with np.errstate(divide="ignore"):
            log_q = np.log(np.array([rows for *_, rows in drafts]), dtype=np.float64)
            log_p = np.log(
                [
                    [target[context + tokens[:i]] for i in range(num_draft_tokens + 1)]
                    for tokens, *_ in drafts
                ]
            )
        valid = num_draft_tokens if num_valid is None else num_valid(context)
        batch = Draft(
            jnp.asarray([tokens for tokens, *_ in drafts], jnp.int32),
            None if point_mass else jnp.asarray(log_q, dtype),
            jnp.full(len(drafts), valid, jnp.int32),
        )
        accepted, rows = jax.device_get(evaluate(batch, jnp.asarray(log_p, dtype), law_of=law_of))
        mean = 0.0
        for (tokens, probability, _), chances, weights in zip(drafts, accepted, rows, strict=True):
            for count, chance in enumerate(chances.astype(np.float64)):
                if chance <= 0:
                    continue
                mean += probability * chance * count
                row = weights[count].astype(np.float64)
                for token in np.flatnonzero(row):
                    kept = _cut((*tokens[:count], int(token)), stop)
                    share = mass * probability * chance * row[token] / row.sum()
                    cycle(context + kept, share, left - 1)
        return mean

    mean_accepted = cycle((), 1.0, cycles)
    return law, mean_accepted


def _evaluate(drafts: Draft, targets: jax.Array, law_of: LawOf) -> tuple[jax.Array, jax.Array]:
    """`accepted` `[n, K + 1]` and all next-token rows `[n, K + 1, V]` of a batch of drafts."""

    def one(draft: Draft, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        law = law_of(draft, target)
        return law.terminal, jax.vmap(law.next_weights)(jnp.arange(target.shape[0]))

    return jax.vmap(one)(drafts, targets)


def _cut(tokens: Context, stop: int | None) -> Context:
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


def total_variation(one: Output, other: Output) -> float:
    """½ Σ |p − q| over all sequences that either law knows."""
    return 0.5 * sum(abs(one.get(x, 0.0) - other.get(x, 0.0)) for x in one.keys() | other.keys())
