"""`specjax.decode`: prompts in, `DecodeResult` out. Checks, batching and buckets are here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import prefill as prefilling
from specjax.decoding.autoregressive import PlainState, plain_loop
from specjax.decoding.rows import Row
from specjax.decoding.speculative import Counts, SpeculativeState, speculative_loop, widths_for
from specjax.models.cache import KVCache
from specjax.models.target import Target
from specjax.models.tokenizer import encode_prompt
from specjax.models.transformer import check_taps
from specjax.sampling import Sampling
from specjax.types import (
    Controller,
    DecodeResult,
    Drafter,
    LoadedDrafter,
    Progress,
    PyTree,
    Rule,
    StopReason,
    drafter_and_params,
)
from specjax.verification import RULES, greedy

Prompt = str | Sequence[int]

SMALLEST_CACHE = 128
REPORT_EVERY = 16  # cycles between two progress reports


def decode(
    target: Target,
    drafter: Drafter | LoadedDrafter | None,
    prompts: Prompt | Sequence[Prompt],
    *,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    key: jax.Array | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    max_len: int | None = None,
    rule: str | Rule = "token",
    controller: Controller | None = None,
    stop_tokens: Sequence[int] | None = None,
    chat: bool | None = None,
    progress: Progress | None = None,
) -> DecodeResult:
    """Decodes a batch of prompts, speculatively where there is a drafter.

    At temperature 0 the tokens are those of plain greedy decoding, whatever the drafter; otherwise
    their law is plain sampling's. The drafter changes only how many forward passes of the target they
    take. A row depends on its prompt, its parameters, its index and `key`; with a controller above
    temperature 0 also on the others, since a row may draft as long as they do.

    Args:
      target: from `specjax.load_target`.
      drafter: for instance `specjax.drafters.NGram(num_draft_tokens=8)`; None for plain decoding.
      prompts: a text or a list of them, or token ids or a list of those. Token ids are used as they
        are; a text is tokenized, see `chat`.
      temperature, top_k, top_p, min_p: sampling, as `specjax.sampling.Sampling` has them; for all rows,
        or one for each. Where every temperature is 0 the batch is decoded in the greedy mode.
      key: from `jax.random.key`; needed where a temperature is above 0.
      max_new_tokens: for all rows, or one for each.
      max_len: rows of the KV cache, the longest that prompt and output may become together. By
        default a bucket (a power of two) that holds the longest row.
      rule: the verification rule of the sampling mode: one of `specjax.verification.RULES` by name,
        or your own.
      controller: decides in every cycle how much is drafted and verified, like those of
        `specjax.decoding.controllers`; all by default.
      stop_tokens: ids that end a row; by default the target's.
      chat: render texts as a user's turn through the chat template; by default where there is one.
      progress: called with (what, done, total); costs a synchronisation now and then.

    Raises:
      ValueError: an argument is out of its range; the message says what was given and expected.
    """
    if not isinstance(rule, Rule) and rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}; known: {', '.join(sorted(RULES))}")
    ids = encode_prompts(target, prompts, chat)
    budgets = _budgets(max_new_tokens, len(ids))
    sampling = sampling_of(len(ids), temperature, top_k, top_p, min_p)
    keys = None if sampling is None else _request_keys(key, len(ids))
    rule = greedy if sampling is None else RULES.get(rule, rule)
    drafter, drafter_params = drafter_and_params(drafter)
    size = cache_size(target, ids, budgets, max_len)
    stops = _stop_ids(target, target.stop_tokens if stop_tokens is None else stop_tokens)
    if drafter:
        check_taps(drafter.taps, target.config)
        if drafter.num_draft_tokens >= target.config.context_length:
            raise ValueError(
                f"num_draft_tokens {drafter.num_draft_tokens} does not fit the target's context "
                f"of {target.config.context_length}"
            )

    batch, longest = len(ids), max(len(row) for row in ids)
    rows = _rows(ids, budgets, size, target.config.context_length if max_len is None else max_len)
    cache = _broadcast(KVCache.zeros(target.config, size, target.dtype), batch)
    drafter_state = _broadcast(drafter.init_state(size), batch) if drafter else ()
    started = time.perf_counter()
    rows, cache, drafter_state = prefilling.prefill(
        target.graphdef, target.params, drafter, drafter_params, rows, cache, drafter_state,
        longest=longest, progress=progress and (lambda *done: progress("prefill", *done)),
    )  # fmt: skip
    jax.block_until_ready(cache)
    prefilled = time.perf_counter()

    if drafter is None:
        state = PlainState(rows, cache, jnp.int32(0))

        def run(state, until):
            return plain_loop(target.graphdef, target.params, state, sampling, keys, stops, until)
    else:
        counts = Counts.zeros(batch, size, drafter)
        widths = widths_for(drafter.num_draft_tokens, controlled=controller is not None)
        state = SpeculativeState(
            rows, cache, drafter_state, counts, jnp.int32(0),
            controller.init_state(batch, drafter.num_draft_tokens) if controller else (),
        )  # fmt: skip

        def run(state, until):
            return speculative_loop(
                target.graphdef, target.params, drafter, drafter_params, rule, state,
                sampling, keys, stops, until, controller, widths=widths,
            )  # fmt: skip

    state = _run_to_the_end(run, state, size, ids, progress)
    jax.block_until_ready(state.rows)
    seconds = prefilled - started, time.perf_counter() - prefilled
    return _result(target, drafter, ids, state, seconds)


def encode_prompts(
    target: Target, prompts: Prompt | Sequence[Prompt], chat: bool | None = None
) -> list[np.ndarray]:
    """Token ids of each prompt, checked; the arguments are those of `decode`."""
    if isinstance(prompts, str) or (len(prompts) and _is_id(prompts[0])):
        prompts = [prompts]
    if not len(prompts):
        raise ValueError("no prompts were given")
    if target.tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("this target has no tokenizer: give prompts as token ids")
    if chat is None:
        chat = target.tokenizer is not None and target.tokenizer.chat_template is not None
    ids = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if chat and not prompt.strip():
                raise ValueError(f"prompt {number} is empty")
            prompt.encode()  # UnicodeEncodeError where the shell handed over broken UTF-8
            prompt = encode_prompt(target.tokenizer, prompt, chat=chat)
        row = np.asarray(prompt)
        if not row.size:
            raise ValueError(f"prompt {number} is empty")
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise ValueError(
                f"prompt {number}: expected a text or a list of token ids, got "
                f"{row.dtype} of shape {row.shape}"
            )
        _check_ids(target, row, f"prompt {number}: token id")
        ids.append(row.astype(np.int32))
    return ids


def _is_id(prompt: Any) -> bool:
    """Whether what was given for a prompt is a single token id: then its list is the prompt."""
    return not isinstance(prompt, str) and np.ndim(prompt) == 0


def _check_ids(target: Target, ids: np.ndarray, what: str) -> None:
    wrong = ids[(ids < 0) | (ids >= target.config.vocab_size)]
    if wrong.size:
        raise ValueError(
            f"{what} {wrong[0]} is outside the vocabulary of {target.config.vocab_size}"
        )


def _stop_ids(target: Target, stop_tokens: Sequence[int]) -> jax.Array:
    """The stop tokens, padded with −1, which is no token: few lengths mean few compilations."""
    ids = np.asarray(stop_tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"stop_tokens: expected a list of token ids, got {stop_tokens!r}")
    _check_ids(target, ids, "stop token")
    missing = max(8, -(-len(ids) // 8) * 8) - len(ids)
    return jnp.asarray(np.pad(ids.astype(np.int32), (0, missing), constant_values=-1))


def _budgets(max_new_tokens: int | Sequence[int], batch: int) -> np.ndarray:
    budgets = np.asarray(max_new_tokens)
    if budgets.ndim > 1 or (budgets.ndim == 1 and len(budgets) != batch):
        raise ValueError(
            f"max_new_tokens: expected one number or {batch} (one a prompt), got {max_new_tokens}"
        )
    if budgets.dtype.kind not in "iu" or (budgets < 1).any():
        raise ValueError(
            f"max_new_tokens must be at least 1 (a whole number), got {max_new_tokens}"
        )
    return np.broadcast_to(np.minimum(budgets, 2**30), batch)


def sampling_of(
    batch: int, temperature: Any, top_k: Any, top_p: Any, min_p: Any
) -> Sampling | None:
    """The rows' parameters, checked; None where all are greedy, a filter None where none uses it."""

    def per_row(name, given, valid, allowed, neutral, dtype=np.float32):
        values = np.asarray(given)
        if values.ndim > 1 or (values.ndim == 1 and len(values) != batch):
            raise ValueError(f"{name}: expected one number or {batch} (one a prompt), got {given}")
        if values.dtype.kind in "iu" and dtype == np.int32:
            values = np.minimum(values, 2**31 - 1)  # as good as all of them
        elif values.dtype.kind in "iuf" and dtype == np.float32:
            with np.errstate(over="ignore", under="ignore"):
                values = values.astype(dtype)  # checked as the device will see them
        else:
            values = np.asarray(np.nan)
        if not np.all(valid(values)):
            raise ValueError(f"{name} must be {allowed}, got {given}")
        if (values == neutral).all():
            return None
        return jnp.asarray(np.broadcast_to(values, batch).astype(dtype))

    rows = Sampling(
        per_row("temperature", temperature, lambda t: (t >= 0) & (t < np.inf), "at least 0", 0),
        per_row("top_k", top_k, lambda k: k >= 0, "a whole number, at least 0", 0, np.int32),
        per_row("top_p", top_p, lambda p: (p > 0) & (p <= 1), "in (0, 1]", 1),
        per_row("min_p", min_p, lambda p: (p >= 0) & (p < 1), "in [0, 1)", 0),
    )
    return None if rows.temperature is None else rows


