"""Fusing the target's tapped features to one state: what drafters of features begin with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints.convert import TensorRecipe, linear_recipe
from specjax.models.config import ModelConfig
from specjax.models.target import Target
from specjax.models.transformer import read_text
from specjax.types import PyTree


class Fusion(nnx.Module):
    """Features `[T, M, D]` → states `[T, D]`, linear (`fc` in released checkpoints).

    Features differ in size by dimension, some a hundredfold and more, so that one learning rate suits
    no two of them. The weight is learnt for features over their usual size (`feature_scale`, not
    learnt, ours); on disk both are one matrix, as everywhere else.
    """

    def __init__(
        self, config: ModelConfig, num_taps: int, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike
    ):
        shape = num_taps * config.hidden_size, config.hidden_size
        noise = jax.random.normal(rngs.params(), shape, dtype)
        self.fusion = nnx.Param(shape[0] ** -0.5 * noise)
        self.feature_scale = nnx.Param(jnp.ones(shape[0], jnp.float32))

    def __call__(self, features: jax.Array) -> jax.Array:
        """All taps of each position side by side, scaled, fused."""
        flat = features.reshape(len(features), -1)
        scaled = flat * jax.lax.stop_gradient(self.feature_scale[...])
        weight = self.fusion[...]
        return scaled.astype(weight.dtype) @ weight


def sample_features(
    target: Target, taps: tuple[int, ...], token_counts: np.ndarray, seed: int
) -> jax.Array:
    """`[252, M, D]` float32: features of tokens drawn by their counts.

    The first 4 positions are left out: a text's first token has features a hundred times as large.
    """
    drawn, length = sample_tokens(token_counts, seed, 256), jnp.arange(256)

    @jax.jit
    def read(params: PyTree) -> jax.Array:
        model = nnx.merge(target.graphdef, params)
        return read_text(model, jnp.asarray(drawn), length, jnp.ones_like(length), taps).features

    return read(target.params)[4:].astype(jnp.float32)


def sample_tokens(token_counts: np.ndarray, seed: int, size: int) -> np.ndarray:
    """`[size]` tokens drawn by their counts."""
    shares = np.asarray(token_counts, np.float64) + 1e-9
    return np.random.default_rng(seed).choice(len(shares), size, p=shares / shares.sum())


def feature_scale(features: jax.Array) -> jax.Array:
    """`[M · D]` float32: one over the usual size of each feature of `[n, M, D]`."""
    size = jnp.median(jnp.abs(features), axis=0).ravel()
    return 1 / (1.48 * size + 1e-6)  # of a normal distribution, one over its deviation


def fusion_recipe(num_taps: int, depth: int) -> TensorRecipe:
    """`fc.weight`, with the scale in it."""
    return linear_recipe(("fuse", "fusion"), "fc", num_taps * depth, depth)


def folded(params: PyTree) -> PyTree:
    """Params whose scale is in the matrix, as on disk."""
    fuse = params["fuse"]
    matrix = np.asarray(fuse["fusion"])
    scaled = matrix * np.asarray(fuse["feature_scale"])[:, None].astype(matrix.dtype)
    ones = np.ones(len(matrix), np.float32)
    return params | {"fuse": {"fusion": scaled, "feature_scale": ones}}


def unfolded(params: PyTree) -> PyTree:
    """Params as `Fusion` has them, of those that were read."""
    matrix = params["fuse"]["fusion"]
    scale = jnp.ones(len(matrix), jnp.float32)
    return params | {"fuse": {"fusion": matrix, "feature_scale": scale}}
