"""What a drafter drafts along the target's own text, at every anchor, and with one thing changed.

The target answers prompts greedily, with the drafter. Along its answers every token is an anchor once:

* as training does it: all at once (`Trainable.agreement`), in which anything may be replaced;
* as decoding does it: one after the other, by `prefill`, `propose` and `observe`.

Both must draft the same; and the cycles that were counted must be those anchors' drafts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.decoding.decode import decode
from specjax.distillation.features import traces
from specjax.models.cache import KVCache
from specjax.models.target import Target
from specjax.models.transformer import causal_mask, embed
from specjax.trees import Tree
from specjax.types import (
    Committed,
    Context,
    DecodeResult,
    Drafter,
    LoadedDrafter,
    PyTree,
    StopReason,
    Trace,
    Trainable,
    drafter_and_params,
)

EMBEDDED = -1  # "the block before block 0": what the embedding gives
FEWEST = 64  # anchors: the noise of fewer is not known


@dataclasses.dataclass(frozen=True, eq=False)
class Probe:
    """A target's answers, and what a drafter makes of them. n anchors in all, row after row.

    Attributes:
      target: whose text it is.
      drafter: a chain of K, whatever shape was asked for.
      params: its own.
      result: the answers with their counted cycles.
      trace: `[B, T, …]`, with the features of `taps`.
      taps: the drafter's and their neighbours.
      anchors: rows and indices `[n]` of the anchors in the trace.
      said: `[n, K + 2]` int, the text from the anchor on; −2 behind its end.
      drafted: `[n, K]` int, what decoding drafts; −1 for nothing.
    """

    target: Target
    drafter: Drafter
    params: PyTree
    result: DecodeResult
    trace: Trace
    taps: tuple[int, ...]
    anchors: tuple[np.ndarray, np.ndarray]
    said: np.ndarray
    drafted: np.ndarray

    @property
    def trainable(self) -> bool:
        """Whether there is a second way to draft, in which things can be replaced."""
        return hasattr(self.drafter, "agreement")

    def features(self, taps: Sequence[int]) -> jax.Array:
        """`[B, T, M, D]`, of some of `self.taps`."""
        return self.trace.features[:, :, np.array([self.taps.index(tap) for tap in taps], int)]

    def accepted(
        self,
        *,
        drafter: Trainable | None = None,
        params: PyTree | None = None,
        target_params: PyTree | None = None,
        features: jax.Array | None = None,
    ) -> np.ndarray:
        """`[n]`: how many drafts behind each anchor are right, as training sees it.

        Args:
          drafter, params, target_params, features: in place of what there is.
        """
        if features is None:
            features = self.features(self.drafter.taps)
        agreement = _agreement(
            drafter or self.drafter,
            self.params if params is None else params,
            self.target.params if target_params is None else target_params,
            dataclasses.replace(self.trace, features=features),
        )
        return leading(np.asarray(agreement)[self.anchors] & (self.said[:, 1:-1] >= 0))

    def accepted_when_decoding(self) -> np.ndarray:
        """`[n]`: the same, as decoding drafts."""
        return leading(self.matches(0) > 0)

    def matches(self, shift: int) -> np.ndarray:
        """`[n, K]` float: whether draft k is the text's token k + shift places behind the anchor."""
        depth = self.drafted.shape[1]
        return (self.drafted == self.said[:, 1 + shift :][:, :depth]).astype(float)


def leading(flags: np.ndarray) -> np.ndarray:
    """How many are true before the first that is not, along the last axis."""
    return np.cumprod(flags, axis=-1).sum(-1)


def examine(
    target: Target,
    loaded: Drafter | LoadedDrafter,
    prompts: Sequence[np.ndarray],
    max_new_tokens: int,
) -> Probe:
    """Lets the target answer, and drafts along the answers.

    Args:
      target: that answers.
      loaded: the drafter; where it drafts a tree, a chain of its depth is looked at.
      prompts: token ids.
      max_new_tokens: longest answer.

    Raises:
      ValueError: the target's output is not finite, or there is too little text.
    """
    drafter, params = drafter_and_params(loaded)
    if hasattr(drafter, "tree"):
        drafter = dataclasses.replace(drafter, tree=Tree.chain(drafter.draft_depth))
    chain = LoadedDrafter(drafter, params, getattr(loaded, "name", ""))
    result = decode(target, chain, prompts, max_new_tokens=max_new_tokens)
    if StopReason.NAN in result.stop_reason:
        raise ValueError("the target's output is not finite (NaN): its weights are broken")
    if result.num_tokens < FEWEST:
        raise ValueError(
            f"the target's answers have {result.num_tokens} tokens in all, too few to tell anything: "
            "give other or more prompts"
        )
    batch = _rows(result)
    near = {tap + by for tap in drafter.taps for by in (-1, 0, 1)}
    taps = tuple(sorted(tap for tap in near if EMBEDDED <= tap < target.config.num_layers))
    firsts = np.array([len(prompt) - 1 for prompt in result.prompts], np.int32)
    lengths = [len(row) for row in result.tokens]
    # The empty state as an argument: XLA would compute at length what follows from constants.
    state = drafter.init_state(batch["tokens"].shape[1]), jnp.int32(0)
    drafted = _drafted(
        target.graphdef, target.params, drafter, params, *state, batch["tokens"], firsts,
        count=max(lengths),
    )  # fmt: skip
    rows = np.repeat(np.arange(len(lengths)), lengths)
    steps = np.concatenate([np.arange(length) for length in lengths])
    indices = firsts[rows] + steps
    padded = np.pad(batch["tokens"], ((0, 0), (0, drafter.num_draft_tokens + 2)))
    ahead = indices[:, None] + np.arange(drafter.num_draft_tokens + 2)
    ends = (firsts + 1 + np.array(lengths))[rows]
    return Probe(
        target, drafter, params, result, _trace(target, taps, batch), taps, (rows, indices),
        np.where(ahead < ends[:, None], padded[rows[:, None], ahead], -2),
        np.asarray(drafted)[rows, steps],
    )  # fmt: skip