def _request_keys(key: jax.Array | None, batch: int) -> jax.Array:
    """One key a prompt, by its index, so that a row does not depend on the size of the batch."""
    if key is None:
        raise ValueError("a temperature above 0 needs a key: key=jax.random.key(seed)")
    dtype = getattr(key, "dtype", type(key).__name__)
    # Under vmap `rbg` draws all rows from the first row's key.
    if np.shape(key) or str(dtype) != "key<fry>":
        raise ValueError(
            "key: expected one threefry key, jax.random.key(seed, impl='threefry2x32'), "
            f"got {dtype} {np.shape(key)}"
        )
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))


def cache_size(
    target: Target, ids: list[np.ndarray], budgets: np.ndarray, max_len: int | None = None
) -> int:
    """Rows of the cache: `max_len`, or the power of two that holds every row."""
    context = target.config.context_length
    longest = max(len(row) for row in ids)
    if max_len is not None and not 1 <= max_len <= context:
        raise ValueError(f"max_len must be 1…{context} (the target's context), got {max_len}")
    if longest >= (max_len or context):
        raise ValueError(
            f"a prompt of {longest} tokens leaves no room for an answer in "
            + (f"max_len={max_len}; raise it" if max_len else f"the target's context of {context}")
        )
    if max_len is not None:
        return max_len
    needed = max(len(row) + budget for row, budget in zip(ids, budgets.tolist(), strict=True))
    return max(SMALLEST_CACHE, 1 << (min(needed, context) - 1).bit_length())


