"""The `greedy` rule: a drafted token is kept where it is the target's own argmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.noise import Noise
from specjax.sampling import Sampling, argmax
from specjax.types import Draft, Verdict


def greedy(
    draft: Draft,
    target_logits: jax.Array,
    sampling: Sampling | None,
    noise: Noise | None,
) -> Verdict:
    """Accepts the longest prefix of the draft that plain greedy decoding would have produced.

    This is rejection sampling at temperature 0 (Leviathan et al. 2023, algorithm 1): the target is
    one-hot, so a draft is accepted with probability 1 or 0 and the residual is the argmax. No
    softmax is computed, and neither `sampling` nor `noise` is used.

    Args:
      draft: K tokens.
      target_logits: `[K + 1, V]`.
      sampling: not used.
      noise: not used.
    """
    choice = argmax(target_logits)
    slots = jnp.arange(draft.tokens.shape[0])
    agrees = (draft.tokens == choice[:-1]) & (slots < draft.num_valid)
    accepted = jnp.cumprod(agrees.astype(jnp.int32)).sum()
    return Verdict(accepted=accepted, next_token=choice[accepted])
