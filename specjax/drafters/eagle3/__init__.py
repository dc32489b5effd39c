"""EAGLE-3 (Li et al. 2025): an autoregressive drafter of the target's features.

`network` is the layer, `drafter` what it keeps, drafts and learns, `checkpoint` its files.
"""

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
from specjax.drafters.vocabulary import DraftVocabulary
from specjax.models.target import Target
from specjax.models.transformer import check_taps
from specjax.trees import Tree
from specjax.types import LoadedDrafter

__all__ = ["Eagle3", "export", "from_config", "load"]

load = checkpoint.load
export = checkpoint.write


def from_config(
    target: Target,
    seed: int,
    token_counts: np.ndarray,
    *,
    model: str = "",
    taps: tuple[int, ...] | None = None,
    draft_vocab_size: int = 0,
    own_head: bool = True,
    intermediate_size: int = 0,
    qk_norm: bool = False,
    unroll: int = 7,
    step_decay: float = 0.8,
    num_draft_tokens: int = 4,
) -> LoadedDrafter:
    """A drafter to train; its head and last norm begin as the target's, the rest at random.

    Args:
      target: what it drafts for.
      seed: of random weights.
      token_counts: `[V]`, how often the target says each token in the training text.
      model: folder of a drafter to begin with; the options of the architecture are then its own.
      taps: the target's blocks whose outputs are read; EAGLE's own choice by default.
      draft_vocab_size: the most frequent tokens that can be drafted; 0 for all.
      own_head: train a copy of the target's head; False uses the target's, with its whole vocabulary.
      intermediate_size: width of the layer's MLP; 0 for the target's.
      qk_norm: norm queries and keys, as Qwen3 does.
      unroll: n, steps of training-time test.
      step_decay: weight of a step's loss over that of the step before.
      num_draft_tokens: K when it decodes.
    """
    tree, steps = Tree.chain(num_draft_tokens), {"unroll": unroll, "step_decay": step_decay}
    if model:
        loaded = load(pathlib.Path(model), target, tree)
        return dataclasses.replace(loaded, drafter=dataclasses.replace(loaded.drafter, **steps))
    taps = checkpoint.default_taps(target.config) if taps is None else tuple(taps)
    check_taps(taps, target.config)
    vocabulary = None
    if draft_vocab_size and draft_vocab_size != target.config.vocab_size:
        vocabulary = DraftVocabulary.of_counts(token_counts, draft_vocab_size)
        if not own_head:
            raise ValueError("eagle3: a draft vocabulary needs a head of its own")
    size = target.config.vocab_size if vocabulary is None else len(vocabulary)
    config = dataclasses.replace(
        target.config, num_layers=1, vocab_size=size, tie_embeddings=False, qk_norm=qk_norm,
        intermediate_size=intermediate_size or target.config.intermediate_size,
        qkv_bias=False, post_norms=False, activation="silu", query_scale=0.0, sliding_layers=(),
    )  # fmt: skip
    fresh = Eagle3Network(config, len(taps), rngs=nnx.Rngs(seed), dtype=target.dtype)
    params = nnx.to_pure_dict(nnx.state(fresh))
    head = target.params.get("head_weight", target.params["embedding"])
    params["head_weight"] = head if vocabulary is None else head[vocabulary.array]
    if not own_head:
        del params["head_weight"]
    params["final_norm"] = jax.tree.map(lambda x: x, target.params["final_norm"])
    drafter = Eagle3(config, taps, jnp.dtype(target.dtype), vocabulary, tree, **steps)
    return LoadedDrafter(drafter, params, "eagle3")
