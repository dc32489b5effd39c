"""What passes between the rooms of specjax.

Every array here belongs to ONE sequence; the decode loops add the batch with `jax.vmap`.
Sizes: `S` cache length, `T` tokens in a forward pass, `K` drafted tokens a cycle, `V` vocabulary,
`D` hidden size, `M` tapped layers. Positions are absolute and 0-based. The *anchor* is the last
committed token: its K/V rows are not in the target's cache yet, and it opens the next verification.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax import metrics, trees
from specjax.losses import Losses
from specjax.noise import Noise
from specjax.sampling import Sampling
from specjax.trees import Tree

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
    """A drafted continuation of the anchor, with the law it was drawn from: a chain or a tree.

    A chain has no topology. A tree's shape is a `Tree`; or, where the shape depends on what was
    drafted, the number of its levels with traced `parents`. See `specjax.trees` for its numbering.

    Attributes:
      tokens: `[K]` int32, `[N]` for a tree; those at or after `num_valid` may hold anything.
      log_q: `[K, V]` float32 log-probabilities that each token was drawn from, or None where the
        draft is deterministic (a point mass on each token). A row of a tree is the law given that
        its elder siblings are not the token: sampling without replacement.
      num_valid: `[]` int32, 0…K; 0 means that the drafter has nothing to offer in this cycle.
      topology: static; None for a chain.
      parents: `[N]` int32, of a tree whose shape is traced, in ascending order; those of tokens that
        are not valid may hold anything.
      confidence: `[K]` float32, of a chain, how likely each token is accepted where those before it
        are, told before it was drawn; None from drafters that do not know.
    """

    tokens: jax.Array
    log_q: jax.Array | None
    num_valid: jax.Array
    topology: Tree | int | None = dataclasses.field(default=None, metadata={"static": True})
    parents: jax.Array | None = None
    confidence: jax.Array | None = None

    @property
    def shape(self) -> tuple[Any, int]:
        """Parents `[N]` and the number of levels."""
        if self.topology is None:
            return np.arange(self.tokens.shape[0]), self.tokens.shape[0]
        if isinstance(self.topology, Tree):
            return np.asarray(self.topology.parents, np.int32), self.topology.depth
        return self.parents, self.topology

    @property
    def tree(self) -> Tree | None:
        """The static shape, a chain's too; None where it is traced."""
        if self.topology is None:
            return Tree(tuple(range(self.tokens.shape[0])))
        return self.topology if isinstance(self.topology, Tree) else None

    def mask(self) -> jax.Array:
        """`[N + 1, N + 1]` bool: what each token of the block [anchor, draft] sees of it."""
        return trees.reach(*self.shape)

    def depths(self) -> jax.Array:
        """`[N + 1]` int32: the depth of each node."""
        if self.tree is None:
            return self.mask().sum(-1, dtype=jnp.int32) - 1
        return jnp.asarray(self.tree.depths, jnp.int32)

    def path(self, node: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The nodes on the way to a node, `[levels + 1]`, and its depth, `[]`, both int32.

        Entries behind the depth are nodes that do not matter.
        """
        if self.topology is None:
            return jnp.arange(self.tokens.shape[0] + 1), node
        return trees.path_to(*self.shape, node)

    def first(self, count: int) -> Draft:
        """The draft without all but its first `count` tokens."""
        topology, parents = self.topology, self.parents
        if isinstance(topology, Tree):
            topology = topology.first(count)
        return Draft(
            self.tokens[:count],
            None if self.log_q is None else self.log_q[:count],
            jnp.minimum(self.num_valid, count),
            topology,
            None if parents is None else parents[:count],
            None if self.confidence is None else self.confidence[:count],
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What a drafter may look at when it proposes. Read-only.

    Attributes:
      tokens: `[S]` int32, prompt and output so far; slots at or after `length` may hold anything.
      length: `[]` int32, committed tokens; the anchor is `tokens[length - 1]`.
      target_cache: the target's `KVCache`; its rows 0…length − 2 are valid.
      sampling: parameters of the sampling mode; None in the greedy mode.
      most: `[]` int32, how many levels of a draft are asked for, 0 of a row that has ended; None for
        all there are.
      least_q: `[]` float32, nothing is asked for behind a token that was drawn with a probability
        below it; None to ask whatever was drawn.
    """

    tokens: jax.Array
    length: jax.Array
    target_cache: PyTree
    sampling: Sampling | None = None
    most: jax.Array | None = None
    least_q: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a verification rule decided.

    Attributes:
      node: `[]` int32, where the accepted path ends: 0 the anchor, i drafted token i − 1. In a chain
        it is the number of accepted tokens.
      next_token: `[]` int32, the target's own: a correction, the bonus after a whole draft, or the
        only token where nothing was drafted.
    """

    node: jax.Array
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
      nodes: `[T]` int32, which token of the verified block [anchor, draft] each row was.
    """

    tokens: jax.Array
    features: jax.Array
    next_tokens: jax.Array
    start: jax.Array
    count: jax.Array
    nodes: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trace:
    """A row of training text with what the target made of it; several texts may share the row.

    Attributes:
      tokens: `[T]` int32.
      positions: `[T]` int32, from 0 in each text.
      segments: `[T]` int32, the text that a token belongs to: 1, 2, …; 0 is padding.
      weights: `[T]` float32, of the prediction made after each token: 0 where the next token belongs
        to another text or is not the target's own.
      features: `[T, M, D]`, the drafter's taps.
      hidden: `[T, D]`, the target's last hidden state, after its final norm.
    """

    tokens: jax.Array
    positions: jax.Array
    segments: jax.Array
    weights: jax.Array
    features: jax.Array
    hidden: jax.Array


Terms = dict[str, tuple[jax.Array, jax.Array]]  # name → (weighted sum, weight)


class Drafter(Protocol):
    """A drafter: pure functions of one sequence. Instances are hashable and hold no arrays.

    Attributes:
      num_draft_tokens: K, drafted tokens a cycle; N in a tree.
      draft_depth: the most that can be accepted: K in a chain, the levels of a tree.
      taps: ids of the target blocks whose outputs `Committed.features` holds, in this order.
      confident: whether its drafts tell their confidence.
    """

    num_draft_tokens: int
    draft_depth: int
    taps: tuple[int, ...]
    confident: bool

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
        """Drafts the tokens after the anchor.

        `noise` is None where the draft shall be deterministic: in the greedy mode, and for rules that
        ask for it. `context` says how much is asked for. More may be valid, but whether a token is
        must not depend on that token or on those behind it.
        """
        ...

    def observe(
        self, params: PyTree, target_params: PyTree, state: PyTree, committed: Committed
    ) -> PyTree:
        """Takes in what the cycle committed; returns the new state."""
        ...


class Trainable(Drafter, Protocol):
    """A drafter that can be trained."""

    def objective(
        self,
        params: PyTree,
        target_params: PyTree,
        trace: Trace,
        key: jax.Array,
        losses: Losses,
    ) -> Terms:
        """What training minimises and watches, on one row of text.

        Sums are divided by weights once, globally, by the trainer.

        Args:
          params, target_params: gradients are taken of the former only.
          trace: a row.
          key: for what is random in the objective.
          losses: which.

        Returns:
          The terms of each loss, and the teacher-forced acceptance at each position, `alpha_1`, ….
        """
        ...

    def terms_of(self, losses: Mapping[str, float]) -> dict[str, float]:
        """The terms of the objective that are minimised, with their coefficients.

        Args:
          losses: coefficient of each loss, as a config has them.
        """
        ...

    def agreement(self, params: PyTree, target_params: PyTree, trace: Trace) -> jax.Array:
        """`[T, K]` bool: the k-th likeliest-token draft of a cycle whose anchor is this token is the
        text's own token, drafts before it being right.

        With `specjax.metrics.replay` these are the cycles of greedy decoding, had it said this text.
        """
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
    """What a rule does: a pure function of one sequence's draft and target logits."""

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
          target_logits: `[K + 1, V]` float32; row i follows node i: the anchor, or draft i − 1 and
            all before it on its path.
          sampling: parameters of the sampling mode; None in the greedy mode.
          noise: the cycle's randomness; None in the greedy mode.

        Raises:
          ValueError: when the loop is built, for a draft that the rule cannot verify.
        """
        ...


class Controller(Protocol):
    """Decides how much is drafted and verified. A pytree: its arrays are arguments of the loop.

    It is asked twice in a cycle: before the draft for a `plan`, so that drafters that make it token by
    token make no more; and, by a call, about the draft that was made.

    It is lossless if whether a token is verified is decided from what was known before that token was
    drawn: the tokens before it, the drafter's confidence, past cycles, and of other rows the same.
    Above temperature 0, but for `gumbel`, a row's text then depends on its batch mates, since a row
    drafts as long as any of them; its law stays.

    Attributes:
      least_q: `[]` float32, nothing is wanted behind a token that was drawn with a probability below
        it; None where that is not what it asks.
    """

    least_q: jax.Array | None

    def init_state(self, batch: int, num_draft_tokens: int) -> PyTree:
        """What it knows before the first cycle, () if it keeps nothing."""
        ...

    def plan(self, state: PyTree, room: jax.Array) -> jax.Array:
        """`[B]` int32, the most tokens of each row that it could want, told before they are drafted.

        Args:
          state: its own.
          room: `[B]` int32, how many each row has room for, 0 once it has ended.
        """
        ...

    def __call__(self, state: PyTree, drafts: Draft, running: jax.Array) -> jax.Array:
        """`[B]` int32, how many tokens of each draft are to be verified, at least.

        Args:
          state: its own.
          drafts: with the batch axis; what follows `num_valid` tokens may hold anything.
          running: `[B]` bool, the rows that have not ended.

        Raises:
          ValueError: when the loop is built, for drafts that it cannot judge.
        """
        ...

    def observe(self, state: PyTree, accepted: jax.Array, drafted: jax.Array) -> PyTree:
        """Takes in what became of a cycle: `[B]` each, as `specjax.metrics` defines them."""
        ...


class Drafts(enum.Enum):
    """How a rule wants its drafts to be chosen."""

    SAMPLED = "sampled"  # drawn from q, siblings without replacement
    DETERMINISTIC = "deterministic"  # the likeliest tokens
    COUPLED = "coupled"  # the likeliest under the noise that plain sampling uses at their positions


@dataclasses.dataclass(frozen=True)
class Rule:
    """A verification rule.

    Attributes:
      verify: what it does.
      drafts: what it is made for.
    """

    verify: Verifier
    drafts: Drafts = Drafts.SAMPLED


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeResult:
    """What `specjax.decode` returns. Lists have one entry a prompt.

    Attributes:
      prompts: token ids of each prompt, `[prompt length]` int32.
      tokens: the new tokens, `[n]` int32, a stop token included.
      stop_reason: why each row ended.
      accepted, drafted, committed: `[cycles]` int32 per cycle, as `specjax.metrics` defines them.
      confidence: `[cycles, K]` float32, of each cycle's draft; `[cycles, 0]` where the drafter tells
        none.
      num_draft_tokens, draft_depth: K and the levels of a draft, as in `Drafter`; 0 for plain
        decoding.
      prefill_seconds, decode_seconds: wall time of the whole batch, compilation included if any.
      tokenizer: the target's; None where only token ids are used.
    """

    prompts: list[np.ndarray]
    tokens: list[np.ndarray]
    stop_reason: list[StopReason]
    accepted: list[np.ndarray]
    drafted: list[np.ndarray]
    committed: list[np.ndarray]
    confidence: list[np.ndarray]
    num_draft_tokens: int
    draft_depth: int
    prefill_seconds: float
    decode_seconds: float
    tokenizer: Any = None

    @classmethod
    def pooled(cls, results: Sequence[DecodeResult]) -> DecodeResult:
        """Several results of one drafter as one: their rows together, their seconds summed."""

        def rows(name: str) -> list:
            return [row for result in results for row in getattr(result, name)]

        names = "prompts", "tokens", "stop_reason", "accepted", "drafted", "committed", "confidence"
        return cls(
            *map(rows, names),
            results[0].num_draft_tokens,
            results[0].draft_depth,
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
        """J_1…J_K (K the levels of a tree), pooled over all rows."""
        counts = np.concatenate(self.accepted), np.concatenate(self.committed)
        return metrics.survival(*counts, self.draft_depth)

    @property
    def alpha(self) -> np.ndarray:
        """α_1…α_K (K the levels of a tree), pooled over all rows."""
        counts = (np.concatenate(x) for x in (self.accepted, self.drafted, self.committed))
        return metrics.alpha(*counts, self.draft_depth)

    @property
    def target_passes(self) -> int:
        """Forward passes of the target after prefill, summed over rows."""
        return metrics.target_passes(np.concatenate(self.committed))

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """New tokens of the whole batch over `decode_seconds`."""
        return self.num_tokens / self.decode_seconds

    @property
    def texts(self) -> list[str]:
        """The new tokens as text, special tokens left out."""
        if self.tokenizer is None:
            raise ValueError("this target has no tokenizer: read `tokens`")
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in self.tokens]
