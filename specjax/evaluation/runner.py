"""Decodes the same prompts plainly and with every drafter, alternating, and pools what it counts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax import metrics
from specjax.decoding.decode import cache_size, decode, encode_prompts
from specjax.drafters import NGram
from specjax.drafters.draft_lm import DraftLM
from specjax.evaluation.identity import identical
from specjax.evaluation.peer import Peer, PeerResult
from specjax.evaluation.speedup import Costs
from specjax.models.target import Target
from specjax.models.tokenizer import encode_turns
from specjax.types import (
    Controller,
    DecodeResult,
    Drafter,
    LoadedDrafter,
    Progress,
    StopReason,
    drafter_and_params,
)

ANSWER = "…"  # stands for one where only lengths matter
PEER_MODES = {NGram: "lookup", DraftLM: "assisted"}  # what `transformers` has of the same kind


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One drafter on one set of prompts.

    Attributes:
      plain, speculative: one result a batch; of the plain ones all drafters share the same.
      identical: answers of `specjax.evaluation.identity`, one a batch; empty above temperature 0.
      peer_plain, peer_speculative: what `transformers` made of the same batches; empty where it was
        not asked, or has no such drafter.
      compile_seconds: of the drafter's first run, which compiles what no earlier run has; it is part
        of no other figure.
      prompts: of every row of the batches in turn, the prompt or conversation that it belongs to.
    """

    plain: list[DecodeResult]
    speculative: list[DecodeResult]
    identical: list[str]
    peer_plain: list[PeerResult]
    peer_speculative: list[PeerResult]
    compile_seconds: float
    prompts: Sequence[int]

    @classmethod
    def pooled(cls, parts: Sequence[Evaluation]) -> Evaluation:
        """Several of one drafter as one: their batches together."""
        lists = ("plain", "speculative", "identical", "peer_plain", "peer_speculative")
        return cls(
            *([x for part in parts for x in getattr(part, name)] for name in lists),
            parts[0].compile_seconds,
            [prompt for part in parts for prompt in part.prompts],
        )

    @functools.cached_property
    def _plain(self) -> DecodeResult:
        return DecodeResult.pooled(self.plain)

    @functools.cached_property
    def _speculative(self) -> DecodeResult:
        return DecodeResult.pooled(self.speculative)

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        return self._speculative.num_draft_tokens

    @property
    def tau(self) -> float:
        """τ, pooled over all cycles of all prompts."""
        return self._speculative.tau

    @property
    def tau_interval(self) -> tuple[float, float]:
        """Where τ lies in 95 of 100 draws of as many prompts from these."""
        return metrics.tau_interval(self._committed)

    @functools.cached_property
    def _committed(self) -> list[np.ndarray]:
        """Tokens of the cycles of every prompt; of a conversation, those of all its turns."""
        told: dict[int, list[np.ndarray]] = {}
        for prompt, row in zip(self.prompts, self._speculative.committed, strict=True):
            told.setdefault(prompt, []).append(row)
        return [np.concatenate(rows) for rows in told.values()]

    @property
    def tau_of_prompts(self) -> float:
        """The mean of every prompt's own τ, in which a long answer weighs no more than a short one."""
        return float(np.mean([metrics.tau(row) for row in self._committed]))

    @property
    def tau_of_prompts_interval(self) -> tuple[float, float]:
        """Where it lies in 95 of 100 draws of as many prompts from these."""
        taus = [[metrics.tau(row)] for row in self._committed]
        return metrics.interval(np.array(taus), lambda drawn: drawn[:, 0] / len(taus))

    @property
    def accepted_share(self) -> float:
        """Accepted over drafted tokens, NaN where none was drafted; it falls with K at the same α."""
        accepted, drafted = (
            sum(row.sum() for row in rows)
            for rows in (self._speculative.accepted, self._speculative.drafted)
        )
        return float(accepted / drafted) if drafted else float("nan")

    @property
    def passes_per_token(self) -> float:
        """Target passes after prefill over new tokens: 1 in plain decoding, 1 / τ."""
        return self._speculative.target_passes / self._speculative.num_tokens

    @property
    def rows_a_batch(self) -> int | None:
        """B of all batches; None where they differ."""
        sizes = {len(run.tokens) for run in self.speculative}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def cycle_seconds(self) -> float:
        """Decoding time over cycles of the batch, each of which is one for every row that runs."""
        return self._speculative.decode_seconds / sum(map(len, self._cycles))

    @property
    def drafting_share(self) -> float:
        """Share of the batch's cycles in which any row had a draft; the others are plain steps."""
        return float(np.mean(np.concatenate(self._cycles)))

    @functools.cached_property
    def _cycles(self) -> list[np.ndarray]:
        """Of every batch, for each of its cycles, whether any row had a draft."""
        told = []
        for run in self.speculative:
            any_draft = np.zeros(max(map(len, run.drafted)), bool)
            for row in run.drafted:
                any_draft[: len(row)] |= row > 0
            told.append(any_draft)
        return told

    def pass_seconds(self, costs: Costs) -> float:
        """The mean pass of a cycle: a verification, or a plain step where nobody had a draft."""
        return self.drafting_share * costs.verify + (1 - self.drafting_share) * costs.plain

    def predicted_speedup(self, costs: Costs) -> float:
        """The speed-up, had nothing but drafts, passes and plain steps taken time.

        Args:
          costs: measured at this batch size; of a draft that is verified whole.
        """
        cycles = sum(map(len, self._cycles))
        steps = sum(
            max(map(len, run.tokens)) for run in self.plain
        )  # of the batch, like the cycles
        seconds = cycles * (costs.draft + self.pass_seconds(costs))
        said = (
            self._speculative.num_tokens / self._plain.num_tokens
        )  # above temperature 0 they differ
        return said * steps * costs.plain / seconds

    @property
    def survival(self) -> np.ndarray:
        """J_1…J_K, pooled."""
        return self._speculative.survival

    @property
    def alpha(self) -> np.ndarray:
        """α_1…α_K, pooled."""
        return self._speculative.alpha

    @property
    def plain_tokens_per_second(self) -> float:
        """All tokens over all seconds of plain decoding, prefill left out."""
        return self._plain.tokens_per_second

    @property
    def speculative_tokens_per_second(self) -> float:
        """All tokens over all seconds of speculative decoding, prefill left out."""
        return self._speculative.tokens_per_second

    @property
    def speedup(self) -> float:
        """Speculative over plain tokens per second."""
        return self.speculative_tokens_per_second / self.plain_tokens_per_second

    @property
    def speedup_interval(self) -> tuple[float, float]:
        """Where the speed-up lies in 95 of 100 draws of as many batches from these."""
        sums = [
            (fast.num_tokens, fast.decode_seconds, plain.num_tokens, plain.decode_seconds)
            for fast, plain in zip(self.speculative, self.plain, strict=True)
        ]

        def speedup(drawn: np.ndarray) -> np.ndarray:
            tokens, seconds, plain_tokens, plain_seconds = drawn.T
            return tokens / seconds / (plain_tokens / plain_seconds)

        return metrics.interval(np.array(sums, np.float64), speedup)

    @property
    def times_peer_plain(self) -> float | None:
        """Tokens per second of plain decoding over those of `transformers`, prefill included."""
        return _times(self.plain, self.peer_plain)

    @property
    def times_peer_speculative(self) -> float | None:
        """The same of speculative decoding."""
        return _times(self.speculative, self.peer_speculative)


