"""Speculative decoding: draft K tokens, check them in one forward pass, commit what holds.

One cycle, for each row (K = 3; two drafts right, one wrong):

```
committed   t0 t1 t2 t3            length 4, target cache holds rows 0..2, anchor t3
draft       d4 d5 d6               drawn after t3
verify      [t3 d4 d5 d6]          at positions 3 4 5 6; their logits and their K/V rows
rule        accept d4, d5; reject d6, correct it to y6
commit      rows of t3 d4 d5 are written; committed t0..t3 d4 d5 y6, length 7, anchor y6
```
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.decoding.rows import Row, append
from specjax.models.cache import KVCache, write_rows
from specjax.models.transformer import Output, Transformer
from specjax.noise import Noise
from specjax.sampling import Sampling
from specjax.types import (
    Committed,
    Context,
    Controller,
    Draft,
    Drafter,
    Drafts,
    PyTree,
    Rule,
    Verdict,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts as `specjax.metrics` defines them: `[]` of one cycle and row, `[B, cycles]` of all.

    `confidence` has one more axis: K, or 0 where the drafter tells none.
    """

    accepted: jax.Array
    drafted: jax.Array
    committed: jax.Array
    confidence: jax.Array

    @classmethod
    def zeros(cls, batch: int, cycles: int, drafter: Drafter) -> Counts:
        """Room for that many cycles."""
        told = drafter.num_draft_tokens if drafter.confident else 0
        return cls(
            *(jnp.zeros((batch, cycles), jnp.int32) for _ in range(3)),
            jnp.zeros((batch, cycles, told), jnp.float32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeculativeState:
    """Carry of the loop, with the batch axis in front of all but `cycle`, which is `[]` int32.

    `controller_state` is the controller's own, of the batch.
    """

    rows: Row
    cache: KVCache
    drafter_state: PyTree
    counts: Counts
    cycle: jax.Array
    controller_state: PyTree = ()


def propose(
    drafter: Drafter,
    drafter_params: PyTree,
    params: PyTree,
    rule: Rule,
    row: Row,
    cache: KVCache,
    state: PyTree,
    sampling: Sampling | None,
    noise: Noise | None,
    most: jax.Array | None = None,
    *,
    least_q: jax.Array | None = None,
) -> tuple[Draft, PyTree]:
    """Drafts as the rule wants it, no deeper than the row has room for beside the next token.

    `most` and `least_q` are a controller's wishes, see `Context`: what is drafted beyond them is
    valid, what has no room is not.
    """
    if sampling is None or rule.drafts is Drafts.DETERMINISTIC:
        noise = None
    elif rule.drafts is Drafts.COUPLED:
        noise = dataclasses.replace(noise, coupled=True)
    most = row.room if most is None else jnp.minimum(most, row.room)
    context = Context(row.tokens, row.length, cache, sampling, most, least_q)
    draft, state = drafter.propose(drafter_params, params, state, context, noise)
    fitting = jnp.cumprod(draft.depths()[1:] <= row.room, dtype=jnp.int32).sum()
    return dataclasses.replace(draft, num_valid=jnp.clip(draft.num_valid, 0, fitting)), state


def verify(
    model: Transformer,
    rule: Rule,
    taps: tuple[int, ...],
    width: int,
    row: Row,
    cache: KVCache,
    draft: Draft,
    sampling: Sampling | None,
    noise: Noise | None,
) -> tuple[Output, Verdict, jax.Array]:
    """One forward pass over [anchor, first width − 1 drafts], and the rule on its logits.

    No more than width − 1 drafts may be valid. The output is padded to K + 1 tokens, so that
    passes of different widths can be branches of one `lax.switch`.

    Returns:
      The pass's output, the verdict, and whether the logits it stands on are finite.
    """
    num_draft_tokens = draft.tokens.shape[0]
    draft = draft.first(width - 1)
    block = jnp.append(row.anchor, draft.tokens)
    start = row.length - 1
    out = model(block, start + draft.depths(), cache, start, draft.mask(), taps)
    logits = model.head(out.hidden)
    # Nothing behind logits that are not finite holds, though an infinite one has an argmax.
    finite = jnp.isfinite(logits.max(-1))
    sound = jnp.cumprod(finite.astype(jnp.int32)).sum()
    draft = dataclasses.replace(draft, num_valid=jnp.minimum(draft.num_valid, sound))
    verdict = rule.verify(draft, logits, sampling, noise)
    return out.padded_to(num_draft_tokens + 1), verdict, finite[verdict.node]


def widths_for(num_draft_tokens: int, *, controlled: bool) -> tuple[int, ...]:
    """Tokens of the passes to compile: 1 and K + 1, with a controller also the powers of two between.

    The anchor is counted.
    """
    widest = num_draft_tokens + 1
    if not controlled:
        return 1, widest
    return *(1 << power for power in range((widest - 1).bit_length())), widest


def narrowest(widths: tuple[int, ...], drafts: Draft) -> jax.Array:
    """Index of the narrowest pass that holds the longest draft of the batch."""
    return jnp.searchsorted(jnp.asarray(widths), drafts.num_valid.max() + 1)


def shortened(drafts: Draft, wanted: jax.Array, widths: tuple[int, ...]) -> Draft:
    """A batch's drafts up to what the narrowest pass holds that holds all that is wanted.

    What it holds beside that is verified too, since it costs nothing: of a draft made at once the
    tokens behind those wanted, of one made token by token what a row got while another went on.

    That anticipates nothing. Where a row wants less than j tokens, it wants so whatever token j and
    those behind it are, and so do the others; and whether there is a token j at all is decided, too,
    by nothing but the tokens before it, of all rows.

    Args:
      drafts: of the batch.
      wanted: `[B]` int32, of each.
      widths: of the compiled passes.
    """
    wanted = dataclasses.replace(drafts, num_valid=jnp.clip(wanted, 0, drafts.num_valid))
    held = jnp.asarray(widths)[narrowest(widths, wanted)] - 1
    return dataclasses.replace(drafts, num_valid=jnp.minimum(drafts.num_valid, held))


def commit(
    drafter: Drafter,
    drafter_params: PyTree,
    params: PyTree,
    stop_tokens: jax.Array,
    row: Row,
    cache: KVCache,
    state: PyTree,
    draft: Draft,
    out: Output,
    verdict: Verdict,
    finite: jax.Array,
) -> tuple[Row, KVCache, PyTree, Counts]:
    """Appends the accepted path and the next token, and writes the rows they stand on.

    Where the logits are not finite, the accepted tokens are appended without a next one.

    Returns:
      Row, cache, drafter state, and the counts of this cycle.
    """
    nodes, accepted = draft.path(verdict.node)
    rows, features = out.rows, out.features
    if draft.topology is not None:
        rows, features = jax.tree.map(lambda x: x[:, nodes], rows), features[nodes]
    block = jnp.append(row.anchor, draft.tokens)[nodes]
    new_tokens = jnp.roll(block, -1)
    new_tokens = jnp.where(jnp.arange(len(block)) < accepted, new_tokens, verdict.next_token)
    start = row.length - 1
    row, committed = append(row, new_tokens, accepted + finite, finite, stop_tokens)
    cache = write_rows(cache, rows, start, committed)
    moved = Committed(block, features, new_tokens, start, committed, nodes)
    state = drafter.observe(drafter_params, params, state, moved)
    # Where a stop token (or NaN) cut the cycle short, only the drafts up to it were in play.
    cut = committed <= accepted
    accepted = jnp.minimum(accepted, committed)
    drafted = jnp.where(cut, accepted, levels_below(draft, verdict.node))
    counts = (x.astype(jnp.int32) for x in (accepted, drafted, committed))
    told = jnp.zeros(0, jnp.float32) if draft.confidence is None else draft.confidence
    return row, cache, state, Counts(*counts, told)


def levels_below(draft: Draft, node: jax.Array) -> jax.Array:
    """The depth of the deepest valid token that continues a node, its own if there is none."""
    if draft.topology is None:
        return draft.num_valid
    continues = draft.mask()[:, node] & (jnp.arange(draft.tokens.shape[0] + 1) <= draft.num_valid)
    return jnp.max(jnp.where(continues, draft.depths(), 0))


@functools.partial(
    jax.jit, static_argnames=("graphdef", "drafter", "rule", "widths"), donate_argnames=("state",)
)
def speculative_loop(
    graphdef: Any,
    params: PyTree,
    drafter: Drafter,
    drafter_params: PyTree,
    rule: Rule,
    state: SpeculativeState,
    sampling: Sampling | None,
    keys: jax.Array | None,
    stop_tokens: jax.Array,
    until: jax.Array,
    controller: Controller | None = None,
    *,
    widths: tuple[int, ...],
) -> SpeculativeState:
    """Runs cycles until every row has ended or `cycle` reaches `until`. `state` is donated.

    The batch is inside the loop: a vmapped `while_loop` would copy the cache in every step.
    `widths` are the tokens of the compiled verification passes, ascending, K + 1 the last; each
    cycle takes the narrowest that holds its drafts, so a cycle without any costs a plain step. A
    controller may end drafts before they are long, and shorten what was drafted at once.
    `sampling` and the request `keys` have the batch axis; both are None in the greedy mode.
    """
    model = nnx.merge(graphdef, params)

    def body(state: SpeculativeState) -> SpeculativeState:
        rows, cache = state.rows, state.cache
        noise = None if keys is None else Noise(keys, rows.length - 1)
        controller_state, most, least_q = state.controller_state, None, None
        if controller is not None:
            most, least_q = controller.plan(controller_state, rows.room), controller.least_q
        draft, drafter_state = jax.vmap(
            functools.partial(propose, drafter, drafter_params, params, rule, least_q=least_q)
        )(rows, cache, state.drafter_state, sampling, noise, most)
        if controller is not None:
            wanted = controller(controller_state, draft, rows.running)
            draft = shortened(draft, wanted, widths)
        passes = [
            jax.vmap(functools.partial(verify, model, rule, drafter.taps, width))
            for width in widths
        ]
        # The branches return rows of K/V, never caches: a cache would be copied whole.
        out, verdict, finite = jax.lax.switch(
            narrowest(widths, draft), passes, rows, cache, draft, sampling, noise
        )
        rows, cache, drafter_state, cycle_counts = jax.vmap(
            functools.partial(commit, drafter, drafter_params, params, stop_tokens)
        )(rows, cache, drafter_state, draft, out, verdict, finite)
        counts = jax.tree.map(
            lambda column, value: column.at[:, state.cycle].set(value), state.counts, cycle_counts
        )
        if controller is not None:
            decided = cycle_counts.accepted, cycle_counts.drafted
            controller_state = controller.observe(controller_state, *decided)
        return SpeculativeState(
            rows, cache, drafter_state, counts, state.cycle + 1, controller_state
        )

    def unfinished(state: SpeculativeState) -> jax.Array:
        return state.rows.running.any() & (state.cycle < until)

    return jax.lax.while_loop(unfinished, body, state)
