"""DFlash's trunk: layers that attend to [target features ; block], in one pass for the whole block.

Every committed position j gives a context row H_j = norm(W_fc · [f_low ; …]). Each layer makes keys
and values of it with its own weights, without any query, norm or MLP; they are made once and kept.
The block [anchor, mask, mask, …] attends to them and to itself, in both directions (DFlash, Chen et
al. 2026, §4):

```
            context 0 … a − 1      block a … a + B − 1
slot k  ──► ████████████████████   ████████████████      position a + k
```

In released checkpoints `fuse` is called `fc`, `fused_norm` `hidden_norm`, `final_norm` `norm`.
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
from specjax.models.transformer import Block, RMSNorm, View, rotation


class DFlashNetwork(nnx.Module):
    """Fusion of the taps, the layers, the last norm. Embedding and head are the target's."""

    def __init__(
        self,
        config: ModelConfig,
        num_taps: int,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        depth = config.hidden_size
        self.config = config
        self.fuse = Fusion(config, num_taps, rngs, dtype)
        self.fused_norm = RMSNorm(depth, config)
        self.blocks = nnx.List([Block(config, dtype, rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(depth, config)

    def context_rows(self, features: jax.Array, positions: jax.Array) -> tuple[KVCache, jax.Array]:
        """Keys and values of committed positions: features `[T, M, D]` → rows, and H `[T, D]`."""
        context = self.fused_norm(self.fuse(features))
        turns = self._rotations(positions)
        pairs = [
            block.keys_values(context, *turns[slides])
            for block, slides in zip(self.blocks, self._slides, strict=True)
        ]
        keys, values = zip(*pairs, strict=True)
        return KVCache(k=keys, v=values), context

    def __call__(
        self,
        embedded: jax.Array,
        positions: jax.Array,
        context: KVCache,
        context_positions: jax.Array,
        context_mask: jax.Array,
        block_mask: jax.Array,
        *,
        causal_windows: bool = True,
        remat: bool = False,
    ) -> jax.Array:
        """One pass over the tokens of one block, or of several side by side.

        Args:
          embedded: `[T, D]`.
          positions: `[T]` int32.
          context: rows, of S positions.
          context_positions: `[S]` int32.
          context_mask: `[T, S]` or `[1, S]` bool.
          block_mask: `[T, T]` bool, what belongs to the same block.
          causal_windows: sliding layers also hide what lies ahead in the block.
          remat: keep only the layers' inputs for a backward pass.

        Returns:
          `[T, D]`, after the last norm.
        """
        turns, window = self._rotations(positions), self.config.sliding_window
        kinds = {False: View(*turns[False], context_mask, block_mask)}
        if True in turns:
            distance = positions[:, None] - positions
            near = (distance < window) & ((distance >= 0) | (not causal_windows))
            reach = positions[:, None] - context_positions < window
            kinds[True] = View(*turns[True], context_mask & reach, block_mask & near)
        x = embedded
        rows = zip(context.k, context.v, strict=True)
        for block, slides, cache in zip(self.blocks, self._slides, rows, strict=True):
            run = jax.checkpoint(block.__call__) if remat else block
            x, _, _ = run(x, kinds[slides], cache, None)
        return self.final_norm(x)

    @property
    def _slides(self) -> tuple[bool, ...]:
        return self.config.sliding_layers or (False,) * self.config.num_layers

    def _rotations(self, positions: jax.Array) -> dict[bool, tuple[jax.Array, jax.Array]]:
        """Of each kind of layer that there is, and of the global kind."""
        config = self.config
        turn = rotation(config.head_dim, config.rope_theta, config.rope_factors, positions)
        return dict.fromkeys({False, *self._slides}, turn)


@functools.cache
def graphdef(config: ModelConfig, num_taps: int) -> Any:
    """The static half of a network, as `nnx.merge` takes it."""
    build = functools.partial(DFlashNetwork, config, num_taps)
    return nnx.graphdef(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))