def _times(results: list[DecodeResult], peer: list[PeerResult]) -> float | None:
    """End-to-end tokens per second over the peer's; None where there is no peer."""
    if not peer:
        return None
    seconds = sum(result.prefill_seconds + result.decode_seconds for result in results)
    tokens = sum(result.num_tokens for result in results)
    return tokens / seconds / peer_tokens_per_second(peer)


def peer_tokens_per_second(results: list[PeerResult]) -> float | None:
    """All tokens over all seconds, prefill included; None where there is no peer."""
    if not results:
        return None
    tokens = sum(len(row) for result in results for row in result.tokens)
    return tokens / sum(result.seconds for result in results)


def evaluate(
    target: Target,
    drafters: Mapping[str, Drafter | LoadedDrafter],
    prompts: Sequence[Any],
    *,
    batch: int = 1,
    controllers: Mapping[str, Controller | None] | None = None,
    peer: Peer | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Evaluation]:
    """Decodes every batch of prompts plainly and with every drafter, one after the other.

    Everything runs once before it is timed, so that nothing is compiled then; only for a few tokens
    where `max_len` is given, since the programs are the same.

    Args:
      target: from `specjax.load_target`.
      drafters: by name.
      prompts: as `specjax.decode` takes one.
      batch: prompts decoded together.
      controllers: of those drafters that have one, by name.
      peer: also takes its turn, in the greedy mode; speculatively with the drafters of
        `PEER_MODES`, where `batch` is 1.
      progress: called with (what, prompts done, prompts in all).
      options: further arguments of `specjax.decode`; `max_len` should hold the longest prompt.
    """
    greedy = not np.any(options.get("temperature", 0.0))
    if peer and not greedy:
        raise ValueError("transformers is compared at temperature 0 only")
    key = options.get("key")
    batches = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    runs: dict[str, list[DecodeResult]] = {name: [] for name in drafters}
    peers: dict[str | None, list[PeerResult]] = {name: [] for name in (None, *drafters)}
    plain: list[DecodeResult] = []

    def ask_peer(rows: Sequence[Any], name: str | None, budget: int) -> list[PeerResult]:
        drafter, _ = drafter_and_params(drafters[name] if name else None)
        mode = PEER_MODES.get(type(drafter)) if name else "plain"
        if peer is None or mode is None or (name and batch > 1):
            return []
        if name and drafter.draft_depth < drafter.num_draft_tokens:
            return []  # transformers drafts chains only
        k = drafter.num_draft_tokens if name else 0
        return [peer.decode(rows, mode=mode, num_draft_tokens=k, max_new_tokens=budget)]

    def run(name: str | None, rows: Sequence[Any], options: dict[str, Any]) -> DecodeResult:
        if name is None:
            return decode(target, None, rows, **options)
        controller = (controllers or {}).get(name)
        return decode(target, drafters[name], rows, controller=controller, **options)

    budget = options.get("max_new_tokens", 128)
    few = min(budget, 2) if "max_len" in options else budget
    compiling = dict.fromkeys(drafters, 0.0)
    for rows in batches:
        for name in (None, *drafters):
            done = run(name, rows, options | {"max_new_tokens": few})
            if name and not compiling[name]:
                compiling[name] = done.prefill_seconds + done.decode_seconds
            ask_peer(rows, name, few)
    for number, rows in enumerate(batches):
        if progress:
            progress("evaluating", number * batch, len(prompts))
        if not greedy:  # each batch its own coins
            options = options | {"key": jax.random.fold_in(key, number)}
        plain.append(run(None, rows, options))
        if StopReason.NAN in plain[-1].stop_reason:
            raise FloatingPointError(f"batch {number}: the target's output is not finite")
        peers[None] += ask_peer(rows, None, budget)
        for name in drafters:
            runs[name].append(run(name, rows, options))
            if StopReason.NAN in runs[name][-1].stop_reason:
                raise FloatingPointError(f"batch {number}: {name}: the output is not finite")
            peers[name] += ask_peer(rows, name, budget)
    if progress:
        progress("evaluating", len(prompts), len(prompts))
    return {
        name: Evaluation(
            plain,
            taken,
            [identical(target, *pair) for pair in zip(plain, taken, strict=True)] if greedy else [],
            peers[None],
            peers[name],
            compiling[name],
            range(len(prompts)),
        )
        for name, taken in runs.items()
    }


