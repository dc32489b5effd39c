"""A rejection rule as a law, and the one sampler that turns every law into a verdict.

A law gives, for a draft and the target's distributions, the probability of each node at which the
accepted path may end and, for a given node, the row from which the next token is drawn. It contains
no randomness, so it can be enumerated exactly (`verification.enumeration`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.noise import Noise, Role
from specjax.sampling import Sampling, draw, invert, log_probs
from specjax.types import Draft, Drafts, Rule, Verdict


@dataclasses.dataclass(frozen=True)
class Law:
    """What a rule does with one draft.

    Attributes:
      terminal: `[N + 1]`, probability that the accepted path ends at each node. In a chain of K it is
        that of exactly 0…K accepted tokens.
      next_weights: node, `[]` int32 → `[V]` non-negative weights of the next token, not all zero. A
        function, because only one row is ever needed.
    """

    terminal: jax.Array
    next_weights: Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The target's log-probabilities, row by row: `rows[node]` is `[V]`, computed when asked for.

    All of them at once would be several arrays of `[N + 1, V]`. An array can stand in for them.

    Attributes:
      logits: `[N + 1, V]`.
      sampling: of this row of the batch.
    """

    logits: jax.Array
    sampling: Sampling

    def __getitem__(self, node: jax.typing.ArrayLike) -> jax.Array:
        return log_probs(self.logits[node], self.sampling)


LawOf = Callable[[Draft, Rows | jax.Array], Law]


def sample_verdict(law: Law, noise: Noise) -> Verdict:
    """Draws the end of the accepted path, then the next token."""
    node = invert(law.terminal, noise.uniforms(Role.VERDICT, 1)[0])
    token = draw(law.next_weights(node), noise.uniforms(Role.RESIDUAL, 2))
    return Verdict(node=node, next_token=token)


def rule_of(law_of: LawOf, drafts: Drafts = Drafts.SAMPLED) -> Rule:
    """The rule of a law: processes the target's logits, and samples."""

    def verify(draft: Draft, target_logits: jax.Array, sampling: Sampling, noise: Noise) -> Verdict:
        target = Rows(target_logits, sampling)
        if draft.tokens.shape[0]:
            return sample_verdict(law_of(draft, target), noise)
        # A pass over the anchor alone: there is nothing to reject.
        return sample_verdict(Law(jnp.ones(1), lambda _: jnp.exp(target[0])), noise)

    verify.__doc__ = law_of.__doc__
    verify.law_of = law_of
    return Rule(verify, drafts)


def law_of_rule(rule: Rule) -> LawOf | None:
    """The law that a rule was made of, None if it was written as a function of its own."""
    return getattr(rule.verify, "law_of", None)


def require_chain(draft: Draft, name: str) -> None:
    """Raises ValueError where a rule for chains is given a tree."""
    if draft.topology is not None:
        raise ValueError(
            f"rule {name} verifies chains, this drafter drafts a tree of {draft.tokens.shape[0]} "
            "tokens: use tree_match, tree_without_replacement, tree_traversal or gumbel"
        )
