"""Where the time of a decode loop goes: plain step, cycle, and its draft and verification alone.

Every part is a jitted loop of its own that runs `steps` times, each step depending on the one before
it, so that XLA can neither hoist nor overlap it. The parts take turns. What is shown are medians; what
is reckoned with are means without the outermost quarters (`_middle`).
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.decoding import decode as decoding
from specjax.decoding.autoregressive import PlainState, plain_loop
from specjax.decoding.controllers import Fixed
from specjax.decoding.rows import Row
from specjax.decoding.speculative import (
    Counts,
    SpeculativeState,
    propose,
    speculative_loop,
    verify,
    widths_for,
)
from specjax.evaluation.speedup import Costs
from specjax.models.cache import KVCache
from specjax.models.target import Target
from specjax.noise import Noise, Role
from specjax.sampling import Sampling, argmax
from specjax.types import Committed, Controller, Draft, Drafter, PyTree, Rule, StopReason, Verdict
from specjax.verification.law import require_chain

Name = TypeVar("Name", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What a rule does that accepts each draft with probability `alpha`, whatever it is.

    It is for timing only, and not lossless: it lets shapes without weights, and drafters that are
    always wrong, be timed at an acceptance rate.
    """

    alpha: float

    def __call__(
        self, draft: Draft, target_logits: jax.Array, sampling: Sampling | None, noise: Noise
    ) -> Verdict:
        """Coins decide, up to `num_valid`."""
        require_chain(draft, "simulated")
        count = draft.tokens.shape[0]
        kept = noise.uniforms(Role.VERDICT, count) < self.alpha
        kept &= jnp.arange(count) < draft.num_valid
        accepted = jnp.cumprod(kept.astype(jnp.int32)).sum()
        return Verdict(accepted, argmax(target_logits)[accepted])


@dataclasses.dataclass(frozen=True)
class WholeDrafts:
    """A drafter whose every draft counts as K tokens, also where it has less to offer."""

    drafter: Drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, *arguments: Any) -> tuple[Draft, PyTree]:
        """The drafter's draft, all of it valid."""
        draft, state = self.drafter.propose(*arguments)
        whole = jnp.full_like(draft.num_valid, self.drafter.num_draft_tokens)
        return dataclasses.replace(draft, num_valid=whole), state


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds a step or a cycle: the median of several runs, the fastest and the slowest."""

    median: float
    fastest: float
    slowest: float


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Timings of the parts, and what they say.

    Attributes:
      plain, cycle, draft, verify: of one plain step, one cycle, its two parts alone; `draft` is
        proposing and observing.
      rule: of the rule on logits that are there, a part of `verify`.
      tau: tokens a row committed per cycle.
      weight_bytes: bytes of weights a plain step reads.
      read_bandwidth: bytes/s of a sum over a large array, measured in turn with the rest.
    """

    plain: Timing
    cycle: Timing
    draft: Timing
    verify: Timing
    rule: Timing
    tau: float
    weight_bytes: int
    read_bandwidth: Timing

    @property
    def bandwidth_share(self) -> float:
        """Weights a second that plain decoding reads, over the machine's read bandwidth."""
        return self.weight_bytes / self.plain.median / self.read_bandwidth.median

    @property
    def overhead_share(self) -> float:
        """What a cycle takes beyond draft and verification, over the cycle."""
        parts = self.draft.median + self.verify.median
        return (self.cycle.median - parts) / self.cycle.median

    @property
    def rule_share(self) -> float:
        """The rule, its sampling included, over the cycle."""
        return self.rule.median / self.cycle.median

    @property
    def speedup(self) -> float:
        """Measured: τ · plain / cycle."""
        return self.tau * self.plain.median / self.cycle.median

    @property
    def predicted_speedup(self) -> float:
        """τ · plain / (draft + verify)."""
        return self.tau * self.plain.median / (self.draft.median + self.verify.median)

    @property
    def measured_over_predicted(self) -> float:
        """Measured speed-up over predicted."""
        return self.speedup / self.predicted_speedup


