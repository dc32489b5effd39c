"""The decoder-only transformer of a target: one sequence, one forward pass, no writes.

A forward pass over T tokens attends to [cache rows < cache_len ; its own T rows], joined in one
softmax, and returns its K/V rows instead of writing them. The caller decides which rows to keep and
writes them once (`cache.write_rows`). So nothing is rolled back after a rejection, and drafting may
read the target's cache freely.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models.cache import KVCache
from specjax.models.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """What a forward pass over T tokens returns.

    Attributes:
      hidden: `[T, D]` after the final norm: what `Transformer.head` takes.
      features: `[T, M, D]` the residual stream after each tapped block, in the order of the taps.
      rows: K/V rows of the T tokens, `[G, T, head_dim]` a layer; of all N of the scratch, if any.
    """

    hidden: jax.Array
    features: jax.Array
    rows: KVCache

    def padded_to(self, length: int) -> Output:
        """The same with zeros behind, as if the pass had run over `length` tokens."""

        def pad(x, axis):
            missing = length - x.shape[axis]
            return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])

        rows = jax.tree.map(lambda x: pad(x, 1), self.rows)
        return Output(pad(self.hidden, 0), pad(self.features, 0), rows)


class View(NamedTuple):
    """What one kind of layer sees: `cos`, `sin` `[T, 1, head_dim / 2]`, masks as in `attend`."""

    cos: jax.Array
    sin: jax.Array
    cache_mask: jax.Array
    block_mask: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Rows of the passes that draft one block, kept apart until they are committed.

    Attributes:
      rows: `[G, N, head_dim]` a layer; room for all of the block's tokens.
      positions: `[N]` int32, of the rows.
      slot: `[]` int32, where the next pass puts its rows.
    """

    rows: KVCache
    positions: jax.Array
    slot: jax.Array

    @classmethod
    def empty(cls, config: ModelConfig, size: int, dtype: jax.typing.DTypeLike) -> Scratch:
        """Room for `size` tokens."""
        rows = KVCache.zeros(config, size, dtype)
        return cls(rows, jnp.zeros(size, jnp.int32), jnp.int32(0))

    def moved(self, positions: jax.Array) -> jax.Array:
        """Positions of the rows, once a pass over tokens at `positions` has added its own."""
        return jax.lax.dynamic_update_slice(self.positions, positions, (self.slot,))

    def after(self, rows: KVCache, positions: jax.Array) -> Scratch:
        """The scratch after a pass that was given it and returned these rows."""
        return Scratch(rows, self.moved(positions), self.slot + len(positions))


ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


def causal_mask(length: int) -> jax.Array:
    """`[T, T]`: token i sees tokens 0…i of its own block."""
    return jnp.tril(jnp.ones((length, length), bool))


def frequencies(head_dim: int, theta: float, factors: tuple[float, ...]) -> np.ndarray:
    """Radians a position by which each pair turns, `[head_dim / 2]` (RoFormer, eq. 15)."""
    return theta ** -(np.arange(0, head_dim, 2) / head_dim) / np.asarray(factors or 1.0)


