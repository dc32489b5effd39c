"""The `greedy` rule: a drafted token is kept where it is the target's own argmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.noise import Noise
from specjax.sampling import Sampling, argmax
from specjax.types import Draft, Drafts, Rule, Verdict


def follow(draft: Draft, choice: jax.Array) -> Verdict:
    """Walks along the draft as long as it holds what the target chose at each node.

    Args:
      draft: a chain, or a tree of any kind.
      choice: `[N + 1]` int32, the target's token after each node.
    """
    parents, levels = draft.shape
    slots = jnp.arange(draft.tokens.shape[0])
    agrees = (draft.tokens == choice[jnp.asarray(parents)]) & (slots < draft.num_valid)
    agrees = jnp.append(True, agrees)
    if draft.topology is None:
        node = jnp.cumprod(agrees.astype(jnp.int32)).sum() - 1
    else:
        reached = (agrees | ~trees.reach(parents, levels)).all(-1)
        # The deepest one; the first of those, if a drafter gave siblings the same token.
        node = jnp.argmax(reached * (1 + draft.depths())).astype(jnp.int32)
    return Verdict(node=node, next_token=choice[node])


def verify(
    draft: Draft,
    target_logits: jax.Array,
    sampling: Sampling | None,
    noise: Noise | None,
) -> Verdict:
    """Accepts the longest path of the draft that plain greedy decoding would have produced.

    This is rejection sampling at temperature 0 (Leviathan et al. 2023, algorithm 1): the target is
    one-hot, so a draft is accepted with probability 1 or 0 and the residual is the argmax. No
    softmax is computed, and neither `sampling` nor `noise` is used.

    Args:
      draft: a chain, or a tree of any kind.
      target_logits: `[K + 1, V]`.
      sampling: not used.
      noise: not used.
    """
    return follow(draft, argmax(target_logits))


greedy = Rule(verify, Drafts.DETERMINISTIC)
