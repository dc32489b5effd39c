"""The decoder-only transformer of a target: one sequence, one forward pass, no writes.

A forward pass over T tokens attends to [cache rows < cache_len ; its own T rows], joined in one
softmax, and returns its K/V rows instead of writing them. The caller decides which rows to keep and
writes them once (`cache.write_rows`). So nothing is rolled back after a rejection, and drafting may
read the target's cache freely.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
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
      rows: K/V rows of the T tokens, `[G, T, head_dim]` a layer.
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


def causal_mask(length: int) -> jax.Array:
    """`[T, T]`: token i sees tokens 0…i of its own block."""
    return jnp.tril(jnp.ones((length, length), bool))


def rotation(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the rotary angles, float32 `[T, 1, head_dim / 2]`."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_factors:
        frequencies = frequencies / jnp.asarray(config.rope_factors, jnp.float32)
    angles = positions[:, None, None].astype(jnp.float32) * frequencies
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
    cache_len: jax.Array,
    block_mask: jax.Array,
) -> jax.Array:
    """Grouped-query attention over cache and block, joined in one softmax without a copy of either.

    Args:
      queries: `[T, G, n, d]`, n query heads a group.
      keys, values: `[G, T, d]`, the block's own rows.
      cache_keys, cache_values: `[G, S, d]`.
      cache_len: `[]` int32; rows at or after it are hidden, whatever finite values they hold.
      block_mask: `[T, T]` bool; every token sees itself, which keeps the softmax defined.

    Returns:
      `[T, G, n, d]`.
    """
    length, groups, per_group, size = queries.shape
    queries = (queries * size**-0.5).transpose(1, 2, 0, 3).reshape(groups, -1, size)

    def product(left, right, axis):
        # Spelled out, because einsum would put the long operand first and transpose its result.
        contract = (((2,), (axis,)), ((0,), (0,)))
        return jax.lax.dot_general(left, right, contract, preferred_element_type=jnp.float32)

    visible = jnp.arange(cache_keys.shape[1]) < cache_len
    past = jnp.where(visible, product(queries, cache_keys, 2), -jnp.inf)
    block = jnp.where(jnp.tile(block_mask, (per_group, 1)), product(queries, keys, 2), -jnp.inf)
    peak = jnp.maximum(block.max(-1), past.max(-1))[..., None]
    past, block = jnp.exp(past - peak), jnp.exp(block - peak)
    total = past.sum(-1) + block.sum(-1)
    mixed = product(past.astype(values.dtype), cache_values, 1)
    mixed += product(block.astype(values.dtype), values, 1)
    mixed = (mixed / total[..., None]).reshape(groups, per_group, length, size)
    return mixed.transpose(2, 0, 1, 3).astype(keys.dtype)


class RMSNorm(nnx.Module):
    """Scales to unit root mean square, in float32 (Zhang & Sennrich 2019, eq. 4)."""

    def __init__(self, size: int, eps: float, dtype: jax.typing.DTypeLike):
        self.scale = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[…, size]` → the same."""
        wide = x.astype(jnp.float32)
        unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        return unit.astype(x.dtype) * self.scale[...]


class Block(nnx.Module):
    """Pre-norm attention and gated MLP. Projections that read the same input are one weight."""

    def __init__(self, config: ModelConfig, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        groups, per_group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        depth, width, head = config.hidden_size, config.intermediate_size, config.head_dim

        def weight(*shape):
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))

        self.attention_norm = RMSNorm(depth, config.rms_norm_eps, dtype)
        self.qkv = weight(depth, groups, per_group + 2, head)
        self.attention_out = weight(groups, per_group, head, depth)
        self.mlp_norm = RMSNorm(depth, config.rms_norm_eps, dtype)
        self.gate_up = weight(depth, 2, width)
        self.down = weight(width, depth)

    def __call__(
        self,
        x: jax.Array,
        turn: tuple[jax.Array, jax.Array],
        cache_keys: jax.Array,
        cache_values: jax.Array,
        cache_len: jax.Array,
        block_mask: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`[T, D]` → `[T, D]`, and the block's K and V rows `[G, T, head_dim]`."""
        fused = jnp.einsum("td,dgch->tgch", self.attention_norm(x), self.qkv[...])
        queries, keys, values = fused[:, :, :-2], fused[:, :, -2], fused[:, :, -1]
        cos, sin = turn
        queries = rotate(queries, cos[:, None], sin[:, None])
        keys = rotate(keys, cos, sin).swapaxes(0, 1)
        values = values.swapaxes(0, 1)
        mixed = attend(queries, keys, values, cache_keys, cache_values, cache_len, block_mask)
        # Flattened, because einsum over three axes would transpose the weight in every step.
        width = x.shape[-1]
        x = x + mixed.reshape(len(x), -1) @ self.attention_out[...].reshape(-1, width)
        gate_up = jnp.einsum("td,dcf->tcf", self.mlp_norm(x), self.gate_up[...])
        x = x + (jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1]) @ self.down[...]
        return x, keys, values


class Transformer(nnx.Module):
    """A target: `embed`, the blocks, `head`, each callable apart."""

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike = jnp.float32
    ):
        shape = (config.vocab_size, config.hidden_size)
        self.config = config
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))
        self.blocks = nnx.List([Block(config, dtype, rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if not config.tie_embeddings:
            self.head_weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """`[T]` ids → `[T, D]`. Ids outside the vocabulary are clamped: invalid slots hold any."""
        return self.embedding[...][jnp.clip(tokens, 0, self.config.vocab_size - 1)]

    def head(self, hidden: jax.Array) -> jax.Array:
        """`[T, D]` after the final norm → float32 logits `[T, V]`."""
        weight = self.embedding if self.config.tie_embeddings else self.head_weight
        return jnp.einsum("td,vd->tv", hidden, weight[...], preferred_element_type=jnp.float32)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        cache_len: jax.Array,
        block_mask: jax.Array,
        taps: tuple[int, ...] = (),
    ) -> Output:
        """One forward pass of one sequence.

        Args:
          tokens, positions: `[T]` int32.
          cache: rows of the tokens before; read, not written.
          cache_len: `[]` int32, rows of the cache that are valid.
          block_mask: `[T, T]` bool, what each token sees of the block.
          taps: ids of the blocks whose outputs are wanted, 0-based (Hugging Face's
            `hidden_states[id + 1]`).
        """
        turn = rotation(self.config, positions)
        x = self.embed(tokens)
        outputs, keys, values = {}, [], []
        for i, block in enumerate(self.blocks):
            x, k, v = block(x, turn, cache.k[i], cache.v[i], cache_len, block_mask)
            keys.append(k)
            values.append(v)
            if i in taps:
                outputs[i] = x
        features = [outputs[tap] for tap in taps]
        return Output(
            hidden=self.final_norm(x),
            features=jnp.stack(features, axis=1) if taps else jnp.zeros((len(x), 0, x.shape[1])),
            rows=KVCache(k=tuple(keys), v=tuple(values)),
        )


def check_taps(taps: tuple[int, ...], config: ModelConfig) -> None:
    """Raises ValueError where a tap names a block that the target does not have."""
    wrong = [tap for tap in taps if not 0 <= tap < config.num_layers]
    if wrong:
        raise ValueError(f"taps {wrong} name no block: the target has 0…{config.num_layers - 1}")
