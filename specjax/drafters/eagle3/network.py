"""EAGLE-3's network: taps fused to one state, one layer on [embedding ; state], its own head.

With g the fused features, e the embedding and u what stands for the features (g where the target has
made them, the layer's own output a where it has not), at index i (Li et al. 2025, §3.1):

```
g_i = W_fc [f_low ; f_mid ; f_high]
z_i = [norm(e(x_{i+1})) ; norm(u_i)]          what q, k and v are made of
a_i = r_i + attention(z)_i, then + MLP        r = u, or norm(u) with `norm_before_residual`
logits of x_{i+2} = W_head · norm(a_i)
u_{i+1} = a_i                                 where the target has not been
```

In released checkpoints `fuse` is called `fc`, `layer` `midlayer`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.drafters.fusion import Fusion
from specjax.models.cache import KVCache
from specjax.models.config import ModelConfig
from specjax.models.transformer import (
    Block,
    RMSNorm,
    Scratch,
    project_to_vocabulary,
    rotation,
    views,
)


class FeatureBlock(Block):
    """A block whose attention reads embedding and state side by side, and whose stream is the state.

    `attention_norm` is that of the embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        norm_before_residual: bool,
    ):
        super().__init__(config, dtype, rngs, qkv_inputs=2)
        self.hidden_norm = RMSNorm(config.hidden_size, config)
        self.norm_before_residual = norm_before_residual

    def read(self, embedded: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What attention reads, `[T, 2D]`, and the stream that it is added to, `[T, D]`."""
        normed = self.hidden_norm(hidden)
        inputs = jnp.concatenate([self.attention_norm(embedded), normed], axis=-1)
        return inputs, normed if self.norm_before_residual else hidden


class Eagle3Network(nnx.Module):
    """Fusion, layer and head. `config` is of the layer, its `vocab_size` that of the draft."""

    def __init__(
        self,
        config: ModelConfig,
        num_taps: int,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
        norm_before_residual: bool = False,
    ):
        depth = config.hidden_size

        def weight(*shape):
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype))

        self.config = config
        self.fuse = Fusion(config, num_taps, rngs, dtype)
        self.layer = FeatureBlock(config, dtype, rngs, norm_before_residual)
        self.final_norm = RMSNorm(depth, config)
        self.head_weight = weight(config.vocab_size, depth)

    def head(self, hidden: jax.Array) -> jax.Array:
        """Outputs of the layer `[…, D]` → float32 logits `[…, V_d]`."""
        return project_to_vocabulary(self.final_norm(hidden), self.head_weight[...])

    def __call__(
        self,
        embedded: jax.Array,
        hidden: jax.Array,
        positions: jax.Array,
        cache: KVCache,
        cache_len: jax.Array,
        block_mask: jax.Array,
        scratch: Scratch | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """The layer over T tokens, as in decoding.

        Args:
          embedded: `[T, D]`, of the token after each position.
          hidden: `[T, D]`, states.
          positions: `[T]` int32.
          cache, cache_len, block_mask, scratch: as in `Transformer.__call__`, of this one layer.

        Returns:
          `[T, D]`, and the rows as in `models.transformer.Output`.
        """
        inputs, stream = self.layer.read(embedded, hidden)
        size = cache.k[0].shape[1]
        view = views(self.config, positions, size, cache_len, block_mask, scratch)[False]
        past = None if scratch is None else (scratch.rows.k[0], scratch.rows.v[0], scratch.slot)
        mixed, keys, values = self.layer.attention(inputs, view, (cache.k[0], cache.v[0]), past)
        return self.layer.finish(stream, mixed), KVCache(k=(keys,), v=(values,))

    def ttt_step(
        self,
        embedded: jax.Array,
        hidden: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        earlier: tuple[tuple[jax.Array, jax.Array], ...],
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """A step of training-time test: every position at once drafts one token further.

        Step s stands at position i + s. It sees the true states up to i, as step 0 made their rows,
        and of each later step the one row of its own index i.

        Args:
          embedded, hidden, positions: `[T, …]`, of this step.
          mask: `[T, T]` bool, what each index sees of step 0.
          earlier: keys and values `[G, T, head_dim]` of the steps before.

        Returns:
          `[T, D]`, and this step's keys and values.
        """
        inputs, stream = self.layer.read(embedded, hidden)
        config = self.config
        turn = rotation(config.head_dim, config.rope_theta, config.rope_factors, positions)
        queries, *own = self.layer.project(inputs, *turn)
        steps = (*earlier, tuple(own))
        mixed = attend_unrolled(queries, steps, mask, self.layer.scale)
        return self.layer.finish(stream, mixed), steps[-1]


QUERIES = 512  # of a block of attention in training


def attend_unrolled(
    queries: jax.Array,
    steps: tuple[tuple[jax.Array, jax.Array], ...],
    mask: jax.Array,
    scale: float,
) -> jax.Array:
    """Attention to step 0 under a mask and to each later step on the diagonal, in one softmax.

    Args:
      queries: `[T, G, n, d]`, of the last step.
      steps: keys and values `[G, T, d]` of each step.
      mask: `[T, T]` bool for step 0; every index sees something.
      scale: of the scores.

    Returns:
      `[T, G, n, d]`.
    """
    length = len(mask)
    if length > QUERIES and length % QUERIES == 0:
        return _in_blocks(queries, steps, mask, scale)
    return _attend_unrolled(queries, steps, mask, scale)


def _in_blocks(queries, steps, mask, scale):
    """`QUERIES` at a time, computed again in the backward pass: `[heads, T, T]` is never there."""
    first, *later = steps
    count = len(mask) // QUERIES

    def fold(x: jax.Array, axis: int = 0) -> jax.Array:
        x = jnp.moveaxis(x, axis, 0)
        return x.reshape(count, QUERIES, *x.shape[1:])

    @jax.checkpoint
    def one(block):
        queries, mask, rows = block
        rows = [(k.swapaxes(0, 1), v.swapaxes(0, 1)) for k, v in rows]
        return _attend_unrolled(queries, (first, *rows), mask, scale)

    rows = [(fold(k, 1), fold(v, 1)) for k, v in later]
    mixed = jax.lax.map(one, (fold(queries), fold(mask), rows))
    return mixed.reshape(queries.shape)


def _attend_unrolled(queries, steps, mask, scale):
    (keys, values), *later = steps
    float32 = {"preferred_element_type": jnp.float32}
    scores = [jnp.where(mask, jnp.einsum("tgnd,gsd->gnts", queries, keys, **float32), -jnp.inf)]
    scores += [jnp.einsum("tgnd,gtd->gnt", queries, k, **float32)[..., None] for k, _ in later]
    weights = jax.nn.softmax(scale * jnp.concatenate(scores, axis=-1)).astype(values.dtype)
    length = mask.shape[1]
    mixed = jnp.einsum("gnts,gsd->tgnd", weights[..., :length], values, **float32)
    for i, (_, v) in enumerate(later):
        mixed += jnp.einsum("gnt,gtd->tgnd", weights[..., length + i], v, **float32)
    return mixed.astype(queries.dtype)


@functools.cache
def graphdef(config: ModelConfig, num_taps: int, norm_before_residual: bool) -> Any:
    """The static half of a network, as `nnx.merge` takes it."""
    build = functools.partial(
        Eagle3Network, config, num_taps, norm_before_residual=norm_before_residual
    )
    return nnx.graphdef(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))
