"""Drafting with a network, level after level: shared by `draft_lm`, `early_exit` and `eagle3`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters import dynamic_tree
from specjax.drafters.vocabulary import DraftVocabulary
from specjax.noise import Noise
from specjax.sampling import Sampling, argmax, log_probs, sample
from specjax.trees import DynamicTree, Tree
from specjax.types import Context, Draft

# scratch → (logits [V] after the anchor, scratch with the rows of the first pass)
FirstPass = Callable[[Any], tuple[jax.Array, Any]]
# (tokens [n], positions [n], scratch, mask [n, slots], slots of their parents [n])
# → (logits [n, V] after each, scratch with their rows in the next n slots)
Forward = Callable[
    [jax.Array, jax.Array, Any, jax.Array, jax.Array],
    tuple[jax.Array, Any],
]


class TreeDrafter:
    """The sizes of a drafter whose field `tree` is what it drafts."""

    tree: Tree | DynamicTree

    confident = False

    @property
    def num_draft_tokens(self) -> int:
        """K, or N in a tree."""
        return self.tree.num_nodes

    @property
    def draft_depth(self) -> int:
        """The most that can be accepted."""
        return self.tree.depth


def check_widths(tree: Tree | DynamicTree, vocab_size: int) -> None:
    """Raises ValueError where a node has more children than there are tokens."""
    dynamic = isinstance(tree, DynamicTree)
    widest = tree.top_k if dynamic else max(map(len, tree.children))
    if widest > vocab_size:
        raise ValueError(
            f"a node of {widest} children needs as many tokens, there are {vocab_size}"
        )


@functools.lru_cache
def slots_of(tree: Tree, first: int) -> np.ndarray:
    """`[N + 1]`: the scratch slot of each node, the number of slots for a leaf, which is never fed.

    The anchor is the last of the `first` tokens of the first pass; behind it lie the nodes that have
    children.
    """
    fed = [node for node, children in enumerate(tree.children) if children]
    slots = np.full(len(tree.children), first - 1 + len(fed), np.int32)
    slots[fed] = first - 1 + np.arange(len(fed))
    return slots


def scratch_size(tree: Tree | DynamicTree, first: int) -> int:
    """Slots that drafting a tree takes."""
    if isinstance(tree, DynamicTree):
        return dynamic_tree.scratch_size(tree, first)
    return int(slots_of(tree, first).max())


def chain_mask(slots: jax.Array, masked_slots: jax.Array) -> jax.Array:
    """`[T, slots]`: tokens of a chain in these slots see those before and themselves."""
    every = jnp.arange(masked_slots.shape[0])
    return ((every <= slots[:, None]) & ~masked_slots) | (every == slots[:, None])


@jax.custom_batching.custom_vmap
def any_row(flag: jax.Array) -> jax.Array:
    """Whether a flag, `[]` bool, holds in any row of the innermost vmap; alone it is the flag itself.

    The answer has no batch axis. So a loop or branch that it decides stays one for the whole batch:
    with a flag of each row, vmap would take both branches, and select between old and new carry row by
    row in every step.
    """
    return flag


@any_row.def_vmap
def _(batch: int, batched: list[bool], flag: jax.Array) -> tuple[jax.Array, bool]:
    return flag.any(axis=0), False


def draft(
    first_pass: FirstPass,
    scratch: Any,
    forward: Forward,
    position: jax.Array,
    tree: Tree | DynamicTree,
    context: Context,
    noise: Noise | None,
    *,
    first: int,
    vocab_size: int,
    masked_slots: jax.Array,
    vocabulary: DraftVocabulary | None = None,
    ready: jax.Array | None = None,
) -> tuple[Draft, Any]:
    """Drafts a chain or a tree, each token from the logits after its parent.

    Of a dynamic tree `dynamic_tree.draft` says how; this is about the others. A chain ends where no row
    of the batch asks for more, and takes no pass where none asks for anything; a tree is always whole.

    The rows of all passes go to a scratch and see their ancestors there, so that the cache is only
    read. Siblings are the likeliest tokens; with noise, those of the largest log q + Gumbel noise,
    which is sampling without replacement, and the draft carries the law each was drawn from. Only
    tokens before the first logits that are not finite are valid.

    Args:
      first_pass: makes the logits after the anchor, and the rows that are missing for them.
      scratch: as the first pass takes it; room for `scratch_size` slots.
      forward: the network.
      position: `[]` int32, of the row that the first logits are made at: the anchor's in a language
        model.
      tree: what is drafted.
      context: of this row.
      noise: None for the likeliest tokens.
      first: slots that are taken after the first pass, the anchor's the last.
      vocab_size: V of the logits.
      masked_slots: `[slots]` bool, those that only see themselves and are seen by nobody else.
      vocabulary: whose tokens the logits are of; the target's by default.
      ready: `[]` bool, False of a row that has nothing to offer: it asks for nothing, and none of its
        tokens is valid.
    """
    if ready is not None:
        most = tree.num_nodes if context.most is None else context.most
        context = dataclasses.replace(context, most=jnp.where(ready, most, 0))
        drafted, scratch = draft(
            first_pass, scratch, forward, position, tree, context, noise, first=first,
            vocab_size=vocab_size, masked_slots=masked_slots, vocabulary=vocabulary,
        )  # fmt: skip
        num_valid = jnp.where(ready, drafted.num_valid, 0)
        return dataclasses.replace(drafted, num_valid=num_valid), scratch
    choose = functools.partial(_children, context.sampling, noise, vocabulary)
    if tree == Tree.chain(tree.num_nodes):
        return _draft_chain(
            first_pass, scratch, forward, position, first, masked_slots, tree.num_nodes, choose,
            vocab_size, context,
        )  # fmt: skip
    logits, scratch = first_pass(scratch)
    if isinstance(tree, DynamicTree):
        grown = dynamic_tree.draft(
            logits, scratch, forward, position, tree, context.sampling, noise,
            masked_slots=masked_slots, vocabulary=vocabulary,
        )  # fmt: skip
        return grown, scratch
    return _draft_tree(logits, scratch, forward, position, first, masked_slots, tree, choose)


def _children(
    sampling: Sampling | None,
    noise: Noise | None,
    vocabulary: DraftVocabulary | None,
    logits: jax.Array,
    node: jax.typing.ArrayLike,
    depth: jax.typing.ArrayLike,
    count: int,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """The children of a node at some depth: tokens `[count]`, log q `[count, V]`, finite `[count]`."""
    finite = jnp.broadcast_to(jnp.isfinite(logits.max()), count)
    if noise is None:
        tokens = _largest(logits, count)
        return tokens if vocabulary is None else vocabulary.tokens(tokens), None, finite
    if vocabulary is not None:
        logits = vocabulary.spread(logits)
    log_q = log_probs(logits, sampling)
    gumbel = noise.draft_gumbel(node, depth, logits.shape[-1])
    if count == 1:
        return sample(log_q, gumbel)[None], None if noise.coupled else log_q[None], finite
    tokens = _largest(log_q + gumbel, count)
    if noise.coupled:
        return tokens, None, finite

    def without(elders: jax.Array) -> jax.Array:
        rest = jnp.where(elders, -jnp.inf, log_q)
        total = jax.nn.logsumexp(rest)
        return jnp.where(total > -jnp.inf, rest - total, -jnp.inf)

    taken = jax.nn.one_hot(tokens, logits.shape[-1], dtype=jnp.int32)
    return tokens, jax.vmap(without)(jnp.cumsum(taken, 0) - taken > 0), finite


def _largest(scores: jax.Array, count: int) -> jax.Array:
    """`[count]` int32, the largest first, the lowest index among equals."""
    return argmax(scores)[None] if count == 1 else jax.lax.top_k(scores, count)[1]


def _draft_chain(
    first_pass, scratch, forward, position, first, masked_slots, size, choose, vocab_size, context
):
    """One token a level, in a loop over the batch that ends when no row asks for more.

    All rows take the steps of the one that asks for most. What the others get meanwhile is valid: it is
    drawn from their own q, and that it is drawn was decided by tokens before it.
    """
    most = jnp.minimum(size if context.most is None else context.most, size)
    root_of = functools.partial(choose, node=0, depth=0, count=1)

    def asks_on(node, chosen):
        token, log_q, finite = jax.tree.map(lambda x: x[0], chosen)
        asks = finite & (node + 1 < most)
        if context.least_q is not None and log_q is not None:
            asks &= jnp.exp(log_q[token]) >= context.least_q
        return asks

    def begin(scratch):
        logits, scratch = first_pass(scratch)
        return root_of(logits), scratch

    def skip(scratch):
        shapes = jax.eval_shape(root_of, jax.ShapeDtypeStruct((vocab_size,), jnp.float32))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), scratch  # not finite

    def step(carry):
        node, asks, scratch, drafted = carry
        own = (first - 1 + node)[None]
        mask = chain_mask(own, masked_slots)
        token = drafted[0][node - 1]
        logits, scratch = forward(token[None], (position + node)[None], scratch, mask, own - 1)
        chosen = choose(logits[0], node, node, 1)
        drafted = jax.tree.map(
            lambda xs, x: jax.lax.dynamic_update_slice_in_dim(xs, x, node, 0), drafted, chosen
        )
        return node + 1, asks & asks_on(node, chosen), scratch, drafted

    root, scratch = jax.lax.cond(any_row(most > 0), begin, skip, scratch)
    drafted = jax.tree.map(lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype).at[0].set(x[0]), root)
    carry = jnp.int32(1), asks_on(0, root), scratch, drafted
    *_, scratch, (tokens, log_q, finite) = jax.lax.while_loop(
        lambda carry: any_row(carry[1]), step, carry
    )
    return Draft(tokens, log_q, _leading(finite)), scratch


def _draft_tree(logits, scratch, forward, position, first, masked_slots, tree, choose):
    """All nodes of a level that have children in one pass."""
    slots = slots_of(tree, first)
    size = masked_slots.shape[0]
    sees = np.tril(np.ones((size, size), bool))
    sees[first:, first:] = False
    for node, parent in enumerate(tree.parents, start=1):
        if tree.children[node]:
            sees[slots[node]] |= sees[slots[parent]]
            sees[slots[node], slots[node]] = True
    sees = (jnp.asarray(sees) & ~masked_slots) | jnp.eye(size, dtype=bool)

    drafted, log_qs, finite = [], [], []
    for depth in range(tree.depth):
        level = [n for n in range(len(slots)) if tree.depths[n] == depth and tree.children[n]]
        if depth == 0:
            after = logits[None]
        else:
            parents = [tree.parents[node - 1] for node in level]
            after, scratch = forward(
                jnp.concatenate(drafted)[np.array(level) - 1],
                position + np.full(len(level), depth),
                scratch,
                sees[slots[level]],
                jnp.asarray(slots[parents]),
            )
        for row, node in enumerate(level):
            chosen = choose(after[row], node, depth, len(tree.children[node]))
            for found, into in zip(chosen, (drafted, log_qs, finite), strict=True):
                into.append(found)
    log_q = None if log_qs[0] is None else jnp.concatenate(log_qs)
    num_valid = _leading(jnp.concatenate(finite))
    return Draft(jnp.concatenate(drafted), log_q, num_valid, tree), scratch


def _leading(flags: jax.Array) -> jax.Array:
    """How many are true before the first that is not."""
    return jnp.cumprod(flags.astype(jnp.int32)).sum()
