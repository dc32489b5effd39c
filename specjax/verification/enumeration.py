"""Exact laws of small cases: proves a rule lossless, without sampling noise.

Models are tables over a small vocabulary. Contexts are numbered as the nodes of a heap with V
children: the empty one is 0, and token t after context c gives c · V + 1 + t. So a table is an array
with one row of probabilities a context, and the law of a text is an array of masses.

A cycle takes every draft with its exact probability (`DraftLaw`), asks the controller how much of it
is valid and the rule's law what becomes of it. If one cycle is lossless in every context, any number
is. A chain is the tree whose nodes have one child each.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax.trees import Tree
from specjax.types import Draft
from specjax.verification.law import LawOf

Context = tuple[int, ...]
# (context, drafted tokens [N]) → num_valid. Lossless ones decide about a token without looking at it.
ValidLength = Callable[[Context, Context], int]


def contexts(vocab: int, depth: int) -> list[Context]:
    """All of up to `depth` tokens, each at the place of its number."""
    lengths = range(depth + 1)
    return [x for length in lengths for x in itertools.product(range(vocab), repeat=length)]


def number(context: Context, vocab: int) -> int:
    """Of a context."""
    return functools.reduce(lambda parent, token: parent * vocab + 1 + token, context, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class DraftLaw:
    """Every draft of a context, with its probability.

    Attributes:
      q: `[contexts, V]`, the drafter's table.
      tree: the shape of its drafts.
      sampled: siblings are drawn from the row of their path without replacement, and the draft
        carries the rows they were drawn from; else they are the likeliest tokens, a point mass.
    """

    q: np.ndarray
    tree: Tree
    sampled: bool = True

    def drafts(self, context: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The n drafts after a context.

        Returns:
          `[n, N]` tokens, `[n]` probabilities and `[n, N, V]` rows the tokens were drawn from, None
          for a point mass. A row is zero where the elder siblings have taken all that had mass; then
          the token is any of the others.
        """
        vocab = self.q.shape[1]
        if max(map(len, self.tree.children)) > vocab:
            raise ValueError(f"no node can have more children than the {vocab} tokens there are")
        tokens = _distinct(self.tree, vocab)
        if not self.sampled:
            tokens = np.zeros((1, len(self.tree.parents)), int)
            for siblings in self.tree.children:  # parents first
                nodes = numbers(self.tree, tokens, context, vocab)
                for rank, node in enumerate(siblings):
                    row = self.q[nodes[0, self.tree.parents[node - 1]]]
                    tokens[0, node - 1] = np.argsort(-row, kind="stable")[rank]
            return tokens, np.ones(1), None
        draft = np.arange(len(tokens))
        rows = self.q[numbers(self.tree, tokens, context, vocab)[:, list(self.tree.parents)]]
        probability = np.ones(len(tokens))
        for siblings in self.tree.children:
            for rank, node in enumerate(siblings):
                for elder in siblings[:rank]:
                    rows[draft, node - 1, tokens[:, elder - 1]] = 0
                total = rows[:, node - 1].sum(-1, keepdims=True)
                rows[:, node - 1] /= np.where(total > 0, total, 1)
                drawn = rows[draft, node - 1, tokens[:, node - 1]]
                probability *= np.where(total[:, 0] > 0, drawn, 1 / (vocab - rank))
        return tokens, probability, rows


@functools.lru_cache
def _distinct(tree: Tree, vocab: int) -> np.ndarray:
    """`[n, N]`: all tokens of a tree in which siblings differ."""
    every = np.array(list(itertools.product(range(vocab), repeat=len(tree.parents))))
    for siblings in tree.children:
        for one, other in itertools.combinations(siblings, 2):
            every = every[every[:, one - 1] != every[:, other - 1]]
    return every


def numbers(tree: Tree, tokens: np.ndarray, context: int, vocab: int) -> np.ndarray:
    """`[n, N + 1]`: the context at each node of drafts `[n, N]`."""
    nodes = [np.full(len(tokens), context)]
    for slot, parent in enumerate(tree.parents):
        nodes.append(nodes[parent] * vocab + 1 + tokens[:, slot])
    return np.stack(nodes, -1)


@dataclasses.dataclass(frozen=True, eq=False)
class Exact:
    """What speculative decoding makes of a case.

    Attributes:
      output: `[contexts]`, the law of the text: of the first cycles · (levels + 1) tokens, cut behind
        the stop token.
      plain: the same of plain sampling.
      survival: `[levels]`, Pr[accepted ≥ 1], Pr[accepted ≥ 2], … of the first cycle.
    """

    output: np.ndarray
    plain: np.ndarray
    survival: np.ndarray
    proper: bool = True

    @property
    def total_variation(self) -> float:
        """½ Σ |output − plain|: 0 for a lossless rule, infinite for one whose law is none."""
        return float(np.abs(self.output - self.plain).sum() / 2) if self.proper else np.inf

    @property
    def accepted(self) -> float:
        """E[accepted] of the first cycle."""
        return float(self.survival.sum())


