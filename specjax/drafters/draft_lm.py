"""A second, smaller language model as drafter (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints.export import export_folder
from specjax.checkpoints.load import load_target
from specjax.drafters import autoregressive
from specjax.losses import Losses, token_losses, weighted_sums
from specjax.models.cache import KVCache, write_if_finite, write_rows
from specjax.models.config import ModelConfig
from specjax.models.sharding import EMBEDDINGS
from specjax.models.target import Target, random_target
from specjax.models.transformer import (
    Scratch,
    Transformer,
    causal_mask,
    logits_of,
    read_text,
)
from specjax.noise import Noise
from specjax.sampling import likeliest
from specjax.trees import Tree
from specjax.types import Committed, Context, Draft, LoadedDrafter, PyTree, Terms, Trace


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftLMState:
    """The drafter's own cache, valid for rows < length − 2, and the rows of the last draft.

    `sound`, `[]` bool, is False from the first prompt chunk on whose output was not finite.
    """

    cache: KVCache
    rows: KVCache
    sound: jax.Array


@dataclasses.dataclass(frozen=True)
class DraftLM(autoregressive.TreeDrafter):
    """Drafts with a model of the target's vocabulary and its own KV cache.

    The last token of a draft is never fed, so after a whole draft was accepted its row is missing.
    Therefore every draft begins with two tokens, the one before the anchor and the anchor:

    ```
    slot        0        1       2   …   K          rows kept for `observe`
    token       before   anchor  d1  …   d(K−1)
    position    n − 2    n − 1   n   …   n + K − 2
    ```

    The first slot recomputes a row that may be there already; where n = 1 there is no such token,
    and the slot is hidden. In a tree the nodes that have children follow, level by level. The pass
    over these two is taken in every cycle, also where nothing is drafted: else rows would lack.

    Nothing is drafted where the drafting model's output is not finite: for the rest of the row if
    that happened in its prompt, else in that cycle and as long as its cache holds such rows.

    Attributes:
      graphdef, config, dtype: of the drafting model; its params are the drafter's.
      tree: what is drafted; a chain is one, too.
    """

    graphdef: Any
    config: ModelConfig
    dtype: jnp.dtype
    tree: Tree
    taps: tuple[int, ...] = ()

    def model(self, params: PyTree, target_params: PyTree) -> Transformer:
        """The drafting model; the embedding and head that its params lack are the target's."""
        needed = EMBEDDINGS[:1] if self.config.tie_embeddings else EMBEDDINGS
        shared = {key: target_params[key] for key in needed if key not in params}
        return nnx.merge(self.graphdef, shared | params)

    def init_state(self, max_len: int) -> DraftLMState:
        """An empty cache."""
        sizes = max_len, autoregressive.scratch_size(self.tree, 2)
        caches = (KVCache.zeros(self.config, size, self.dtype) for size in sizes)
        return DraftLMState(*caches, jnp.array(True))

    def prefill(
        self, params: PyTree, target_params: PyTree, state: DraftLMState, chunk: Committed
    ) -> DraftLMState:
        """Runs the chunk through the drafting model."""
        model = self.model(params, target_params)
        width = len(chunk.tokens)
        positions = chunk.start + jnp.arange(width)
        out = model(chunk.tokens, positions, state.cache, chunk.start, causal_mask(width))
        cache, finite = write_if_finite(state.cache, out.rows, out.hidden, chunk.start, chunk.count)
        return dataclasses.replace(state, cache=cache, sound=state.sound & finite)

    def propose(
        self,
        params: PyTree,
        target_params: PyTree,
        state: DraftLMState,
        context: Context,
        noise: Noise | None,
    ) -> tuple[Draft, DraftLMState]:
        """Tokens of the drafting model's processed distributions."""
        model = self.model(params, target_params)
        before = context.length - 2
        cache_len = jnp.maximum(before, 0)

        def run(tokens, positions, scratch, mask):
            out = model(tokens, positions, state.cache, cache_len, mask, scratch=scratch)
            return out.hidden, scratch.after(out.rows, positions)

        def forward(tokens, positions, scratch, mask, parents):
            hidden, scratch = run(tokens, positions, scratch, mask)
            return model.head(hidden), scratch

        size = autoregressive.scratch_size(self.tree, 2)
        masked_slots = (jnp.arange(size) == 0) & (before < 0)
        hidden, scratch = run(
            context.tokens[jnp.stack([cache_len, context.length - 1])],
            before + jnp.arange(2),
            Scratch.empty(self.config, size, self.dtype),
            autoregressive.chain_mask(jnp.arange(2), masked_slots),
        )
        draft, scratch = autoregressive.draft(
            lambda scratch: (model.head(hidden[-1:])[0], scratch), scratch, forward, before + 1,
            self.tree, context, noise, first=2, vocab_size=self.config.vocab_size,
            masked_slots=masked_slots, ready=state.sound,
        )  # fmt: skip
        return draft, dataclasses.replace(state, rows=scratch.rows)

    def observe(
        self, params: PyTree, target_params: PyTree, state: DraftLMState, committed: Committed
    ) -> DraftLMState:
        """Keeps the rows of the committed tokens, as far as the draft computed them.

        Behind a draft that ended early one row more is written, of its last token, that nobody
        computed: it is the token before the next anchor, whose row is not valid yet in any case.
        """
        size = autoregressive.scratch_size(self.tree, 2)
        slots = jnp.asarray(autoregressive.slots_of(self.tree, 2))[committed.nodes]
        computed = (slots < size) & (jnp.arange(slots.shape[0]) < committed.count)
        count = jnp.where(committed.count > 0, 1 + computed.sum(), 0)
        slots = jnp.append(0, jnp.minimum(slots, size - 1))
        rows = jax.tree.map(lambda x: x[:, slots], state.rows)
        cache = write_rows(state.cache, rows, committed.start - 1, count)
        return dataclasses.replace(state, cache=cache)

    def objective(
        self,
        params: PyTree,
        target_params: PyTree,
        trace: Trace,
        key: jax.Array,
        losses: Losses,
    ) -> Terms:
        """The losses on every supervised token (DistillSpec, Zhou et al. 2023), and `alpha_1`.

        The drafting model reads the text as it does when it drafts, so that its logits there and here
        are the same.
        """
        model = self.model(params, target_params)
        where = trace.tokens, trace.positions, trace.segments
        out = read_text(model, *where, remat=losses.remat)

        def one(next_tokens, target_hidden, hidden):
            target_logits = jax.lax.stop_gradient(logits_of(target_params, target_hidden))
            return token_losses(losses.names, next_tokens, target_logits, model.head(hidden))

        next_tokens = jnp.roll(trace.tokens, -1)
        arrays = next_tokens, trace.hidden, out.hidden
        terms = weighted_sums(one, trace.weights, *arrays, remat=losses.remat)
        alpha = terms.pop("alpha")
        return {**terms, "alpha_1": alpha}

    def terms_of(self, losses: Mapping[str, float]) -> dict[str, float]:
        """A loss is one term."""
        return dict(losses)

    def agreement(self, params: PyTree, target_params: PyTree, trace: Trace) -> jax.Array:
        """Teacher-forced: in a right draft the drafting model has read the text itself."""
        model = self.model(params, target_params)
        hidden = read_text(model, trace.tokens, trace.positions, trace.segments).hidden
        right = likeliest(model.head, hidden) == jnp.roll(trace.tokens, -1)
        return jnp.stack([jnp.roll(right, -k) for k in range(self.num_draft_tokens)], axis=1)


