"""The `gumbel` rule: the draft is kept where it is what plain sampling would have drawn."""

from __future__ import annotations

import jax

from specjax.noise import Noise
from specjax.sampling import Sampling, log_probs, sample
from specjax.types import Draft, Drafts, Rule, Verdict
from specjax.verification.greedy import follow


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
    vocab = target_logits.shape[-1]

    def choose(logits: jax.Array, depth: jax.Array) -> jax.Array:
        gumbel = noise.token_gumbel(noise.position + 1 + depth, vocab)
        return sample(log_probs(logits, sampling), gumbel)

    return follow(draft, jax.vmap(choose)(target_logits, draft.depths()))


gumbel = Rule(verify, Drafts.COUPLED)
