"""How much is drafted and verified: controllers (`specjax.types.Controller`).

`ConfidenceThreshold` and `PrefixScheduler` are DSpark's (DeepSeek-AI 2026, §4): they ask what the
drafter told of a token before it was drawn. `Heuristic` and `Optimal` ask past cycles, `Threshold` the
tokens before. So all are lossless.

`Fixed`, `Heuristic` and `Optimal` know what they want before anything is drafted, and `Threshold` when
to stop: a drafter that takes its tokens one after the other drafts no more than that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Draft, PyTree


class Forgetful:
    """The methods of a controller that keeps nothing."""

    def init_state(self, batch: int, num_draft_tokens: int) -> PyTree:
        """Nothing."""
        return ()

    def observe(self, state: PyTree, accepted: jax.Array, drafted: jax.Array) -> PyTree:
        """Nothing."""
        return state


class Planning:
    """The methods of a controller that wants what it planned, whatever was drafted."""

    least_q = None

    def __call__(self, state: PyTree, drafts: Draft, running: jax.Array) -> jax.Array:
        """`[B]`, see `specjax.types.Controller`."""
        return self.plan(state, drafts.num_valid)


class Judging:
    """The methods of a controller that knows nothing before it has seen the draft."""

    least_q = None

    def plan(self, state: PyTree, room: jax.Array) -> jax.Array:
        """All there is room for."""
        return room


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Fixed(Planning, Forgetful):
    """The same number of tokens in every cycle.

    Attributes:
      length: `[]` int32.
    """

    length: jax.Array

    def plan(self, state: PyTree, room: jax.Array) -> jax.Array:
        """`[B]`, see `specjax.types.Controller`."""
        return jnp.minimum(self.length, room)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Heuristic(Planning):
    """Two tokens more for a row whose last draft was accepted whole, one fewer otherwise.

    The schedule of assisted generation in `transformers` (Gante 2023).

    Attributes:
      first: `[]` int32, tokens in the first cycle.
    """

    first: jax.Array

    def init_state(self, batch: int, num_draft_tokens: int) -> tuple[jax.Array, jax.Array]:
        """`[B]` int32, tokens wanted of each row, and K."""
        most = jnp.int32(num_draft_tokens)
        return jnp.broadcast_to(jnp.minimum(self.first, most), batch), most

    def plan(self, state: PyTree, room: jax.Array) -> jax.Array:
        """`[B]`, see `specjax.types.Controller`."""
        return jnp.minimum(state[0], room)

    def observe(self, state: PyTree, accepted: jax.Array, drafted: jax.Array) -> PyTree:
        """Grows or shrinks; what was verified beside the wanted tokens does not count."""
        wanted, most = state
        whole = accepted >= jnp.minimum(wanted, drafted)
        changed = jnp.where(whole, jnp.minimum(wanted + 2, most), jnp.maximum(wanted - 1, 1))
        return jnp.where(drafted == 0, wanted, changed), most


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Threshold(Judging, Forgetful):
    """The tokens up to the first that the drafter said with less than some probability.

    That one is verified, too: to drop it for being what it is would give another law.

    Attributes:
      threshold: `[]` float32, 0…1; 0 takes all.
    """

    threshold: jax.Array

    @property
    def least_q(self) -> jax.Array:
        """`[]`, see `specjax.types.Controller`."""
        return self.threshold

    def __call__(self, state: PyTree, drafts: Draft, running: jax.Array) -> jax.Array:
        """`[B]`, see `specjax.types.Controller`."""
        if drafts.log_q is None:
            raise ValueError(
                "threshold needs the probabilities that tokens were drawn with: a temperature above 0 "
                "and a rule for sampled drafts"
            )
        said = jnp.take_along_axis(drafts.log_q, drafts.tokens[..., None], axis=-1)[..., 0]
        sure = jnp.exp(said) >= self.threshold
        return 1 + jnp.cumprod(sure[:, :-1], axis=-1, dtype=jnp.int32).sum(-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Optimal(Planning):
    """The width with the greatest throughput, by the acceptance counted so far and measured costs.

    Acceptance at each position is a running mean over the batch's cycles, from a prior of ½ that
    returns as the past is forgotten, so that what seemed not to pay is tried again. It decides from
    past cycles only, and may therefore look at every width.

    Attributes:
      widths: `[W]` int32, ascending, tokens a row that a cycle verifies, the anchor counted.
      seconds: `[W]` float32, how long such a cycle of this batch takes, its draft included.
      decay: `[]` float32, weight of a cycle over that of the one after it.
    """

    widths: jax.Array
    seconds: jax.Array
    decay: jax.Array

    @classmethod
    def of(cls, seconds: Mapping[int, float], decay: float = 0.98) -> Optimal:
        """From `specjax.evaluation.benchmark.cycle_seconds`."""
        widths = sorted(seconds)
        taken = jnp.asarray([seconds[width] for width in widths], jnp.float32)
        return cls(jnp.asarray(widths, jnp.int32), taken, jnp.float32(decay))

    def init_state(self, batch: int, num_draft_tokens: int) -> tuple[jax.Array, jax.Array]:
        """`[K]` float32 each: accepted and tried at every position."""
        return jnp.zeros(num_draft_tokens), jnp.zeros(num_draft_tokens)

    def plan(self, state: PyTree, room: jax.Array) -> jax.Array:
        """`[B]`, see `specjax.types.Controller`."""
        accepted, tried = state
        alpha = (accepted + 2) / (tried + 4)
        tokens = 1 + jnp.append(0.0, jnp.cumsum(jnp.cumprod(alpha)))  # of 0…K drafts
        best = self.widths[jnp.argmax(tokens[self.widths - 1] / self.seconds)]
        return jnp.minimum(best - 1, room)

    def observe(self, state: PyTree, accepted: jax.Array, drafted: jax.Array) -> PyTree:
        """Adds the cycle to what is remembered."""
        place = jnp.arange(1, 1 + len(state[0]))
        kept = (accepted[:, None] >= place).sum(0)
        tried = ((drafted[:, None] >= place) & (accepted[:, None] >= place - 1)).sum(0)
        return self.decay * state[0] + kept, self.decay * state[1] + tried


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ConfidenceThreshold(Judging, Forgetful):
    """Verifies the tokens before the first whose confidence is below a threshold, for single requests.

    Attributes:
      threshold: `[]` float32, 0…1; 0 verifies all.
    """

    threshold: jax.Array

    def __call__(self, state: PyTree, drafts: Draft, running: jax.Array) -> jax.Array:
        """`[B]`, see `specjax.types.Controller`."""
        sure = confidence_of(drafts) >= self.threshold
        return jnp.cumprod(sure, axis=-1, dtype=jnp.int32).sum(-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PrefixScheduler(Judging, Forgetful):
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

    def __call__(self, state: PyTree, drafts: Draft, running: jax.Array) -> jax.Array:
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