@functools.partial(jax.jit, static_argnames=("drafter", "rule", "steps"))
def draft_alone(
    params: PyTree,
    drafter: Drafter,
    drafter_params: PyTree,
    rule: Rule,
    rows: Row,
    cache: KVCache,
    state: PyTree,
    sampling: Sampling | None,
    keys: jax.Array,
    *,
    steps: int,
) -> tuple[jax.Array, jax.Array]:
    """Drafts and observes `steps` times; the anchor of each is the last token drafted before.

    Returns:
      The last tokens `[B]`, and `[]` float32 that depends on every log q and confidence: without it XLA
      would leave out what only a rule or a controller reads.
    """

    def one(row: Row, cache: KVCache, state: PyTree, sampling: Any, noise: Any) -> Any:
        draft, state = propose(
            drafter, drafter_params, params, rule, row, cache, state, sampling, noise
        )
        nodes = jnp.arange(drafter.draft_depth + 1)
        block = jnp.append(row.anchor, draft.tokens)[nodes]
        table = params["embedding"]
        # Depends on the step before, though it is 0: else XLA computes what reads it only once.
        zero = (row.anchor < 0).astype(table.dtype)
        features = jnp.full((len(nodes), len(drafter.taps), table.shape[1]), zero)
        committed = Committed(
            block, features, jnp.roll(block, -1), row.length - 1, jnp.int32(1), nodes
        )
        return draft, drafter.observe(drafter_params, params, state, committed)

    def body(_, carry: tuple[jax.Array, jax.Array, PyTree]) -> tuple[jax.Array, jax.Array, PyTree]:
        anchors, read, state = carry
        index = (jnp.arange(len(anchors)), rows.length - 1)
        moved = dataclasses.replace(rows, tokens=rows.tokens.at[index].set(anchors))
        noise = None if sampling is None else Noise(keys, moved.length - 1)
        draft, state = jax.vmap(one)(moved, cache, state, sampling, noise)
        for told in (draft.log_q, draft.confidence):
            if told is not None:
                read += told.max(-1).sum()
        return draft.tokens[:, -1], read, state

    anchors = jnp.ones(rows.length.shape[0], jnp.int32)
    carry = anchors, jnp.float32(0), state
    anchors, read, state = jax.lax.fori_loop(0, steps, body, carry)
    return anchors, read + sum(x.sum() for x in jax.tree.leaves(state))


@functools.partial(jax.jit, static_argnames=("graphdef", "rule", "taps", "steps"))
def verify_alone(
    graphdef: Any,
    params: PyTree,
    rule: Rule,
    taps: tuple[int, ...],
    rows: Row,
    cache: KVCache,
    draft: Draft,
    sampling: Sampling | None,
    keys: jax.Array,
    *,
    steps: int,
) -> jax.Array:
    """Verifies drafts of the given form `steps` times, each made of the token decided before."""
    model = nnx.merge(graphdef, params)
    k = draft.tokens.shape[1]
    one = jax.vmap(functools.partial(verify, model, rule, taps, k + 1))

    def body(_, tokens: jax.Array) -> jax.Array:
        drafted = dataclasses.replace(
            draft,
            tokens=jnp.repeat(tokens[:, None], k, axis=1),
            num_valid=jnp.full(len(tokens), k, jnp.int32),
        )
        _, verdict, _ = one(rows, cache, drafted, sampling, Noise(keys, rows.length - 1))
        return verdict.next_token

    return jax.lax.fori_loop(0, steps, body, jnp.ones(rows.length.shape[0], jnp.int32))


