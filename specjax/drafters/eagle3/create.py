"""An EAGLE-3 drafter to train."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.drafters.eagle3 import checkpoint
from specjax.drafters.eagle3.drafter import Eagle3
from specjax.drafters.eagle3.network import Eagle3Network
from specjax.drafters.fusion import feature_scale, sample_features
from specjax.drafters.vocabulary import DraftVocabulary
from specjax.models.config import drafting_layers
from specjax.models.target import Target
from specjax.models.transformer import check_taps, head_of
from specjax.trees import Tree
from specjax.types import LoadedDrafter


def from_config(
    target: Target,
    seed: int,
    token_counts: np.ndarray,
    *,
    model: str = "",
    taps: tuple[int, ...] = (),
    draft_vocab_size: int = 0,
    own_head: bool = True,
    intermediate_size: int = 0,
    qk_norm: bool = False,
    ttt_steps: int = 7,
    step_decay: float = 0.8,
    num_draft_tokens: int = 4,
) -> LoadedDrafter:
    """The head and last norm begin as the target's, queries as the keys, the rest at random.

    Args:
      target: what it drafts for.
      seed: of random weights.
      token_counts: `[V]`, how often the target says each token in the training text.
      model: folder of a drafter to go on with, instead of the options of a new one.
      taps: the target's blocks whose outputs are read; EAGLE's own choice by default.
      draft_vocab_size: the most frequent tokens that can be drafted; 0 for all.
      own_head: train a copy of the target's head; False uses the target's, with its whole vocabulary.
      intermediate_size: width of the layer's MLP; 0 for the target's.
      qk_norm: norm queries and keys, as Qwen3 does.
      ttt_steps: n, steps of training-time test.
      step_decay: weight of a step's loss over that of the step before.
      num_draft_tokens: K when it decodes.
    """
    tree, steps = Tree.chain(num_draft_tokens), {"ttt_steps": ttt_steps, "step_decay": step_decay}
    if model:
        if taps or draft_vocab_size or intermediate_size or qk_norm or not own_head:
            raise ValueError("eagle3: a model is given, and options of a new one")
        loaded = checkpoint.load(pathlib.Path(model), target, tree)
        return dataclasses.replace(loaded, drafter=dataclasses.replace(loaded.drafter, **steps))
    taps = tuple(taps) or checkpoint.default_taps(target.config)
    check_taps(taps, target.config)
    head, vocabulary = head_of(target.params), None
    if draft_vocab_size and draft_vocab_size != target.config.vocab_size:
        if not own_head:
            raise ValueError("eagle3: a draft vocabulary needs a head of its own")
        vocabulary = DraftVocabulary.of_counts(token_counts, draft_vocab_size, "draft_vocab_size")
        head = head[vocabulary.array]
    config = drafting_layers(
        target.config, 1, vocab_size=len(head), intermediate_size=intermediate_size, qk_norm=qk_norm
    )
    fresh = Eagle3Network(config, len(taps), rngs=nnx.Rngs(seed), dtype=target.dtype)
    params = nnx.to_pure_dict(nnx.state(fresh))
    params["layer"]["qkv"] = _looking_at_itself(params["layer"]["qkv"])
    features = sample_features(target, taps, token_counts, seed)
    params["fuse"]["feature_scale"] = feature_scale(features)
    params["final_norm"] = target.params["final_norm"]
    if own_head:
        params["head_weight"] = head
    else:
        del params["head_weight"]
    drafter = Eagle3(config, taps, jnp.dtype(target.dtype), vocabulary, tree, **steps)
    return LoadedDrafter(drafter, params, "eagle3")


def _looking_at_itself(qkv: jax.Array) -> jax.Array:
    """Random `[2D, G, n + 2, head_dim]` whose queries are those of its keys (ours).

    The embedding enters through attention only. A random layer spreads it thinly over all positions
    and takes long to find its own; like this every position finds itself from the beginning.
    """
    keys = 1.5 * qkv[:, :, -2:-1]
    queries = jnp.repeat(keys, qkv.shape[2] - 2, axis=2)
    return jnp.concatenate([queries, keys, qkv[:, :, -1:]], axis=2)