def exact(
    law_of: LawOf,
    target: np.ndarray,
    drafts: DraftLaw,
    *,
    num_valid: ValidLength | int | None = None,
    cycles: int = 1,
    stop: int | None = None,
    dtype: jax.typing.DTypeLike = np.float64,
) -> Exact:
    """The exact law of what speculative decoding commits.

    Args:
      law_of: the rule's law.
      target: `[contexts, V]`, the target's table for all contexts of up to cycles · (levels + 1)
        tokens; the drafter's has as many rows.
      drafts: how the draft is chosen.
      num_valid: the controller, or a constant; all N tokens by default. Tokens that are not valid are
        replaced by others before the rule sees them.
      cycles: cycles that are enumerated one after another; then the target goes on alone.
      stop: a stop token; what is committed after it is dropped.
      dtype: in which the law is computed: float64, or float32 as in use.

    Raises:
      ValueError: the rule's, where it cannot verify such drafts.
    """
    vocab, horizon = target.shape[1], cycles * (drafts.tree.depth + 1)
    names = contexts(vocab, horizon)
    mass, plain = np.zeros(len(names)), np.zeros(len(names))
    mass[0] = plain[0] = 1
    survival, proper = np.zeros(drafts.tree.depth), True
    slack = 1e3 * float(jnp.finfo(dtype).eps)
    for cycle in range(cycles):
        before, mass = mass, np.zeros(len(names))
        for context in np.flatnonzero(before):
            if names[context][-1:] == (stop,):
                mass[context] += before[context]
                continue
            tokens, probability, q = drafts.drafts(context)
            tokens, valid = _invalidate(tokens, num_valid, names[context], vocab)
            nodes = numbers(drafts.tree, tokens, context, vocab)
            ends, rows = evaluate(law_of, drafts.tree, tokens, q, valid, target[nodes], dtype)
            drawn = probability > 0
            proper &= bool((ends[drawn] >= -slack).all() and (rows[ends > slack] >= -slack).all())
            proper &= bool((np.abs(ends[drawn].sum(-1) - 1) < slack).all())
            ends = ends * probability[:, None]
            if cycle == 0:
                deep = np.array(drafts.tree.depths) > np.arange(drafts.tree.depth)[:, None]
                survival = deep @ ends.sum(0)
            total = rows.sum(-1, keepdims=True)
            weights = before[context] * ends[..., None] * rows / np.where(total > 0, total, 1)
            texts = nodes[..., None] * vocab + 1 + np.arange(vocab)
            weights = np.where(ends[..., None] != 0, weights, 0)
            mass += np.bincount(texts.ravel(), weights.ravel(), len(names))
        _cut(mass, vocab, stop)
    for law in (mass, plain):
        _continue(law, target, horizon, stop)
    return Exact(mass, plain, survival, proper)


def _invalidate(
    tokens: np.ndarray, num_valid: ValidLength | int | None, context: Context, vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """Drafts `[n, N]` with other tokens where they are not valid, and `[n]` num_valid."""
    count = tokens.shape[1]
    if callable(num_valid):
        valid = np.array([num_valid(context, tuple(map(int, draft))) for draft in tokens])
    else:
        valid = np.full(len(tokens), count if num_valid is None else num_valid)
    return np.where(np.arange(count) < valid[:, None], tokens, (tokens + 1) % vocab), valid


def evaluate(
    law_of: LawOf,
    tree: Tree,
    tokens: np.ndarray,
    q: np.ndarray | None,
    num_valid: np.ndarray,
    p: np.ndarray,
    dtype: jax.typing.DTypeLike = np.float64,
) -> tuple[np.ndarray, np.ndarray]:
    """What a law makes of n drafts.

    Args:
      law_of: the law.
      tree: the shape of the drafts.
      tokens, q: `[n, N]`, and `[n, N, V]` or None.
      num_valid: `[n]`.
      p: `[n, N + 1, V]`, the target's rows.
      dtype: in which it is computed.

    Returns:
      `[n, N + 1]`, probability of each end, and `[n, N + 1, V]`, weights of the next token there.
    """
    chain = tree == Tree.chain(len(tree.parents))
    with jax.enable_x64(dtype == np.float64), np.errstate(divide="ignore"):
        batch = Draft(
            jnp.asarray(tokens, jnp.int32),
            None if q is None else jnp.asarray(np.log(q), dtype),
            jnp.asarray(num_valid, jnp.int32),
            None if chain else tree,
        )
        laws = _laws(law_of, batch, jnp.asarray(np.log(p), dtype))
        return tuple(np.asarray(x, np.float64) for x in laws)


@functools.partial(jax.jit, static_argnames="law_of")
def _laws(law_of: LawOf, drafts: Draft, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    def one(draft: Draft, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        law = law_of(draft, target)
        return law.terminal, jax.vmap(law.next_weights)(jnp.arange(target.shape[0]))

    return jax.vmap(one)(drafts, targets)


def _cut(mass: np.ndarray, vocab: int, stop: int | None) -> None:
    """Drops what stands behind a stop token."""
    parents = (np.arange(len(mass)) - 1) // vocab
    behind = np.zeros(len(mass), bool)
    for context in range(vocab + 1, len(mass)):
        parent = parents[context]
        behind[context] = behind[parent] or (parent - 1) % vocab == stop
    for context in np.flatnonzero(behind)[::-1]:
        mass[parents[context]] += mass[context]
        mass[context] = 0


def _continue(mass: np.ndarray, target: np.ndarray, horizon: int, stop: int | None) -> None:
    """Plain sampling up to the horizon."""
    vocab, first, size = target.shape[1], 0, 1
    for _ in range(horizon):
        level = np.arange(first, first + size)
        going = np.where((level > 0) & ((level - 1) % vocab == stop), 0, mass[level])
        mass[level] -= going
        first, size = first + size, size * vocab
        mass[first : first + size] += (going[:, None] * target[level]).ravel()
