"""A rejection rule as a law, and the one sampler that turns every law into a verdict.

A law gives, for a draft and the target's distributions, the probability of each number of accepted
tokens and, for a given number, the row from which the next token is drawn. It contains no randomness,
so it can be enumerated exactly (`verification.enumeration`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from specjax.noise import Noise, Role
from specjax.sampling import Sampling, draw, invert, log_probs
from specjax.types import Draft, Verdict, Verifier


@dataclasses.dataclass(frozen=True)
class Law:
    """What a rule does with one draft.

    Attributes:
      accepted: `[K + 1]`, probability that exactly 0…K drafted tokens are accepted.
      next_weights: number of accepted tokens, `[]` int32 → `[V]` non-negative weights of the next
        token, not all zero. A function, because only one row is ever needed.
    """

    accepted: jax.Array
    next_weights: Callable[[jax.Array], jax.Array]


LawOf = Callable[[Draft, jax.Array], Law]  # (draft, target log-probabilities [K + 1, V])


def sample_verdict(law: Law, noise: Noise) -> Verdict:
    """Draws the number of accepted tokens, then the next token."""
    accepted = invert(law.accepted, noise.uniforms(Role.VERDICT, 1)[0])
    token = draw(law.next_weights(accepted), noise.uniforms(Role.RESIDUAL, 2))
    return Verdict(accepted=accepted, next_token=token)


def verifier(law_of: LawOf) -> Verifier:
    """The rule of a law: processes the target's logits, and samples."""

    def verify(draft: Draft, target_logits: jax.Array, sampling: Sampling, noise: Noise) -> Verdict:
        target = jax.vmap(log_probs, (0, None))(target_logits, sampling)
        return sample_verdict(law_of(draft, target), noise)

    verify.__doc__ = law_of.__doc__
    return verify
