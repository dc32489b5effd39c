"""EAGLE-3 as a drafter: what it keeps, how it drafts, what it learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.drafters import autoregressive
from specjax.drafters.eagle3.network import Eagle3Network, graphdef
from specjax.drafters.vocabulary import DraftVocabulary
from specjax.losses import DIVERGENCES, Losses, token_losses, weighted_sums
from specjax.models.cache import KVCache, write_if_finite
from specjax.models.config import ModelConfig
from specjax.models.transformer import Scratch, causal_mask, embed, head_of, logits_of
from specjax.noise import Noise
from specjax.sampling import likeliest
from specjax.trees import DynamicTree, Tree
from specjax.types import Committed, Context, Draft, PyTree, Terms, Trace


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Eagle3State:
    """The layer's cache, made of the target's features only.

    Attributes:
      cache: rows 0…length − 2 are valid; row i was made of the features at i and of token i + 1.
      hidden: `[D]`, output of the last row: what the first drafted token is read from.
      sound: `[]` bool, False once an output was not finite.
    """

    cache: KVCache
    hidden: jax.Array
    sound: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftRows:
    """What one draft has computed, in slots: rows of the cache, and outputs of the layer `[N, D]`."""

    rows: Scratch
    hidden: jax.Array


@dataclasses.dataclass(frozen=True)
class Eagle3(autoregressive.TreeDrafter):
    """Drafts from the target's features, then from its own states (EAGLE-3, Li et al. 2025).

    ```
    committed   t0 t1 t2 t3              features f0 f1 f2, anchor t3
    observe     (f0 t1) (f1 t2) (f2 t3)  rows 0 1 2 of the cache; the last output is a2
    propose     a2 → d4;  (a2 d4) → a3 → d5;  (a3 d5) → a4 → d6
    ```

    The first token costs no pass: `observe` made its state. Rows of a draft lie in a scratch and are
    thrown away; `observe` makes them again, of true features. Where there are no features yet, after a
    prompt of one token, nothing is drafted; nor once an output was not finite.

    Attributes:
      config: of the layer; its `vocab_size` is that of the draft.
      taps: the target's blocks whose outputs are fused.
      dtype: of the weights.
      vocabulary: what can be drafted; None for the target's whole vocabulary.
      tree: what is drafted: a chain, a static or a dynamic tree.
      ttt_steps: n, steps of training-time test.
      step_decay: weight of a step's loss over that of the step before; 0.8 in EAGLE's own code.
      norm_before_residual: the layer's stream is the normed state, as in some released checkpoints.
      skip_undraftable: learn only where the target's likeliest token can be drafted, as EAGLE's own
        code does; `speculators` learns everywhere.
    """

    config: ModelConfig
    taps: tuple[int, ...]
    dtype: Any
    vocabulary: DraftVocabulary | None
    tree: Tree | DynamicTree
    ttt_steps: int = 7
    step_decay: float = 0.8
    norm_before_residual: bool = False
    skip_undraftable: bool = True

    def __post_init__(self):
        if self.ttt_steps < 1:
            raise ValueError(f"eagle3: ttt_steps must be at least 1, got {self.ttt_steps}")
        autoregressive.check_widths(self.tree, self.config.vocab_size)

    def model(self, params: PyTree, target_params: PyTree) -> Eagle3Network:
        """The network; a head that its params lack is the target's.

        Raises:
          ValueError: the target is another one.
        """
        full = self.config.vocab_size if self.vocabulary is None else self.vocabulary.target_size
        if target_params["embedding"].shape != (full, self.config.hidden_size):
            raise ValueError(
                f"this eagle3 drafter is of a target of {full} tokens and hidden size "
                f"{self.config.hidden_size}, got {target_params['embedding'].shape}"
            )
        if "head_weight" not in params:
            params = params | {"head_weight": head_of(target_params)}
        static = graphdef(self.config, len(self.taps), self.norm_before_residual)
        return nnx.merge(static, {name: params[name] for name in params if name != "embedding"})

    def embed(self, params: PyTree, target_params: PyTree, tokens: jax.Array) -> jax.Array:
        """`[T]` ids → `[T, D]`, by the target's table where the params have none."""
        table = jax.lax.stop_gradient(params.get("embedding", target_params["embedding"]))
        return embed(table, tokens, self.config.embedding_scale)

    def init_state(self, max_len: int) -> Eagle3State:
        """Nothing observed."""
        cache = KVCache.zeros(self.config, max_len, self.dtype)
        return Eagle3State(cache, jnp.zeros(self.config.hidden_size, self.dtype), jnp.array(True))

    def observe(
        self, params: PyTree, target_params: PyTree, state: Eagle3State, committed: Committed
    ) -> Eagle3State:
        """Writes the rows of the committed tokens, of the target's own features."""
        model = self.model(params, target_params)
        width = len(committed.tokens)
        outputs, rows = model(
            self.embed(params, target_params, committed.next_tokens),
            model.fuse(committed.features),
            committed.start + jnp.arange(width),
            state.cache,
            committed.start,
            causal_mask(width),
        )
        cache, finite = write_if_finite(
            state.cache, rows, outputs, committed.start, committed.count
        )
        last = outputs[jnp.maximum(committed.count - 1, 0)]
        observed = finite & (committed.count > 0)
        return Eagle3State(cache, jnp.where(observed, last, state.hidden), state.sound & finite)

    prefill = observe

    def propose(
        self,
        params: PyTree,
        target_params: PyTree,
        state: Eagle3State,
        context: Context,
        noise: Noise | None,
    ) -> tuple[Draft, Eagle3State]:
        """Tokens of the head's processed distributions."""
        model = self.model(params, target_params)
        # The last row pairs the features before the anchor with the anchor; drafts go on behind it.
        position = context.length - 2
        size = autoregressive.scratch_size(self.tree, 1)

        def forward(tokens, positions, scratch, mask, parents):
            outputs, rows = model(
                self.embed(params, target_params, tokens), scratch.hidden[parents], positions,
                state.cache, position + 1, mask, scratch.rows,
            )  # fmt: skip
            at = scratch.rows.slot, 0
            hidden = jax.lax.dynamic_update_slice(scratch.hidden, outputs, at)
            return model.head(outputs), DraftRows(scratch.rows.after(rows, positions), hidden)

        # Slot 0 stands for the last row of the cache: it has its output, and nobody sees its row.
        empty = Scratch.empty(self.config, size, self.dtype)
        hidden = jnp.zeros((size, self.config.hidden_size), self.dtype).at[0].set(state.hidden)
        scratch = DraftRows(dataclasses.replace(empty, slot=jnp.int32(1)), hidden)
        draft, _ = autoregressive.draft(
            lambda scratch: (model.head(state.hidden), scratch), scratch, forward, position,
            self.tree, context, noise, first=1, vocab_size=self.config.vocab_size,
            masked_slots=jnp.arange(size) == 0, vocabulary=self.vocabulary,
            ready=state.sound & (context.length > 1),
        )  # fmt: skip
        return draft, state

    def ttt_outputs(
        self,
        params: PyTree,
        target_params: PyTree,
        trace: Trace,
        steps: int,
        *,
        remat: bool = False,
    ) -> list[jax.Array]:
        """Outputs of the layer in each step of training-time test, `[T, D]` each.

        Step s at index i has read the features up to i and the text up to i + 1 + s; it predicts the
        token after that.
        """
        model = self.model(params, target_params)
        own_text = trace.segments[:, None] == trace.segments
        mask = causal_mask(len(trace.tokens)) & own_text
        hidden, earlier, outputs = model.fuse(trace.features), (), []
        for step in range(steps):
            run = jax.checkpoint(model.ttt_step) if remat else model.ttt_step
            tokens = jnp.roll(trace.tokens, -1 - step)
            embedded = self.embed(params, target_params, tokens)
            hidden, rows = run(embedded, hidden, trace.positions + step, mask, earlier)
            earlier, outputs = (*earlier, rows), [*outputs, hidden]
        return outputs

    def terms_of(self, losses: Mapping[str, float]) -> dict[str, float]:
        """A loss has a term for each step."""
        return {
            f"{loss}_{k + 1}": factor * self.step_decay**k
            for loss, factor in losses.items()
            for k in range(self.ttt_steps)
        }

    def objective(
        self,
        params: PyTree,
        target_params: PyTree,
        trace: Trace,
        key: jax.Array,
        losses: Losses,
    ) -> Terms:
        """The losses of every step (training-time test, §3.2), and `alpha_1`, ….

        The target's distribution is that over the draft vocabulary. α is against the whole one.
        """
        model = self.model(params, target_params)
        steps = self.ttt_outputs(params, target_params, trace, self.ttt_steps, remat=losses.remat)
        # From here on index j is of the token that the target's prediction is made after.
        outputs, own_text = [], []
        for k, output in enumerate(steps, start=1):
            outputs.append(jnp.roll(output, k, axis=0))
            own_text.append(self._same_text(trace, k))
        weights = trace.weights[:, None] * jnp.stack(own_text, axis=1)

        def one(next_tokens, target_hidden, outputs):
            logits = jax.lax.stop_gradient(logits_of(target_params, target_hidden))
            tokens, log_mass, taught = next_tokens, jnp.zeros(len(logits)), {}
            if self.vocabulary is not None:
                tokens, taught["cross_entropy"] = self.vocabulary.locate(next_tokens)
                largest = logits.max(-1)
                logits, log_mass = self.vocabulary.restrict(logits)
                if self.skip_undraftable:
                    taught |= dict.fromkeys(DIVERGENCES, logits.max(-1) == largest)
            # All steps as one long column of tokens: a few large products, step after step.
            predictions = jax.tree.map(
                lambda x: jnp.concatenate([x] * self.ttt_steps), (tokens, logits, log_mass)
            )
            draft_logits = model.head(outputs.swapaxes(0, 1).reshape(-1, outputs.shape[-1]))
            tokens, logits, log_mass = predictions
            values = token_losses(losses.names, tokens, logits, draft_logits, log_mass)
            columns = {name: x.reshape(self.ttt_steps, -1).T for name, x in values.items()}
            return {
                name: jnp.where(taught[name][:, None], x, 0) if name in taught else x
                for name, x in columns.items()
            }

        arrays = jnp.roll(trace.tokens, -1), trace.hidden, jnp.stack(outputs, axis=1)
        sums = weighted_sums(one, weights, *arrays, remat=losses.remat)
        return {
            f"{name}_{k + 1}": (value[k], weight[k])
            for name, (value, weight) in sums.items()
            for k in range(self.ttt_steps)
        }

    @staticmethod
    def _same_text(trace: Trace, shift: int) -> jax.Array:
        """`[T]` bool: the token `shift` places before is of the same text."""
        before = jnp.roll(trace.segments, shift)
        return (before == trace.segments) & (jnp.arange(len(before)) >= shift)

    def agreement(self, params: PyTree, target_params: PyTree, trace: Trace) -> jax.Array:
        """The unroll is what drafting does while its drafts are right."""
        model = self.model(params, target_params)
        columns = []
        for k, outputs in enumerate(
            self.ttt_outputs(params, target_params, trace, self.draft_depth), start=1
        ):
            drafted = likeliest(model.head, outputs)
            if self.vocabulary is not None:
                drafted = self.vocabulary.tokens(drafted)
            # Made at the anchor's index − 1, of the token k places behind the anchor.
            made = jnp.roll(drafted, 1) == jnp.roll(trace.tokens, -k)
            columns.append(made & self._same_text(trace, 1))
        return jnp.stack(columns, axis=1)