@functools.partial(jax.jit, static_argnames=("rule", "steps"))
def rule_alone(
    rule: Rule,
    draft: Draft,
    logits: jax.Array,
    sampling: Sampling | None,
    noise: Noise,
    *,
    steps: int,
) -> jax.Array:
    """Applies the rule `steps` times to `[B, K + 1, V]` logits and valid drafts."""
    k = draft.tokens.shape[1]

    def body(_, tokens: jax.Array) -> jax.Array:
        drafted = dataclasses.replace(
            draft,
            tokens=jnp.repeat(tokens[:, None], k, axis=1),
            num_valid=jnp.full(len(tokens), k, jnp.int32),
        )
        # Depends on the step before, though it changes nothing: else XLA computes it only once.
        same = logits + (tokens < 0)[:, None, None]
        return jax.vmap(rule.verify)(drafted, same, sampling, noise).next_token

    return jax.lax.fori_loop(0, steps, body, jnp.ones(logits.shape[0], jnp.int32))


@jax.jit
def _sum(x: jax.Array) -> jax.Array:
    return x.sum()


BEGUN = 64  # committed tokens of a row when its timing starts
NO_STOPS = np.full(8, -1, np.int32)


def _fresh(
    target: Target, drafter: Drafter, batch: int, max_len: int, length: int, seed: int
) -> tuple[Row, KVCache, PyTree]:
    """Rows of random tokens, an empty cache, and the drafter's first state."""
    tokens = np.random.default_rng(seed).integers(0, target.config.vocab_size, (batch, max_len))
    rows = Row(
        jnp.asarray(tokens, jnp.int32),
        jnp.full(batch, length, jnp.int32),
        jnp.full(batch, max_len, jnp.int32),
        jnp.asarray(np.full(batch, StopReason.LENGTH, np.int32)),
        jnp.zeros(batch, jnp.int32),
    )
    state = KVCache.zeros(target.config, max_len, target.dtype), drafter.init_state(max_len)
    return rows, *jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), state)


def _require_room(max_len: int, length: int, steps: int, k: int) -> None:
    needed = length + steps * (k + 1)
    if needed > max_len:
        raise ValueError(f"{steps} cycles of K={k} need max_len ≥ {needed}, got {max_len}")


def _cycles(
    target: Target,
    drafter: Drafter,
    drafter_params: PyTree,
    rule: Rule,
    fresh: tuple[Row, KVCache, PyTree],
    steps: int,
    sampling: Sampling | None,
    keys: jax.Array | None,
    width: int,
    controller: Controller | None = None,
) -> Callable[[], SpeculativeState]:
    """What runs so many cycles of one width, from what `_fresh` gives."""
    counts = Counts.zeros(len(fresh[0].length), steps, drafter)
    return functools.partial(
        speculative_loop, target.graphdef, target.params, drafter, drafter_params, rule,
        SpeculativeState(*fresh, counts, jnp.int32(0)), sampling, keys, NO_STOPS, jnp.int32(steps),
        controller, widths=(width,),
    )  # fmt: skip