def _rows(ids: list[np.ndarray], budgets: np.ndarray, size: int, max_len: int) -> Row:
    """Rows of a batch, none of them begun."""
    tokens = np.zeros((len(ids), size), np.int32)
    for row, prompt in zip(tokens, ids, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in ids], np.int32)
    wanted = lengths + budgets
    full = wanted > max_len
    row = Row(
        tokens=tokens,
        length=lengths,
        limit=np.minimum(wanted, max_len),
        limit_status=np.where(full, StopReason.CACHE_FULL, StopReason.LENGTH),
        status=np.full(len(ids), StopReason.RUNNING),
    )
    # Through numpy: a weakly typed array here would compile the loop a second time.
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.int32)), row)


def _broadcast(tree: PyTree, batch: int) -> PyTree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), tree)


def _run_to_the_end(
    run: Callable[[Any, jax.Array], Any],
    state: Any,
    cycles: int,
    ids: list[np.ndarray],
    progress: Progress | None,
) -> Any:
    """Runs the loop in one call, or in pieces of a few cycles where progress is wanted."""
    if progress is None:
        return run(state, jnp.int32(cycles))
    prompt_tokens = sum(len(row) for row in ids)
    total = int(np.asarray(state.rows.limit).sum())
    for until in range(REPORT_EVERY, cycles + REPORT_EVERY, REPORT_EVERY):
        state = run(state, jnp.int32(until))
        done = int(np.asarray(state.rows.length).sum())
        progress("decoding", done - prompt_tokens, total - prompt_tokens)
        if not np.asarray(state.rows.running).any():
            break
    return state


def _result(
    target: Target,
    drafter: Drafter | None,
    ids: list[np.ndarray],
    state: Any,
    seconds: tuple[float, float],
) -> DecodeResult:
    """Takes the batch apart into rows without padding."""
    tokens, lengths = np.asarray(state.rows.tokens), np.asarray(state.rows.length)
    new = [row[len(prompt) : end] for row, prompt, end in zip(tokens, ids, lengths, strict=True)]
    if drafter is None:
        committed = [np.ones(len(row), np.int32) for row in new]
        accepted = drafted = [np.zeros(len(row), np.int32) for row in new]
        confidence = [np.zeros((len(row), 0), np.float32) for row in new]
    else:
        counts = jax.device_get(state.counts)
        accepted, drafted, committed, confidence = (
            [row[cycles] for row, cycles in zip(column, counts.committed > 0, strict=True)]
            for column in (counts.accepted, counts.drafted, counts.committed, counts.confidence)
        )
    return DecodeResult(
        prompts=ids,
        tokens=new,
        stop_reason=[StopReason(int(status)) for status in np.asarray(state.rows.status)],
        accepted=accepted,
        drafted=drafted,
        committed=committed,
        confidence=confidence,
        num_draft_tokens=drafter.num_draft_tokens if drafter else 0,
        draft_depth=drafter.draft_depth if drafter else 0,
        prefill_seconds=seconds[0],
        decode_seconds=seconds[1],
        tokenizer=target.tokenizer,
    )
