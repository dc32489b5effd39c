"""How much of the drafts is verified: controllers (`specjax.types.Controller`).

`ConfidenceThreshold` and `PrefixScheduler` are DSpark's (DeepSeek-AI 2026, §4). They ask only what the
drafter told of a token before it was drawn, so they are lossless.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Draft


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Fixed:
    """Verifies the same number of tokens in every cycle.

    Attributes:
      length: `[]` int32.
    """

    length: jax.Array

    def __call__(self, drafts: Draft, running: jax.Array) -> jax.Array:
        """`[B]`, see `specjax.types.Controller`."""
        return jnp.broadcast_to(self.length, drafts.num_valid.shape)


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

      (running rows + Σ survival of the admitted) / seconds(tokens a running row, the anchor counted)

    and none is admitted behind the first that does not. The greatest throughput may lie behind it: to
    look there would be to decide about a token by what was drafted after it, and the text would no
    longer have the target's law. `seconds` is a line through what was measured, since behind the
    first stair of a stair-step nothing would ever be admitted. It charges the mean width, as where a
    pass takes ragged rows; the pass here is as wide as its longest row.

    Attributes:
      widths: `[W]` float32, ascending, tokens a row that a cycle verifies, the anchor counted.
      seconds: `[W]` float32, how long such a cycle of this batch takes.
    """

    widths: jax.Array
    seconds: jax.Array

    @classmethod
    def of(cls, seconds: Mapping[int, float]) -> PrefixScheduler:
        """From `specjax.evaluation.benchmark.cycle_seconds`; wider is never taken for cheaper."""
        widths = sorted(seconds)
        rising = np.maximum.accumulate([seconds[width] for width in widths])
        return cls(jnp.asarray(widths, jnp.float32), jnp.asarray(rising, jnp.float32))

    def __call__(self, drafts: Draft, running: jax.Array) -> jax.Array:
        """`[B]`, see `specjax.types.Controller`."""
        confidence = confidence_of(drafts)
        depth = jnp.arange(confidence.shape[1])
        in_play = (depth < drafts.num_valid[:, None]) & running[:, None]
        survival = jnp.cumprod(jnp.where(in_play, confidence, 0.0), axis=-1)
        survival = jax.lax.cummin(survival, axis=1)  # however the products were rounded
        by_depth = survival.T.ravel()  # among equals the shallower comes first
        order = jnp.argsort(-by_depth, stable=True)
        rows = jnp.maximum(running.sum(), 1)
        expected = rows + jnp.append(0.0, jnp.cumsum(by_depth[order]))
        width = 1 + jnp.arange(len(expected)) / rows
        throughput = expected / jnp.interp(width, self.widths, self.seconds)
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