def _in_turn(
    parts: dict[Any, Callable[[], Callable[[], Any]]],
    repeats: int,
    watch: Callable[[Any, Any], None] = lambda name, done: None,
) -> dict[Any, list[float]]:
    """Seconds of every run of every part, after one that compiles.

    Args:
      parts: each makes what is then timed, a `functools.partial` whose arguments are ready.
      repeats: timed runs.
      watch: is given the name and the result of each.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in parts}
    for repeat in range(repeats + 1):
        for name, prepare in parts.items():
            run = prepare()
            jax.block_until_ready(run.args)
            started = time.perf_counter()
            done = jax.block_until_ready(run())
            if repeat:
                seconds[name].append(time.perf_counter() - started)
                watch(name, done)
            del run, done  # their caches, before the next are made
    return seconds


def _middle(seconds: Sequence[float]) -> float:
    """The mean without the fastest and the slowest quarter of the runs.

    A machine on which something else runs now and then has runs of two kinds. The median is of the
    one or the other, by chance and not the same for every part; decoding goes through both.
    """
    cut = len(seconds) // 4
    return statistics.fmean(sorted(seconds)[cut : len(seconds) - cut])


def cycle_seconds(
    target: Target,
    drafter: Drafter,
    drafter_params: PyTree,
    rule: Rule,
    *,
    batch: int = 1,
    max_len: int = 512,
    steps: int = 12,
    repeats: int = 5,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> dict[int, float]:
    """How long a cycle of the batch takes that verifies w tokens a row, by w; timed in turn.

    They are what a controller is told of its costs: every width that it may choose is there. A drafter
    that takes its tokens one after the other drafts w − 1 of them, as it would for the controller.

    Args:
      max_len: S of the decoding in question; more where the timed cycles need it.
      as in `breakdown`.

    Raises:
      ValueError: a sampling parameter is out of its range.
    """
    max_len = max(max_len, BEGUN + steps * (drafter.num_draft_tokens + 1))
    sampling = decoding.sampling_of(batch, temperature, top_k, top_p, min_p)
    keys = None if sampling is None else jax.random.split(jax.random.key(0), batch)
    whole = WholeDrafts(drafter)

    def cycles(width: int) -> Callable[[], SpeculativeState]:
        return _cycles(
            target, whole, drafter_params, rule,
            _fresh(target, whole, batch, max_len, BEGUN, 0),
            steps, sampling, keys, width, Fixed(jnp.int32(width - 1)),
        )  # fmt: skip

    widths = widths_for(drafter.num_draft_tokens, controlled=True)
    seconds = _in_turn({width: functools.partial(cycles, width) for width in widths}, repeats)
    return {width: _middle(runs) / steps for width, runs in seconds.items()}


def breakdown(
    target: Target,
    drafter: Drafter,
    drafter_params: PyTree,
    rule: Rule,
    *,
    steps: int = 16,
    repeats: int = 5,
    **options: Any,
) -> Breakdown:
    """Times every part, in turn, on rows of random tokens.

    Every cycle verifies K + 1 tokens, also where the drafter has nothing to offer: so that the cycle
    is the sum of its parts. A `Simulated` rule takes every draft for K tokens, so that its τ is
    (1 − α^(K + 1)) / (1 − α) with any drafter.

    Args:
      target, drafter, drafter_params, rule: what is timed.
      steps: steps or cycles a run, for all of which the rows must have room.
      repeats: timed runs of each part, after one that compiles.
      options: `batch` and `max_len`, B and S; `length`, committed tokens of each row at the start;
        `temperature`, `top_k`, `top_p`, `min_p`, sampling as `specjax.decode` has it, the same for
        all rows; `seed` of tokens and noise.

    Raises:
      ValueError: the rows have no room for all cycles, or a sampling parameter is out of its range.
    """
    committed = []

    def count(name: str, done: Any) -> None:
        if name == "cycle":
            committed.append(np.asarray(done.counts.committed))

    parts = _parts(target, drafter, drafter_params, rule, steps=steps, **options)
    large = jnp.ones(2**26 if target.dtype.itemsize >= 4 else 2**27, jnp.float32)
    parts["read_bandwidth"] = lambda: functools.partial(_sum, large)
    seconds = _in_turn(parts, repeats, count)
    figures = {name: [x / steps for x in runs] for name, runs in seconds.items()}
    figures["read_bandwidth"] = [large.nbytes / x for x in seconds["read_bandwidth"]]
    timings = {
        name: Timing(statistics.median(values), min(values), max(values))
        for name, values in figures.items()
    }
    tau = float(np.mean(committed))
    weights = jax.tree.leaves(target.params)
    read = target.config.vocab_size * target.config.hidden_size * target.dtype.itemsize
    untied = 0 if target.config.tie_embeddings else read  # of the embedding a step reads one row
    return Breakdown(**timings, tau=tau, weight_bytes=sum(x.nbytes for x in weights) - untied)


def costs(
    target: Target,
    drafters: Mapping[Name, tuple[Drafter, PyTree]],
    rule: Rule,
    *,
    max_len: int,
    steps: int = 12,
    repeats: int = 7,
    **options: Any,
) -> dict[Name, Costs]:
    """What the law of speed-up asks of a machine: a plain step, a whole draft, its verification.

    The parts of all drafters take turns with one plain step: what is compared was measured together.

    Args:
      target: what is timed.
      drafters: with their params, by any name, as by K.
      rule: of the verification.
      max_len: S of the decoding in question; more where the timed steps need it.
      steps, repeats, options: as in `breakdown`.

    Returns:
      Of each drafter, by its name.
    """
    longest = max(drafter.num_draft_tokens for drafter, _ in drafters.values())
    options |= {"max_len": max(max_len, BEGUN + steps * (longest + 1)), "steps": steps}
    timed: dict[Any, Callable[[], Callable[[], Any]]] = {}
    for name, (drafter, params) in drafters.items():
        parts = _parts(target, drafter, params, rule, **options)
        timed["plain"] = parts["plain"]
        timed |= {(name, part): parts[part] for part in ("draft", "verify")}
    seconds = {part: _middle(runs) / steps for part, runs in _in_turn(timed, repeats).items()}
    return {
        name: Costs(seconds["plain"], seconds[name, "draft"], seconds[name, "verify"])
        for name in drafters
    }


def _parts(
    target: Target,
    drafter: Drafter,
    drafter_params: PyTree,
    rule: Rule,
    *,
    steps: int,
    batch: int = 1,
    max_len: int = 512,
    length: int = BEGUN,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> dict[str, Callable[[], Callable[[], Any]]]:
    """What `_in_turn` times of a drafter: plain step, cycle, draft, verification, rule."""
    if isinstance(rule.verify, Simulated):
        drafter = WholeDrafts(drafter)
    k = drafter.num_draft_tokens
    _require_room(max_len, length, steps, k)
    sampling = decoding.sampling_of(batch, temperature, top_k, top_p, min_p)
    keys = jax.random.split(jax.random.key(seed), batch)
    fresh = functools.partial(_fresh, target, drafter, batch, max_len, length, seed)

    def plain() -> Callable[[], PlainState]:
        rows, cache, _ = fresh()
        return functools.partial(
            plain_loop, target.graphdef, target.params, PlainState(rows, cache, jnp.int32(0)),
            sampling, None if sampling is None else keys, NO_STOPS, jnp.int32(steps),
        )  # fmt: skip

    def cycle() -> Callable[[], SpeculativeState]:
        return _cycles(target, drafter, drafter_params, rule, fresh(), steps, sampling, keys, k + 1)

    def draft() -> Callable[[], Any]:
        return functools.partial(
            draft_alone, target.params, drafter, drafter_params, rule, *fresh(), sampling, keys,
            steps=steps,
        )  # fmt: skip

    def verification() -> Callable[[], Any]:
        rows, cache, _ = fresh()
        return functools.partial(
            verify_alone, target.graphdef, target.params, rule, drafter.taps, rows, cache, drafted,
            sampling, keys, steps=steps,
        )  # fmt: skip

    rows, *rest = fresh()
    one = functools.partial(propose, drafter, drafter_params, target.params, rule)
    drafted, _ = jax.vmap(one)(rows, *rest, sampling, Noise(keys, rows.length - 1))

    @functools.cache
    def logits() -> jax.Array:
        shape = (batch, k + 1, target.config.vocab_size)
        return jax.random.normal(jax.random.key(seed), shape, jnp.float32)

    def rule_only() -> Callable[[], Any]:
        rows, *_ = fresh()
        noise = Noise(keys, rows.length - 1)
        return functools.partial(
            rule_alone, rule, drafted, logits(), sampling, noise, steps=steps
        )  # fmt: skip

    parts = {"plain": plain, "cycle": cycle, "draft": draft, "verify": verification}
    return parts | {"rule": rule_only}
