"""What passes between the rooms of specjax.

Every array here belongs to ONE sequence; the decode loops add the batch with `jax.vmap`.
Sizes: `S` cache length, `T` tokens in a forward pass, `K` drafted tokens a cycle, `V` vocabulary,
`D` hidden size, `M` tapped layers. Positions are absolute and 0-based. The *anchor* is the last
committed token: its K/V rows are not in the target's cache yet, and it opens the next verification.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from specjax import metrics
from specjax.noise import Noise
from specjax.sampling import Sampling

PyTree = Any
Progress = Callable[[str, int, int], None]  # (what, done, total)


class StopReason(enum.IntEnum):
    """Why a row ended. `RUNNING` is never seen in a result."""

    RUNNING = 0
    EOS = 1  # a stop token was committed; it is the last token of the row
    LENGTH = 2  # max_new_tokens were committed
    CACHE_FULL = 3  # max_len was reached before max_new_tokens
    NAN = 4  # the target's output was not finite; the text up to there is kept


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """A drafted continuation of the anchor, with the law it was drawn from.

    Attributes:
      tokens: `[K]` int32; slots at or after `num_valid` may hold anything.
      log_q: `[K, V]` float32 log-probabilities that the tokens were drawn from, or None where the
        draft is deterministic (a point mass on each token).
      num_valid: `[]` int32, 0…K; 0 means that the drafter has nothing to offer in this cycle.
    """

    tokens: jax.Array
    log_q: jax.Array | None
    num_valid: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What a drafter may look at when it proposes. Read-only.

    Attributes:
      tokens: `[S]` int32, prompt and output so far; slots at or after `length` may hold anything.
      length: `[]` int32, committed tokens; the anchor is `tokens[length - 1]`.
      target_cache: the target's `KVCache`; its rows 0…length − 2 are valid.
      sampling: parameters of the sampling mode; None in the greedy mode.
    """

    tokens: jax.Array
    length: jax.Array
    target_cache: PyTree
    sampling: Sampling | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a verification rule decided.

    Attributes:
      accepted: `[]` int32, drafted tokens kept, 0…num_valid.
      next_token: `[]` int32, the target's own: the correction of draft `accepted`, the bonus after a
        whole draft, or the only token where nothing was drafted.
    """

    accepted: jax.Array
    next_token: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Committed:
    """Rows that were just written to the target's cache: a prefill chunk or a cycle's outcome.

    Attributes:
      tokens: `[T]` int32, the token of each row.
      features: `[T, M, D]`, the tapped layers' outputs at those rows.
      next_tokens: `[T]` int32, the committed token after each row.
      start: `[]` int32, absolute position of row 0.
      count: `[]` int32, how many rows count, 0…T; the others may hold anything.
    """

    tokens: jax.Array
    features: jax.Array
    next_tokens: jax.Array
    start: jax.Array
    count: jax.Array


class Drafter(Protocol):
    """A drafter: pure functions of one sequence. Instances are hashable and hold no arrays.

    Attributes:
      num_draft_tokens: K, drafted tokens a cycle.
      taps: ids of the target blocks whose outputs `Committed.features` holds, in this order.
    """

    num_draft_tokens: int
    taps: tuple[int, ...]

    def init_state(self, max_len: int) -> PyTree:
        """State of a fresh sequence of at most `max_len` tokens, () if there is none."""
        ...

    def prefill(
        self, params: PyTree, target_params: PyTree, state: PyTree, chunk: Committed
    ) -> PyTree:
        """Takes in a chunk of the prompt; returns the new state."""
        ...

    def propose(
        self,
        params: PyTree,
        target_params: PyTree,
        state: PyTree,
        context: Context,
        noise: Noise | None,
    ) -> tuple[Draft, PyTree]:
        """Drafts the tokens after the anchor. `noise` is None in the greedy mode."""
        ...

    def observe(
        self, params: PyTree, target_params: PyTree, state: PyTree, committed: Committed
    ) -> PyTree:
        """Takes in what the cycle committed; returns the new state."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedDrafter:
    """A drafter with its weights: what `specjax.decode` takes, like a `Drafter` that has none.

    Attributes:
      drafter: the pure functions.
      params: their first argument.
      name: for messages and results.
    """

    drafter: Drafter
    params: PyTree
    name: str


