"""The `gumbel` rule: the draft is kept where it is what plain sampling would have drawn."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.noise import Noise
from specjax.sampling import Sampling, log_probs, sample
from specjax.types import Draft, Drafts, Rule, Verdict


def verify(draft: Draft, target_logits: jax.Array, sampling: Sampling, noise: Noise) -> Verdict:
    """Drafter-invariant sampling (Daliri, Musco and Suresh 2024).

    The target draws its token after every node with the noise that plain sampling uses at that
    position; the draft is followed as long as it holds those tokens. So the output *is* plain
    sampling's for this key, whatever the drafter. A drafter that draws with the same noise agrees
    with probability Σ_x 1 / Σ_y max(p_y / p_x, q_y / q_x), somewhat below the Σ min(p, q) of the
    `token` rule, and far above that of independent noise.

    Args:
      draft: a chain, or a tree of any kind.
      target_logits: `[K + 1, V]`.
      sampling: of this row.
      noise: of this cycle.
    """
    parents, _ = draft.shape
    slots = jnp.arange(draft.tokens.shape[0])
    depths = draft.depths()

    def choose(node: jax.Array) -> Verdict:
        gumbel = noise.token_gumbel(noise.position + 1 + depths[node], target_logits.shape[-1])
        return Verdict(node, sample(log_probs(target_logits[node], sampling), gumbel))

    def child(at: Verdict) -> jax.Array:
        """The number of the first child that holds the target's token, 0 if there is none."""
        same = (draft.tokens == at.next_token) & (slots < draft.num_valid)
        same &= jnp.asarray(parents) == at.node
        first = jnp.min(jnp.where(same, slots, len(slots)), initial=len(slots))
        return jnp.where(first < len(slots), first + 1, 0)

    return jax.lax.while_loop(
        lambda at: child(at) > 0, lambda at: choose(child(at)), choose(jnp.int32(0))
    )


gumbel = Rule(verify, Drafts.COUPLED)
