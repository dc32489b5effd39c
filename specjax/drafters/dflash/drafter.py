"""DFlash as a drafter: what it keeps, how it drafts, what it learns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.drafters.dflash.network import DFlashNetwork, graphdef
from specjax.drafters.vocabulary import DraftVocabulary
from specjax.losses import Losses, token_losses, weighted_sums
from specjax.models.cache import KVCache, write_if_finite
from specjax.models.config import ModelConfig
from specjax.models.transformer import embed, head_of, logits_of
from specjax.noise import Noise
from specjax.sampling import Sampling, argmax, log_probs, sample
from specjax.types import Committed, Context, Draft, PyTree, Terms, Trace


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DFlashState:
    """Keys and values of the committed positions; `sound`, `[]` bool, while all were finite."""

    cache: KVCache
    sound: jax.Array


@dataclasses.dataclass(frozen=True)
class DFlash:
    """Drafts a block in one pass (DFlash, Chen et al. 2026).

    ```
    committed   t0 t1 t2 t3               features of t0 t1 t2, anchor t3 at position 3
    observe     rows of t0 t1 t2          each made once
    propose     [t3 mask mask mask]       at 3 4 5 6: slot k gives the token of position 3 + k
    ```

    Slots know nothing of what the others will say, so the law of a draft is a product, and exact.
    For text without such a product, likeliest tokens (a rule for deterministic drafts) are accepted
    more often than drawn ones.

    Attributes:
      config: of the layers; its `vocab_size` is the target's.
      taps: the target's blocks whose outputs are fused.
      dtype: of the weights.
      block_size: anchor and masks, as trained.
      mask_token: whose embedding, the target's, stands for what is not known.
      num_draft_tokens: K; more than the block has slots for was never trained.
      num_anchors: blocks a row of training text.
      decay: γ; the loss of draft k counts exp(−(k − 1) / γ), 0 for all alike.
      random_anchors: blocks begin anywhere; else each where the one before it ends.
      strict_anchors: the anchor itself must be the target's text, as published; by default only the
        token after it, since decoding begins at the prompt's last token.
      loss_vocabulary: the tokens whose logits the objective compares, all by default (ours). The head
        is the target's and has many more rows than columns, so the logits of thousands of tokens
        leave a state little freedom about the rest. α is then of both laws among these tokens.
      embedding_scale: of the target's embedding rows.
      causal_windows: sliding layers hide what lies ahead in the block.
    """

    config: ModelConfig
    taps: tuple[int, ...]
    dtype: Any
    block_size: int
    mask_token: int
    num_draft_tokens: int
    num_anchors: int = 512
    decay: float = 0.0
    random_anchors: bool = True
    strict_anchors: bool = False
    loss_vocabulary: DraftVocabulary | None = None
    embedding_scale: float = 1.0
    causal_windows: bool = True

    first_slot = 1  # the first that predicts: slot k gives the token of position anchor + k
    confident = False
    prefix_only = False  # whether a block's drafts behind a token that is not learnt count

    def __post_init__(self):
        if self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be at least 1, got {self.num_draft_tokens}")
        if self.block_size <= self.first_slot:
            raise ValueError(f"a block of {self.block_size} has no slot to draft with")
        if not 0 <= self.mask_token < self.config.vocab_size:
            raise ValueError(
                f"mask token {self.mask_token} is outside the vocabulary of {self.config.vocab_size}"
            )

    @property
    def draft_depth(self) -> int:
        """The most that can be accepted."""
        return self.num_draft_tokens

    def model(self, params: PyTree, target_params: PyTree) -> DFlashNetwork:
        """The trunk.

        Raises:
          ValueError: the target is another one.
        """
        shape = self.config.vocab_size, self.config.hidden_size
        if target_params["embedding"].shape != shape:
            raise ValueError(
                f"this drafter is of a target of {shape[0]} tokens and hidden size {shape[1]}, got "
                f"{target_params['embedding'].shape}"
            )
        static = graphdef(self.config, len(self.taps))
        return nnx.merge(static, {name: params[name] for name in params if name in TRUNK})

    def init_state(self, max_len: int) -> DFlashState:
        """Nothing observed."""
        return DFlashState(KVCache.zeros(self.config, max_len, self.dtype), jnp.array(True))

    def observe(
        self, params: PyTree, target_params: PyTree, state: DFlashState, committed: Committed
    ) -> DFlashState:
        """Makes the rows of the committed positions."""
        model = self.model(params, target_params)
        positions = committed.start + jnp.arange(len(committed.tokens))
        rows, context = model.context_rows(committed.features, positions)
        cache, finite = write_if_finite(
            state.cache, rows, context, committed.start, committed.count
        )
        return DFlashState(cache, state.sound & finite)

    prefill = observe

    def propose(
        self,
        params: PyTree,
        target_params: PyTree,
        state: DFlashState,
        context: Context,
        noise: Noise | None,
    ) -> tuple[Draft, DFlashState]:
        """Tokens of the slots' processed distributions."""
        start, width = context.length - 1, self.num_draft_tokens + self.first_slot
        slots = jnp.arange(state.cache.k[0].shape[1])
        hidden = self.model(params, target_params)(
            self._embedded(target_params, context.tokens[start][None], width)[0],
            start + jnp.arange(width),
            state.cache,
            slots,
            (slots < start)[None],
            jnp.ones((width, width), bool),
            causal_windows=self.causal_windows,
        )[self.first_slot :]
        draft = self._choose(
            params, target_params, hidden, context.tokens[start], context.sampling, noise
        )
        ready = state.sound & (context.length > 1)
        return dataclasses.replace(draft, num_valid=jnp.where(ready, draft.num_valid, 0)), state

    def _choose(
        self,
        params: PyTree,
        target_params: PyTree,
        hidden: jax.Array,
        anchor: jax.Array,
        sampling: Sampling | None,
        noise: Noise | None,
    ) -> Draft:
        """The draft from the slots' states `[K, D]`."""
        logits = logits_of(target_params, hidden)
        finite = jnp.cumprod(jnp.isfinite(logits.max(-1)).astype(jnp.int32)).sum()
        if noise is None:
            return Draft(argmax(logits), None, finite)
        slots = jnp.arange(self.num_draft_tokens)
        gumbel = jax.vmap(lambda k: noise.draft_gumbel(k, k, logits.shape[-1]))(slots)
        log_q = jax.vmap(log_probs, (0, None))(logits, sampling)
        return Draft(jax.vmap(sample)(log_q, gumbel), None if noise.coupled else log_q, finite)

    def _embedded(self, target_params: PyTree, anchors: jax.Array, width: int) -> jax.Array:
        """Blocks `[n, width, D]` of anchor tokens `[n]`, masks behind them."""
        masks = jnp.full((len(anchors), width - 1), self.mask_token, jnp.int32)
        tokens = jnp.concatenate([anchors[:, None].astype(jnp.int32), masks], axis=1)
        rows = embed(target_params["embedding"], tokens.ravel(), self.embedding_scale)
        return jax.lax.stop_gradient(rows).reshape(*tokens.shape, -1)

    def blocks_at(
        self,
        params: PyTree,
        target_params: PyTree,
        trace: Trace,
        anchors: jax.Array,
        width: int,
        *,
        remat: bool = False,
    ) -> jax.Array:
        """States of blocks that begin at given indices of a row of texts, as decoding would make them.

        A few blocks at a time, which see the context before their anchors in their own text: the mask
        of all blocks and positions is never there.

        Args:
          params, target_params: the drafter's and the target's.
          trace: the row.
          anchors: `[n]` int32.
          width: slots of a block.
          remat: compute them again in the backward pass.

        Returns:
          `[n, width, D]`.
        """
        model = self.model(params, target_params)
        context, _ = model.context_rows(trace.features, trace.positions)
        return self._blocks(model, target_params, trace, context, anchors, width, remat)

    def _blocks(
        self,
        model: DFlashNetwork,
        target_params: PyTree,
        trace: Trace,
        context: KVCache,
        anchors: jax.Array,
        width: int,
        remat: bool,
    ) -> jax.Array:
        """`blocks_at`, given the context's rows."""
        indices, slots = jnp.arange(len(trace.tokens)), jnp.arange(width)
        group = min(len(anchors), max(1, 256 // width))

        def run(anchors: jax.Array) -> jax.Array:
            embedded = self._embedded(target_params, trace.tokens[anchors], width)
            own_text = trace.segments[anchors][:, None] == trace.segments
            sees = jnp.repeat((indices < anchors[:, None]) & own_text, width, axis=0)
            positions = (trace.positions[anchors][:, None] + slots).ravel()
            number = jnp.repeat(jnp.arange(len(anchors)), width)
            hidden = model(
                embedded.reshape(-1, embedded.shape[-1]), positions, context, trace.positions,
                sees, number[:, None] == number, causal_windows=self.causal_windows, remat=remat,
            )  # fmt: skip
            return hidden.reshape(embedded.shape)

        padded = jnp.pad(anchors, (0, -len(anchors) % group)).reshape(-1, group)
        states = jax.lax.map(jax.checkpoint(run) if remat else run, padded)
        return states.reshape(-1, *states.shape[2:])[: len(anchors)]

    def anchors_of(self, trace: Trace, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where blocks begin, `[num_anchors]`, and which of them are any."""
        wanted = trace.weights > 0
        if self.strict_anchors:
            wanted &= jnp.roll(wanted, 1).at[0].set(False)
        if not self.random_anchors:
            wanted &= (jnp.cumsum(wanted) - 1) % (self.block_size - self.first_slot) == 0
        drawn = jax.random.uniform(key, wanted.shape) if self.random_anchors else 0.5
        count = min(self.num_anchors, len(wanted))
        scores, anchors = jax.lax.top_k(jnp.where(wanted, drawn, -1.0), count)
        return anchors, scores >= 0

    def terms_of(self, losses: Mapping[str, float]) -> dict[str, float]:
        """A loss is one term."""
        return dict(losses)

    def objective(
        self,
        params: PyTree,
        target_params: PyTree,
        trace: Trace,
        key: jax.Array,
        losses: Losses,
    ) -> Terms:
        """The losses of every slot, weighted by its place (§4.2), and `alpha_1`, …."""
        width = self.block_size
        drafts = jnp.arange(1, 1 + width - self.first_slot)  # k, how far behind the anchor
        anchors, any_block = self.anchors_of(trace, key)
        hidden = self.blocks_at(params, target_params, trace, anchors, width, remat=losses.remat)[
            :, self.first_slot :
        ]
        # Draft k is predicted after index anchor + k − 1.
        after = anchors[:, None] + drafts - 1
        inside = after < len(trace.tokens)
        after = jnp.minimum(after, len(trace.tokens) - 1)
        own_text = inside & (trace.segments[after] == trace.segments[anchors][:, None])
        weights = trace.weights[after] * own_text * any_block[:, None]
        if self.prefix_only:
            weights *= jnp.cumprod(weights > 0, axis=1)
        said = self.loss_vocabulary
        compared = len(said) if said else self.config.vocab_size
        one = functools.partial(self._values, *self._heads(params, target_params), losses)
        tokens = jnp.concatenate([trace.tokens, trace.tokens[:1]])
        arrays = tokens[after], tokens[after + 1], trace.hidden[after], hidden
        # As many logits at a time as 128 tokens have of the whole vocabulary.
        chunk = max(1, 128 * self.config.vocab_size // compared // len(drafts))
        sums = weighted_sums(one, weights, *arrays, chunk=chunk, remat=losses.remat)
        share = jnp.exp(-(drafts - 1) / self.decay) if self.decay else jnp.ones(len(drafts))
        terms = {}
        for name, (value, weight) in sums.items():
            if name == "alpha":
                terms |= {f"alpha_{k + 1}": (value[k], weight[k]) for k in range(len(drafts))}
            else:
                terms[name] = (share @ value, share @ weight)
        return terms

    def _values(
        self,
        params: PyTree,
        target_params: PyTree,
        losses: Losses,
        before: jax.Array,
        tokens: jax.Array,
        target_hidden: jax.Array,
        hidden: jax.Array,
    ) -> dict[str, jax.Array]:
        """The losses and α of n blocks, `[n, K]`.

        Args:
          params, target_params: as `_heads` gives them.
          losses: as in `objective`.
          before, tokens: `[n, K]`, the text's token before each draft and its own.
          target_hidden, hidden: `[n, K, D]`, the target's state before it and the slot's.
        """
        shape, depth = tokens.shape, hidden.shape[-1]
        known = True
        if self.loss_vocabulary:
            tokens, known = self.loss_vocabulary.locate(tokens)
        target_logits = jax.lax.stop_gradient(
            logits_of(target_params, target_hidden.reshape(-1, depth))
        )
        logits = self._logits(params, target_params, before, hidden)
        values = token_losses(losses.names, tokens.ravel(), target_logits, logits)
        values = {name: x.reshape(shape) for name, x in values.items()}
        if "cross_entropy" in values:
            values["cross_entropy"] = jnp.where(known, values["cross_entropy"], 0.0)
        return values

    def _heads(self, params: PyTree, target_params: PyTree) -> tuple[PyTree, PyTree]:
        """Both params with the rows of their heads that are compared in training."""
        if not self.loss_vocabulary:
            return params, target_params
        return params, {"head_weight": head_of(target_params)[self.loss_vocabulary.array]}

    def agreement(self, params: PyTree, target_params: PyTree, trace: Trace) -> jax.Array:
        """Every token of the text is an anchor once."""
        width, depth = self.num_draft_tokens + self.first_slot, self.num_draft_tokens
        indices = jnp.arange(len(trace.tokens))

        model = self.model(params, target_params)
        context, _ = model.context_rows(trace.features, trace.positions)

        def one(group: jax.Array) -> jax.Array:
            states = self._blocks(model, target_params, trace, context, group, width, False)
            after = group[:, None] + jnp.arange(depth)
            before = trace.tokens.at[after].get(mode="clip")
            return self._likeliest(params, target_params, states[:, self.first_slot :], before)

        size = max(1, 256 // width)
        padded = jnp.pad(indices, (0, -len(indices) % size)).reshape(-1, size)
        drafted = jax.lax.map(one, padded).reshape(-1, depth)[: len(indices)]
        text = trace.tokens.at[indices[:, None] + 1 + jnp.arange(depth)].get(mode="clip")
        first = trace.positions == 0  # without context nothing is drafted
        return (drafted == text) & ~first[:, None]

    def _likeliest(
        self, params: PyTree, target_params: PyTree, hidden: jax.Array, before: jax.Array
    ) -> jax.Array:
        """The likeliest tokens `[n, K]` of slots `[n, K, D]`, given the token before each."""
        logits = self._logits(params, target_params, before, hidden)
        return argmax(logits).reshape(hidden.shape[:2])

    def _logits(
        self, params: PyTree, target_params: PyTree, before: jax.Array, hidden: jax.Array
    ) -> jax.Array:
        """Logits `[n · K, V]` of slots `[n, K, D]`, given the token before each."""
        return logits_of(target_params, hidden.reshape(-1, hidden.shape[-1]))


TRUNK = ("fuse", "fused_norm", "blocks", "final_norm")