def draft_lm(
    model: Target, target: Target, num_draft_tokens: int = 4, tree: Tree | None = None
) -> LoadedDrafter:
    """A loaded model as drafter of a target.

    An embedding or head that is the target's own array is left out of its params.

    Args:
      model: what drafts.
      target: what it drafts for.
      num_draft_tokens: K of a chain.
      tree: drafted instead of a chain.

    Raises:
      ValueError: the vocabularies differ; the message has the sizes or the first differing token.
    """
    check_same_vocabulary(model, target)
    tree = tree or Tree.chain(num_draft_tokens)
    autoregressive.check_widths(tree, target.config.vocab_size)
    drafter = DraftLM(model.graphdef, model.config, jnp.dtype(model.dtype), tree)
    params = {
        key: value
        for key, value in model.params.items()
        if key not in EMBEDDINGS or value is not target.params.get(key)
    }
    return LoadedDrafter(drafter, params, f"draft_lm:{model.name}")


def from_layers(target: Target, num_layers: int) -> Target:
    """A drafting model of some of the target's layers, to be trained: first, last, evenly spaced.

    It has the target's embedding and head; only its layers and final norm will be its own.
    """
    config = target.config
    if not 1 <= num_layers < config.num_layers:
        raise ValueError(
            f"from_layers: expected 1…{config.num_layers - 1} layers, got {num_layers}"
        )
    picked = np.linspace(0, config.num_layers - 1, num_layers).round().astype(int).tolist()
    if num_layers == 1:
        picked = [0]
    blocks = {i: target.params["blocks"][layer] for i, layer in enumerate(picked)}
    params = target.params | {"blocks": blocks}
    sliding = tuple(config.sliding_layers[layer] for layer in picked if config.sliding_layers)
    config = dataclasses.replace(config, num_layers=num_layers, sliding_layers=sliding)
    return Target(
        f"{num_layers} layers of {target.name}",
        config,
        params,
        target.tokenizer,
        target.stop_tokens,
    )


