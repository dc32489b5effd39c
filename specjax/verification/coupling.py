"""Rules whose text is plain sampling's own for the same key: checked cycle by cycle, for equality."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.noise import Noise
from specjax.sampling import Sampling, log_probs, sample
from specjax.trees import Tree
from specjax.types import Draft, Rule


def compare(
    rule: Rule, target: np.ndarray, drafter: np.ndarray, tree: Tree, seeds: int, *, coupled: bool
) -> tuple[np.ndarray, np.ndarray]:
    """One cycle after the empty context for every seed, beside plain sampling with the same key.

    Args:
      rule: any.
      target, drafter: tables as in `enumeration`, of at least as many levels as the tree has, and one.
      tree: the shape of the draft; a chain is passed as one.
      seeds: n.
      coupled: the drafter chooses with the noise of plain sampling, else with noise of its own.

    Returns:
      `[n]` bool, whether the committed tokens are plain sampling's; and `[n]` accepted.
    """
    tables = (jnp.log(jnp.asarray(x, jnp.float32)) for x in (target, drafter))
    return jax.device_get(_compare(rule.verify, *tables, jnp.arange(seeds), tree, coupled))


@functools.partial(jax.jit, static_argnames=("verify", "tree", "coupled"))
@functools.partial(jax.vmap, in_axes=(None, None, None, 0, None, None))
def _compare(verify, target, drafter, seed, tree, coupled) -> tuple[jax.Array, jax.Array]:
    vocab = target.shape[-1]
    sampling = Sampling(jnp.float32(1))
    noise = Noise(jax.random.fold_in(jax.random.key(0), seed), jnp.int32(7), coupled)
    contexts, tokens = [jnp.int32(0)], []
    for node, children in enumerate(tree.children):
        if children:
            gumbel = noise.draft_gumbel(node, tree.depths[node], vocab)
            best = jax.lax.top_k(drafter[contexts[node]] + gumbel, len(children))[1]
            tokens += list(best)
            contexts += [contexts[node] * vocab + 1 + token for token in best]
    shape = None if tree == Tree.chain(len(tokens)) else tree
    draft = Draft(jnp.stack(tokens), None, jnp.int32(len(tokens)), shape)
    verdict = verify(draft, target[jnp.stack(contexts)], sampling, noise)
    path, accepted = draft.path(verdict.node)

    context, same = jnp.int32(0), True
    for depth in range(tree.depth + 1):
        row = log_probs(target[context], sampling)
        plain = sample(row, noise.token_gumbel(noise.position + 1 + depth, vocab))
        kept = draft.tokens[path[min(depth + 1, tree.depth)] - 1]
        committed = jnp.where(depth < accepted, kept, verdict.next_token)
        same &= (depth > accepted) | (committed == plain)
        context = context * vocab + 1 + plain
    return same, accepted