def evaluate_turns(
    target: Target,
    drafters: Mapping[str, Drafter | LoadedDrafter],
    conversations: Sequence[Sequence[str]],
    *,
    turns: int,
    max_len: int,
    **options: Any,
) -> dict[str, Evaluation]:
    """`evaluate` of the first turns of conversations, pooled.

    A later turn follows plain decoding's answers to those before it: all drafters answer the same.

    Args:
      target, drafters: as in `evaluate`.
      conversations: the user's turns of each.
      turns: how many of them; a shorter conversation ends sooner.
      max_len: of all turns: `turns_room` says how much they need at most.
      options: further arguments of `evaluate`.
    """
    said: list[list[str]] = [[] for _ in conversations]
    key = options.get("key")
    parts = []
    for turn in range(turns):
        going = [i for i, conversation in enumerate(conversations) if len(conversation) > turn]
        if not going:
            break
        for i in going:
            said[i].append(conversations[i][turn])
        if key is not None:  # each turn its own coins
            options = options | {"key": jax.random.fold_in(key, turn)}
        prompts = [encoded_turns(target, said[i]) for i in going]
        part = evaluate(target, drafters, prompts, max_len=max_len, **options)
        parts.append({name: dataclasses.replace(x, prompts=going) for name, x in part.items()})
        if turn + 1 < turns:
            answers = DecodeResult.pooled(next(iter(parts[-1].values())).plain).texts
            for i, answer in zip(going, answers, strict=True):
                said[i].append(answer)
    return {name: Evaluation.pooled([part[name] for part in parts]) for name in drafters}


def encoded_turns(target: Target, turns: Sequence[str]) -> np.ndarray:
    """Token ids `[n]` of a conversation that the user spoke last in."""
    if len(turns) == 1:
        return encode_prompts(target, turns[0])[0]
    return np.asarray(encode_turns(target.tokenizer, turns), np.int32)


def turns_room(
    target: Target, conversations: Mapping[int, Sequence[str]], turns: int, max_new_tokens: int
) -> int:
    """Rows of a cache that holds all turns of the longest conversation with their answers.

    Args:
      target: whose tokenizer and context.
      conversations: the user's turns, by the number that an error names.
      turns, max_new_tokens: how many turns, and the longest answer to each.

    Raises:
      ValueError: a conversation is longer than the target's context.
    """
    sizes = []
    for number, conversation in conversations.items():
        try:
            asked = [word for turn in conversation[:turns] for word in (turn, ANSWER)][:-1]
            length = len(encoded_turns(target, asked)) + len(asked) // 2 * max_new_tokens
            sizes.append(cache_size(target, [np.zeros(length)], np.array([max_new_tokens])))
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from None
    return min(max(sizes), target.config.context_length)