def from_config(
    target: Target,
    seed: int,
    token_counts: np.ndarray,
    *,
    model: str = "",
    num_layers: int = 0,
    scratch: bool = False,
    num_draft_tokens: int = 4,
) -> LoadedDrafter:
    """A drafter to train: `model` if it is given, else `num_layers` of the target's layers.

    Args:
      target: what it drafts for.
      seed: of random weights.
      token_counts: of the training text; it can draft every token.
      model: folder, GGUF file or hub id.
      num_layers: of the target, see `from_layers`.
      scratch: keep only the shape of those layers, with random weights.
      num_draft_tokens: K when it decodes.
    """
    if bool(model) == bool(num_layers):
        raise ValueError("draft_lm: give either model or num_layers")
    small = load_target(model, dtype=target.dtype) if model else from_layers(target, num_layers)
    if scratch:
        fresh = random_target(small.config, seed, dtype=target.dtype).params
        fresh |= {key: small.params[key] for key in EMBEDDINGS if key in small.params}
        small = dataclasses.replace(small, params=fresh)
    return draft_lm(small, target, num_draft_tokens)


def export(loaded: LoadedDrafter, target: Target, folder: pathlib.Path) -> None:
    """Writes the drafting model as a Hugging Face folder, the shared embedding included."""
    shared = {key: target.params[key] for key in EMBEDDINGS if key in target.params}
    params = shared | dict(loaded.params)
    export_folder(
        Target(loaded.name, loaded.drafter.config, params, target.tokenizer, target.stop_tokens),
        folder,
    )


def check_same_vocabulary(model: Target, target: Target) -> None:
    """Raises ValueError where two models do not share their vocabulary, token for token.

    Ids that only fill the embedding up may be absent in one tokenizer and `[PAD151665]`, as GGUF
    names them, in the other.
    """
    sizes = model.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"drafter {model.name} has {sizes[0]} tokens, target {target.name} {sizes[1]}: "
            "they must share one vocabulary"
        )
    if model.tokenizer is None or target.tokenizer is None:
        return
    names = (t.tokenizer.convert_ids_to_tokens(range(sizes[0])) for t in (model, target))
    for index, pair in enumerate(zip(*names, strict=True)):
        if len({None if name == f"[PAD{index}]" else name for name in pair}) > 1:
            one, other = ("absent" if name is None else repr(name) for name in pair)
            raise ValueError(
                f"drafter {model.name} and target {target.name} have different vocabularies: "
                f"token {index} is {one} and {other}"
            )