def rotation(
    head_dim: int, theta: float, factors: tuple[float, ...], positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the rotary angles, float32 `[T, 1, head_dim / 2]`."""
    turns = frequencies(head_dim, theta, factors).astype(np.float32)
    angles = positions[:, None, None].astype(jnp.float32) * turns
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x `[T, heads, head_dim]`, pairs (i, i + head_dim / 2) (RoFormer, eq. 34)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    cache_keys: jax.Array,
    cache_values: jax.Array,
    cache_mask: jax.Array,
    block_mask: jax.Array,
    scale: float,
) -> jax.Array:
    """Grouped-query attention over cache and block, joined in one softmax without a copy of either.

    Args:
      queries: `[T, G, n, d]`, n query heads a group.
      keys, values: `[G, N, d]`, the block's own rows (N ≥ T: with rows of earlier passes).
      cache_keys, cache_values: `[G, S, d]`.
      cache_mask: `[T, S]` bool; what is hidden may hold any finite values.
      block_mask: `[T, N]` bool; every token sees itself, which keeps the softmax defined.
      scale: of the scores.

    Returns:
      `[T, G, n, d]`.
    """
    length, groups, per_group, size = queries.shape
    queries = queries.transpose(1, 2, 0, 3).reshape(groups, -1, size)

    def product(left, right, axis):
        # Spelled out, because einsum would put the long operand first and transpose its result.
        contract = (((2,), (axis,)), ((0,), (0,)))
        return jax.lax.dot_general(left, right, contract, preferred_element_type=jnp.float32)

    def scores(rows, mask):
        mask = jnp.tile(mask, (per_group, 1)) if len(mask) > 1 else mask
        return jnp.where(mask, scale * product(queries, rows, 2), -jnp.inf)

    # 0 · NaN is NaN: a row of the block that is not finite must not reach who does not see it, and
    # must reach who does.
    sound = jnp.isfinite(values).all(-1)
    values = jnp.where(sound[..., None], values, 0)
    past, block = scores(cache_keys, cache_mask), scores(keys, block_mask)
    block = jnp.where(sound[:, None] | (block == -jnp.inf), block, jnp.nan)
    peak = jnp.maximum(block.max(-1), past.max(-1))[..., None]
    past, block = jnp.exp(past - peak), jnp.exp(block - peak)
    total = past.sum(-1) + block.sum(-1)
    mixed = product(past.astype(values.dtype), cache_values, 1)
    mixed += product(block.astype(values.dtype), values, 1)
    mixed = (mixed / total[..., None]).reshape(groups, per_group, length, size)
    return mixed.transpose(2, 0, 1, 3).astype(keys.dtype)


class RMSNorm(nnx.Module):
    """Scales to unit root mean square, in float32 (Zhang & Sennrich 2019, eq. 4).

    The scale `[size]` is float32 whatever the model's type. Gemma multiplies by it before the
    result is rounded to the type of x (`round_last`), the other families after, with both rounded.
    """

    def __init__(self, size: int, config: ModelConfig):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps, self.round_last = config.rms_norm_eps, config.post_norms

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[…, size]` → the same, in the type of x."""
        wide = x.astype(jnp.float32)
        unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        scale = self.scale[...]
        if self.round_last:
            return (unit * scale).astype(x.dtype)
        return unit.astype(x.dtype) * scale.astype(x.dtype)


class Block(nnx.Module):
    """Pre-norm attention and gated MLP. Projections that read the same input are one weight.

    `project` and `finish` are what lies before and after the attention itself, for drafters whose
    attention is another; `qkv_inputs` hidden states side by side are what theirs reads.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        *,
        qkv_inputs: int = 1,
    ):
        groups, per_group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        depth, width, head = config.hidden_size, config.intermediate_size, config.head_dim

        def weight(*shape):
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))

        def norm(size):
            return RMSNorm(size, config)

        self.config = config
        self.attention_norm = norm(depth)
        self.qkv = weight(qkv_inputs * depth, groups, per_group + 2, head)
        self.attention_out = weight(groups, per_group, head, depth)
        self.mlp_norm = norm(depth)
        self.gate_up = weight(depth, 2, width)
        self.down = weight(width, depth)
        if config.qkv_bias:
            self.qkv_bias = nnx.Param(jnp.zeros((groups, per_group + 2, head), dtype))
        if config.qk_norm:
            self.query_norm, self.key_norm = norm(head), norm(head)
        if config.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(depth), norm(depth)

    def __call__(
        self,
        x: jax.Array,
        view: View,
        cache: tuple[jax.Array, jax.Array],
        past: tuple[jax.Array, jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One block.

        Args:
          x: `[T, D]`.
          view: the rotation and the masks of this kind of layer.
          cache: this layer's K and V, `[G, S, head_dim]`.
          past: this layer's K and V of the scratch, `[G, N, head_dim]`, and its slot; or None.

        Returns:
          `[T, D]`, and the rows K and V `[G, N, head_dim]`, those of the scratch included.
        """
        mixed, keys, values = self.attention(self.attention_norm(x), view, cache, past)
        return self.finish(x, mixed), keys, values

    def attention(
        self,
        inputs: jax.Array,
        view: View,
        cache: tuple[jax.Array, jax.Array],
        past: tuple[jax.Array, jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Attention alone, of normed inputs: `[T, G, n, head_dim]`, and the rows as in `__call__`."""
        queries, keys, values = self.project(inputs, view.cos, view.sin)
        if past is not None:
            past_keys, past_values, slot = past
            keys = jax.lax.dynamic_update_slice(past_keys, keys, (0, slot, 0))
            values = jax.lax.dynamic_update_slice(past_values, values, (0, slot, 0))
        masks = view.cache_mask, view.block_mask
        return attend(queries, keys, values, *cache, *masks, self.scale), keys, values

    @property
    def scale(self) -> float:
        """Of the attention scores."""
        return self.config.query_scale or self.config.head_dim**-0.5

    def project(
        self, inputs: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries `[T, G, n, head_dim]`, rotated keys and values `[G, T, head_dim]`."""
        fused = self._fused(inputs, slice(None))
        queries = fused[:, :, :-2]
        if self.config.qk_norm:
            queries = self.query_norm(queries)
        queries = rotate(queries, cos[:, None], sin[:, None])
        return queries, *self._rows(fused, cos, sin)

    def keys_values(
        self, inputs: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Rotated keys and values alone, `[G, T, head_dim]`, of tokens that ask nothing."""
        return self._rows(self._fused(inputs, slice(-2, None)), cos, sin)

    def _fused(self, inputs: jax.Array, parts: slice) -> jax.Array:
        """Some of the queries, the key and the value of each group, `[T, G, parts, head_dim]`."""
        fused = jnp.einsum("td,dgch->tgch", inputs, self.qkv[...][:, :, parts])
        return fused + self.qkv_bias[...][:, parts] if self.config.qkv_bias else fused

    def _rows(self, fused: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple:
        keys, values = fused[:, :, -2], fused[:, :, -1]
        if self.config.qk_norm:
            keys = self.key_norm(keys)
        return rotate(keys, cos, sin).swapaxes(0, 1), values.swapaxes(0, 1)

    def finish(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """The stream `[T, D]` with attention's output, `[T, G, n, head_dim]`, and the MLP's."""
        # Flattened, because einsum over three axes would transpose the weight in every step.
        mixed = mixed.reshape(len(x), -1) @ self.attention_out[...].reshape(-1, x.shape[-1])
        x = x + (self.attention_post_norm(mixed) if self.config.post_norms else mixed)
        gate_up = jnp.einsum("td,dcf->tcf", self.mlp_norm(x), self.gate_up[...])
        inner = ACTIVATIONS[self.config.activation](gate_up[:, 0]) * gate_up[:, 1]
        mixed = inner @ self.down[...]
        return x + (self.mlp_post_norm(mixed) if self.config.post_norms else mixed)


class Transformer(nnx.Module):
    """A target: `embed`, the blocks, `head`, each callable apart."""

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike = jnp.float32
    ):
        shape = (config.vocab_size, config.hidden_size)
        self.config = config
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))
        self.blocks = nnx.List([Block(config, dtype, rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden_size, config)
        if not config.tie_embeddings:
            self.head_weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """`[T]` ids → `[T, D]`. Ids outside the vocabulary are clamped: invalid slots hold any."""
        return embed(self.embedding[...], tokens, self.config.embedding_scale)

    def head(self, hidden: jax.Array) -> jax.Array:
        """`[T, D]` after the final norm → float32 logits `[T, V]`."""
        weight = self.embedding if self.config.tie_embeddings else self.head_weight
        return project_to_vocabulary(hidden, weight[...])

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        cache_len: jax.Array,
        block_mask: jax.Array,
        taps: tuple[int, ...] = (),
        *,
        scratch: Scratch | None = None,
        depth: int | None = None,
        remat: bool = False,
    ) -> Output:
        """One forward pass of one sequence.

        Args:
          tokens, positions: `[T]` int32.
          cache: rows of the tokens before; read, not written.
          cache_len: `[]` int32, rows of the cache that are valid.
          block_mask: `[T, N]` bool, what each token sees of the block; N = T without a scratch.
          taps: ids of the blocks whose outputs are wanted, 0-based (Hugging Face's
            `hidden_states[id + 1]`).
          scratch: rows of earlier passes that are not in the cache.
          depth: run the first `depth` blocks only; all by default.
          remat: keep only the blocks' inputs for a backward pass.
        """
        blocks = self.blocks[: depth or self.config.num_layers]
        size = cache.k[0].shape[1]
        kinds = views(self.config, positions, size, cache_len, block_mask, scratch)
        x = self.embed(tokens)
        outputs, keys, values = {}, [], []
        for i, block in enumerate(blocks):
            view = kinds[bool(self.config.sliding_layers) and self.config.sliding_layers[i]]
            past = None if scratch is None else (scratch.rows.k[i], scratch.rows.v[i], scratch.slot)
            run = jax.checkpoint(block.__call__) if remat else block
            x, k, v = run(x, view, (cache.k[i], cache.v[i]), past)
            keys.append(k)
            values.append(v)
            if i in taps:
                outputs[i] = x
        features = [outputs[tap] for tap in taps]
        return Output(
            hidden=self.final_norm(x),
            features=jnp.stack(features, axis=1)
            if taps
            else jnp.zeros((len(x), 0, x.shape[1]), x.dtype),
            rows=KVCache(k=tuple(keys), v=tuple(values)),
        )


def views(
    config: ModelConfig,
    positions: jax.Array,
    size: int,
    cache_len: jax.Array,
    block_mask: jax.Array,
    scratch: Scratch | None,
) -> dict[bool, View]:
    """Rotation and masks of the global layers (False) and of the sliding ones (True).

    `size` is that of the cache; the other arguments are those of `Transformer.__call__`.
    """
    cached = jnp.arange(size)
    cache_mask = (cached < cache_len)[None]
    turn = rotation(config.head_dim, config.rope_theta, config.rope_factors, positions)
    kinds = {False: View(*turn, cache_mask, block_mask)}
    if any(config.sliding_layers):
        rows = positions if scratch is None else scratch.moved(positions)

        def near(others):
            return positions[:, None] - others < config.sliding_window

        turn = rotation(config.head_dim, config.sliding_rope_theta, (), positions)
        kinds[True] = View(*turn, cache_mask & near(cached), block_mask & near(rows))
    return kinds


def embed(table: jax.Array, tokens: jax.Array, scale: float) -> jax.Array:
    """`Transformer.embed` from the table `[V, D]` alone."""
    rows = table[jnp.clip(tokens, 0, len(table) - 1)]
    # Rounded to the weights' type first, as the released Gemma models were trained.
    return rows * jnp.asarray(scale, rows.dtype)


def logits_of(params: Any, hidden: jax.Array) -> jax.Array:
    """`Transformer.head` from the params alone: `[…, D]` → float32 `[…, V]`."""
    return project_to_vocabulary(hidden, head_of(params))


def head_of(params: Any) -> jax.Array:
    """The head's weight `[V, D]`, the embedding where they are tied."""
    return params["head_weight"] if "head_weight" in params else params["embedding"]


def project_to_vocabulary(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """`[…, D]` × `[V, D]` → float32 `[…, V]`.

    `reduce_precision` to float32 changes nothing, but keeps XLA:CPU from fusing the product with a
    reduction over the vocabulary, which takes three times as long as one after the other.
    """
    logits = jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)
    return jax.lax.reduce_precision(logits, exponent_bits=8, mantissa_bits=23)


def read_text(
    model: Transformer,
    tokens: jax.Array,
    positions: jax.Array,
    segments: jax.Array,
    taps: tuple[int, ...] = (),
    *,
    remat: bool = False,
) -> Output:
    """One pass over a row of whole texts, each of which sees only itself.

    Args:
      model: a target or a drafting model.
      tokens, positions, segments: `[T]`, as in `specjax.types.Trace`.
      taps: as in `Transformer.__call__`.
      remat: for a pass that is differentiated: keep only the blocks' inputs.
    """
    nothing = KVCache.zeros(model.config, 1, model.embedding[...].dtype)
    mask = causal_mask(len(tokens)) & (segments[:, None] == segments)
    return model(tokens, positions, nothing, jnp.int32(0), mask, taps, remat=remat)


def check_taps(taps: tuple[int, ...], config: ModelConfig) -> None:
    """Raises ValueError where a tap names a block that the target does not have."""
    wrong = [tap for tap in taps if not 0 <= tap < config.num_layers]
    if wrong:
        raise ValueError(f"taps {wrong} name no block: the target has 0…{config.num_layers - 1}")