def _rows(result: DecodeResult) -> dict[str, np.ndarray]:
    """A text a row, as `distillation.data` has them."""
    texts = [np.append(*pair) for pair in zip(result.prompts, result.tokens, strict=True)]
    longest = -(-max(map(len, texts)) // 64) * 64
    indices = np.arange(longest, dtype=np.int32)
    tokens = np.stack([np.pad(text, (0, longest - len(text))) for text in texts])
    inside = indices < np.array([len(text) for text in texts])[:, None]
    answered = indices >= np.array([len(prompt) for prompt in result.prompts])[:, None]
    return {
        "tokens": tokens.astype(np.int32),
        "loss_mask": inside & answered,
        "positions": np.where(inside, indices, 0),
        "segments": inside.astype(np.int32),
    }


def _trace(target: Target, taps: tuple[int, ...], batch: dict[str, np.ndarray]) -> Trace:
    """The target's trace of the rows; `EMBEDDED` comes first where it is among the taps."""
    blocks = tuple(tap for tap in taps if tap != EMBEDDED)
    run = jax.jit(traces, static_argnums=(0, 2))
    trace = run(target.graphdef, target.params, blocks, batch)
    if EMBEDDED not in taps:
        return trace
    embedded = embed(target.params["embedding"], trace.tokens, target.config.embedding_scale)
    features = jnp.concatenate([embedded[:, :, None], trace.features], axis=2)
    return dataclasses.replace(trace, features=features)


@functools.partial(jax.jit, static_argnames=("drafter",))
def _agreement(
    drafter: Trainable, params: PyTree, target_params: PyTree, trace: Trace
) -> jax.Array:
    return jax.vmap(functools.partial(drafter.agreement, params, target_params))(trace)


@functools.partial(jax.jit, static_argnames=("graphdef", "drafter", "count"))
def _drafted(
    graphdef: Any,
    target_params: PyTree,
    drafter: Drafter,
    params: PyTree,
    state: PyTree,
    start: jax.Array,
    tokens: jax.Array,
    firsts: jax.Array,
    *,
    count: int,
) -> jax.Array:
    """`[B, count, K]`: drafts behind `count` anchors of each row, by the drafter's contract.

    Args:
      graphdef, target_params, drafter, params: the pair.
      state: of a fresh sequence.
      start: `[]` int32, 0.
      tokens: `[B, T]`.
      firsts: `[B]` int32, the first anchors.
      count: anchors; those behind the end of a text give anything.
    """
    model = nnx.merge(graphdef, target_params)
    nothing = KVCache.zeros(model.config, 1, target_params["embedding"].dtype)

    def row(tokens: jax.Array, first: jax.Array) -> jax.Array:
        length, following = len(tokens), jnp.roll(tokens, -1)
        positions = jnp.arange(length)
        out = model(tokens, positions, nothing, jnp.int32(0), causal_mask(length), drafter.taps)
        prompt = Committed(tokens, out.features, following, start, first, positions)
        prefilled = drafter.prefill(params, target_params, state, prompt)

        def step(state: PyTree, anchor: jax.Array) -> tuple[PyTree, jax.Array]:
            draft, state = drafter.propose(
                params, target_params, state, Context(tokens, anchor + 1, out.rows), None
            )
            columns = tokens, out.features, following
            one = (jax.lax.dynamic_slice_in_dim(x, anchor, 1) for x in columns)
            committed = Committed(*one, anchor, jnp.int32(1), jnp.zeros(1, jnp.int32))
            state = drafter.observe(params, target_params, state, committed)
            valid = jnp.arange(drafter.num_draft_tokens) < draft.num_valid
            return state, jnp.where(valid, draft.tokens, -1)

        return jax.lax.scan(step, prefilled, first + jnp.arange(count))[1]

    return jax.vmap(row)(tokens, firsts)
