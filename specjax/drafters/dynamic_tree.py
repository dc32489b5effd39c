"""Drafting a tree that grows where the drafter is sure (EAGLE-2, Li et al. 2024b, §4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from specjax.drafters.vocabulary import DraftVocabulary
from specjax.noise import Noise
from specjax.sampling import Sampling, log_probs
from specjax.trees import DynamicTree
from specjax.types import Draft

if TYPE_CHECKING:
    from specjax.drafters.autoregressive import Forward


def scratch_size(tree: DynamicTree, first: int) -> int:
    """Slots that drafting takes behind `first`: those of every level but the last."""
    return first + (tree.depth - 1) * tree.top_k


def draft(
    logits: jax.Array,
    scratch: Any,
    forward: Forward,
    position: jax.Array,
    tree: DynamicTree,
    sampling: Sampling | None,
    noise: Noise | None,
    *,
    masked_slots: jax.Array,
    vocabulary: DraftVocabulary | None = None,
) -> Draft:
    """Expands the likeliest nodes of each level, then keeps the likeliest of all.

    A node is worth the sum of log q along its path, so no child is worth more than its parent, and
    what is kept is a tree. Nothing is valid where any logits are not finite.

    Args:
      logits: `[V]` after the anchor.
      scratch: with the anchor's row in slot 0; room for `scratch_size` slots.
      forward: the network.
      position: `[]` int32, of the anchor's row.
      tree: its sizes.
      sampling: of this row; counts only where the noise is coupled.
      noise: where it is coupled, a token is worth the log softmax of log q + the noise that plain
        sampling will use, so that the tree follows the text it will write (our own extension). Any
        other noise changes nothing: the tree is deterministic.
      masked_slots: `[slots]` bool, those that are seen by nobody else.
      vocabulary: whose tokens the logits are of; the target's by default.
    """
    width, slots = tree.top_k, jnp.arange(masked_slots.shape[0])

    def expand(logits: jax.Array, depth: int) -> tuple[jax.Array, jax.Array]:
        """Tokens and their log q, `[n, top_k]`, of logits `[n, V]`."""
        if noise is not None and noise.coupled:
            size = logits.shape[-1] if vocabulary is None else vocabulary.target_size
            gumbel = noise.draft_gumbel(0, depth, size)
            gumbel = gumbel if vocabulary is None else gumbel[vocabulary.array]
            logits = jax.vmap(log_probs, (0, None))(logits, sampling) + gumbel
        log_q, index = jax.lax.top_k(jax.nn.log_softmax(logits), width)
        return index if vocabulary is None else vocabulary.tokens(index), log_q

    tokens, worth = (x[0] for x in expand(logits[None], 0))
    finite = jnp.isfinite(logits.max())
    pool = [(tokens, worth, jnp.full(width, -1))]  # of every node its parent's place in the pool
    frontier, parent_slots = jnp.arange(width), jnp.zeros(width, jnp.int32)
    sees = jnp.broadcast_to(slots == 0, (width, len(slots))) & ~masked_slots
    for depth in range(1, tree.depth):
        own = 1 + (depth - 1) * width + jnp.arange(width)
        sees |= slots == own[:, None]
        after, scratch = forward(
            tokens, jnp.full(width, position + depth), scratch, sees, parent_slots
        )
        finite &= jnp.isfinite(after.max(-1)).all()
        children, log_q = expand(after, depth)
        values = (worth[:, None] + log_q).ravel()
        base = width + (depth - 1) * width**2
        pool.append((children.ravel(), values, jnp.repeat(frontier, width)))
        best = jnp.sort(jax.lax.top_k(values, width)[1])  # so that parents lie in their order
        tokens, worth, frontier = children.ravel()[best], values[best], base + best
        parent_slots, sees = own[best // width], sees[best // width]

    tokens, worth, parents = map(jnp.concatenate, zip(*pool, strict=True))
    # Among equals the first is taken, and parents lie before their children.
    kept = jnp.sort(jax.lax.top_k(worth, tree.num_nodes)[1])
    parents = parents[kept]
    place = jnp.searchsorted(kept, parents)
    # Should a device order equals otherwise, nothing behind a node without its parent holds.
    whole = (parents < 0) | (kept[jnp.minimum(place, tree.num_nodes - 1)] == parents)
    num_valid = jnp.where(finite, jnp.cumprod(whole.astype(jnp.int32)).sum(), 0)
    parents = jnp.where(parents < 0, 0, place + 1)
    return Draft(tokens[kept], None, num_valid, tree.depth, parents.astype(jnp.int32))
