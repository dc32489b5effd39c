"""First weights under which every slot looks at the anchor and what is just before it (ours).

A mask knows nothing by itself, and layers that begin at random show it all positions alike: for
100,000 tokens and more nothing is learnt but how often each token comes. Here keys of anchors and of
context rows begin with a part u that is always the same, and queries of masks with the same part. So a
score begins as cos(frequency · distance) over u's pairs, whose frequencies fall over a block's length,
and not off again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.config import ModelConfig
from specjax.models.transformer import frequencies
from specjax.types import PyTree

SCORE = 16.0  # of what is nearest: hundreds of rows with scores near 0 do not drown it
ANCHOR = 1.5  # how much more an anchor's key has of u than a context row's
RIDGE = 30.0  # of the fit in `_direction`, so that it holds for rows it has not seen


def look_back(
    block: PyTree,
    config: ModelConfig,
    block_size: int,
    context: np.ndarray,
    anchors: np.ndarray,
    mask: np.ndarray,
) -> PyTree:
    """A layer's random weights with those parts added.

    Args:
      block: params of a `Block`.
      config: of the layer.
      block_size: slots of a block.
      context: `[n, D]`, fused and normed features of some text.
      anchors: `[m, D]`, normed embeddings of some tokens.
      mask: `[D]`, the normed embedding of the mask token.
    """
    qkv = np.array(block["qkv"], np.float32)  # [D, G, queries, key, value; head_dim]
    usual = qkv[:, :, -2].std() * np.sqrt(qkv[:, 0, 0].size)  # norm of a random key
    size = 2 * usual  # so that a key is most of all u
    asks = mask / (mask @ mask)
    shown = _direction(context, anchors, mask)
    part = _near(config, block_size)
    qkv[:, :, :-2] *= 0.5  # what is random in a query shall not outweigh u
    strength = size if config.qk_norm else SCORE * config.head_dim**0.5 / size
    qkv[:, :, :-2] += strength * np.multiply.outer(asks, part)[:, None, None]
    qkv[:, :, -2] += size * np.multiply.outer(shown, part)[:, None]
    changed = block | {"qkv": jnp.asarray(qkv, block["qkv"].dtype)}
    if config.qk_norm:  # whose queries and keys have the norm √head_dim
        scale = (SCORE / config.head_dim**0.5) ** 0.5
        for name in ("query_norm", "key_norm"):
            changed[name] = jax.tree.map(lambda x: scale * x, block[name])
    return changed


def _direction(context: np.ndarray, anchors: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """`[D]`, along which context rows are about 1 long, anchors `ANCHOR` and masks 0."""
    share = (len(context) / len(anchors)) ** 0.5  # both kinds weigh the same, the mask more
    rows = np.concatenate([context, share * anchors, len(context) ** 0.5 * 4 * mask[None]])
    wanted = np.concatenate(
        [np.ones(len(context)), np.full(len(anchors), share * ANCHOR), np.zeros(1)]
    )
    square = rows.T @ rows + RIDGE * np.eye(rows.shape[1])
    return np.linalg.solve(square, rows.T @ wanted)


def _near(config: ModelConfig, block_size: int) -> np.ndarray:
    """u, `[head_dim]`: one number in the pairs that turn by half a radian to two over a block."""
    turns = block_size * frequencies(config.head_dim, config.rope_theta, config.rope_factors)
    off = np.abs(np.log2(turns))
    chosen = (off < 1) | (off == off.min())
    return np.concatenate([chosen, np.zeros_like(chosen)]) / np.sqrt(chosen.sum())
