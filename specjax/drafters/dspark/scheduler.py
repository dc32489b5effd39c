"""How much of a confident draft is verified: DSpark's two controllers (DeepSeek-AI 2026, §4).

Both ask only what the drafter told of a token before it was drawn, so both are lossless.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from specjax.types import Draft


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ConfidenceThreshold:
    """Verifies the tokens before the first whose confidence is below a threshold, for single requests.

    Attributes:
      threshold: `[]` float32, 0…1; 0 verifies all.
    """

    threshold: jax.Array

    def __call__(self, drafts: Draft, running: jax.Array) -> jax.Array:
        """`[B]`, see `specjax.types.Controller`."""
        sure = confidence_of(drafts) >= self.threshold
        return jnp.cumprod(sure, axis=-1, dtype=jnp.int32).sum(-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PrefixScheduler:
    """The hardware-aware prefix scheduler (Algorithm 1): as many tokens as make the batch fastest.

    The drafted tokens of all rows are admitted in the order of their survival, the product of the
    confidences up to them, while every one raises the throughput that is expected,

      (running rows + Σ survival of the admitted) / seconds(running rows + admitted)

    and none is admitted behind the first that does not. The greatest throughput may lie behind it: to
    look there would be to decide about a token by what was drafted after it, and the text would no
    longer have the target's law. `seconds` is a line through what was measured, since behind the
    first stair of a stair-step nothing would ever be admitted.

    Attributes:
      tokens: `[W]` float32, ascending, tokens of all rows that one cycle verifies, anchors counted.
      seconds: `[W]` float32, how long such cycles take.
    """

    tokens: jax.Array
    seconds: jax.Array

    @classmethod
    def of(cls, batch: int, seconds: Mapping[int, float]) -> PrefixScheduler:
        """One for a batch whose cycle takes so long when it verifies w tokens a row, by w."""
        widths = sorted(seconds)
        tokens = jnp.asarray([batch * width for width in widths], jnp.float32)
        return cls(tokens, jnp.asarray([seconds[width] for width in widths], jnp.float32))

    def __call__(self, drafts: Draft, running: jax.Array) -> jax.Array:
        """`[B]`, see `specjax.types.Controller`."""
        confidence = confidence_of(drafts)
        depth = jnp.arange(confidence.shape[1])
        in_play = (depth < drafts.num_valid[:, None]) & running[:, None]
        survival = jnp.cumprod(jnp.where(in_play, confidence, 0.0), axis=-1)
        by_depth = survival.T.ravel()  # among equals the shallower comes first
        order = jnp.argsort(-by_depth, stable=True)
        expected = running.sum() + jnp.append(0.0, jnp.cumsum(by_depth[order]))
        verified = running.sum() + jnp.arange(len(expected))
        throughput = expected / jnp.interp(verified, self.tokens, self.seconds)
        # Up to the first that fails, the best throughput so far is the one before.
        admitted = jnp.cumprod(throughput[1:] > throughput[:-1], dtype=jnp.int32)
        lengths = jnp.zeros(len(order), jnp.int32).at[order].set(admitted)
        return lengths.reshape(survival.T.shape).sum(0)


def confidence_of(drafts: Draft) -> jax.Array:
    """`[B, K]`.

    Raises:
      ValueError: the drafter does not tell it.
    """
    if drafts.confidence is None:
        raise ValueError(
            "this controller needs to be told how likely each token is accepted: take a DSpark drafter "
            "with a confidence head (config.drafter.confidence above 0 when it is trained)"
        )
    return drafts.confidence