def drafter_and_params(
    drafter: Drafter | LoadedDrafter | None,
) -> tuple[Drafter | None, PyTree]:
    """The pure functions and their params, () for a drafter without weights."""
    if isinstance(drafter, LoadedDrafter):
        return drafter.drafter, drafter.params
    return drafter, ()


class Verifier(Protocol):
    """A verification rule: a pure function of one sequence's draft and target logits."""

    def __call__(
        self,
        draft: Draft,
        target_logits: jax.Array,
        sampling: Sampling | None,
        noise: Noise | None,
    ) -> Verdict:
        """Decides how much of the draft to keep, and the token after it.

        Args:
          draft: the proposal.
          target_logits: `[K + 1, V]` float32; row i follows the anchor and i drafted tokens.
          sampling: parameters of the sampling mode; None in the greedy mode.
          noise: the cycle's randomness; None in the greedy mode.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeResult:
    """What `specjax.decode` returns. Lists have one entry a prompt.

    Attributes:
      prompts: token ids of each prompt, `[prompt length]` int32.
      tokens: the new tokens, `[n]` int32, a stop token included.
      stop_reason: why each row ended.
      accepted, drafted, committed: `[cycles]` int32 per cycle, as `specjax.metrics` defines them.
      num_draft_tokens: K; 0 for plain decoding.
      prefill_seconds, decode_seconds: wall time of the whole batch, compilation included if any.
      tokenizer: the target's; None where only token ids are used.
    """

    prompts: list[np.ndarray]
    tokens: list[np.ndarray]
    stop_reason: list[StopReason]
    accepted: list[np.ndarray]
    drafted: list[np.ndarray]
    committed: list[np.ndarray]
    num_draft_tokens: int
    prefill_seconds: float
    decode_seconds: float
    tokenizer: Any = None

    @classmethod
    def pooled(cls, results: Sequence[DecodeResult]) -> DecodeResult:
        """Several results of one drafter as one: their rows together, their seconds summed."""

        def rows(name: str) -> list:
            return [row for result in results for row in getattr(result, name)]

        return cls(
            *map(rows, ("prompts", "tokens", "stop_reason", "accepted", "drafted", "committed")),
            results[0].num_draft_tokens,
            sum(result.prefill_seconds for result in results),
            sum(result.decode_seconds for result in results),
            results[0].tokenizer,
        )

    @property
    def tau(self) -> float:
        """Tokens committed per cycle, pooled over all rows."""
        return metrics.tau(np.concatenate(self.committed))

    @property
    def survival(self) -> np.ndarray:
        """J_1…J_K, pooled over all rows."""
        counts = np.concatenate(self.accepted), np.concatenate(self.committed)
        return metrics.survival(*counts, self.num_draft_tokens)

    @property
    def alpha(self) -> np.ndarray:
        """α_1…α_K, pooled over all rows."""
        counts = (np.concatenate(x) for x in (self.accepted, self.drafted, self.committed))
        return metrics.alpha(*counts, self.num_draft_tokens)

    @property
    def target_passes(self) -> int:
        """Forward passes of the target after prefill, summed over rows."""
        return metrics.target_passes(np.concatenate(self.committed))

    @property
    def tokens_per_second(self) -> float:
        """New tokens of the whole batch over `decode_seconds`."""
        return sum(len(row) for row in self.tokens) / self.decode_seconds

    @property
    def texts(self) -> list[str]:
        """The new tokens as text, special tokens left out."""
        if self.tokenizer is None:
            raise ValueError("this target has no tokenizer: read `tokens`")
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in self.tokens]
