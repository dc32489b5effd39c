"""A DFlash drafter to train."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.drafters.dflash.checkpoint import default_taps, load, said_tokens
from specjax.drafters.dflash.drafter import DFlash
from specjax.drafters.dflash.looking_back import look_back
from specjax.drafters.dflash.network import DFlashNetwork
from specjax.drafters.fusion import feature_scale, sample_features, sample_tokens
from specjax.drafters.vocabulary import DraftVocabulary
from specjax.models.config import ModelConfig, drafting_layers
from specjax.models.target import Target
from specjax.models.transformer import RMSNorm, check_taps
from specjax.types import LoadedDrafter


def from_config(
    target: Target,
    seed: int,
    token_counts: np.ndarray,
    *,
    model: str = "",
    mask_token: int = -1,
    num_layers: int = 5,
    block_size: int = 16,
    taps: tuple[int, ...] = (),
    num_taps: int = 5,
    intermediate_size: int = 0,
    qk_norm: bool = True,
    num_draft_tokens: int = 0,
    num_anchors: int = 512,
    decay: float = 0.0,
    random_anchors: bool = True,
    strict_anchors: bool = False,
    loss_vocab_size: int = 0,
) -> LoadedDrafter:
    """The last norm begins as a tenth of the target's, layers as `looking_back` has them.

    Args:
      target: what it drafts for.
      seed: of random weights.
      token_counts: `[V]`, how often the target says each token in the training text.
      model: folder of a drafter to go on with; only what is said of training and K then counts.
      mask_token: a token that no text has; neither a stop token nor padding.
      num_layers: of the trunk.
      block_size: anchor and masks.
      taps: the target's blocks whose outputs are read; evenly `num_taps` by default.
      num_taps: how many.
      intermediate_size: width of the layers' MLP; 0 for the target's.
      qk_norm: norm queries and keys, as Qwen3 does.
      num_draft_tokens: K when it decodes; 0 for the whole block.
      num_anchors, decay, random_anchors, strict_anchors: as in `DFlash`.
      loss_vocab_size: compare that many of the most frequent tokens in training; 0 for all.
    """
    training = {
        "num_anchors": num_anchors, "decay": decay, "random_anchors": random_anchors,
        "strict_anchors": strict_anchors,
        "loss_vocabulary": loss_vocabulary(loss_vocab_size, token_counts),
    }  # fmt: skip
    if model:
        loaded = load(pathlib.Path(model), target, num_draft_tokens or None)
        return dataclasses.replace(loaded, drafter=dataclasses.replace(loaded.drafter, **training))
    layers = first_layers(target, num_layers, taps, num_taps, intermediate_size, qk_norm)
    check_mask_token(mask_token, target, token_counts)
    drafter = DFlash(
        *layers, block_size, mask_token, num_draft_tokens or block_size - DFlash.first_slot,
        **training,
    )  # fmt: skip
    return LoadedDrafter(drafter, first_params(drafter, target, seed, token_counts), "dflash")


def first_layers(
    target: Target,
    num_layers: int,
    taps: tuple[int, ...],
    num_taps: int,
    intermediate_size: int,
    qk_norm: bool,
) -> tuple[ModelConfig, tuple[int, ...], Any]:
    """The first fields of a drafter: architecture, taps and type."""
    taps = tuple(taps) or default_taps(target.config.num_layers, num_taps)
    check_taps(taps, target.config)
    config = drafting_layers(
        target.config, num_layers, intermediate_size=intermediate_size, qk_norm=qk_norm
    )
    return config, taps, jnp.dtype(target.dtype)


def loss_vocabulary(size: int, token_counts: np.ndarray) -> DraftVocabulary | None:
    """The most frequent tokens; None for all of them."""
    return DraftVocabulary.of_counts(token_counts, size, "loss_vocab_size") if size else None


def check_mask_token(mask_token: int, target: Target, token_counts: np.ndarray) -> None:
    """Raises ValueError for a token that the target says; the message has one that it does not."""
    if not 0 <= mask_token < len(token_counts):
        raise ValueError(
            f"mask_token {mask_token} is outside the vocabulary of {len(token_counts)}"
        )
    taken = np.asarray(token_counts) > 0
    taken[sorted(said_tokens(target))] = True
    if taken[mask_token]:
        free = np.flatnonzero(~taken)
        raise ValueError(
            f"mask_token {mask_token} is a stop token, padding or part of the text: choose one that "
            f"the target never says, like {free[-1] if free.size else 'a new one'}"
        )


def first_params(
    drafter: DFlash, target: Target, seed: int, token_counts: np.ndarray
) -> dict[str, Any]:
    """The trunk's. Slots begin sure of nothing, and look back."""
    config, taps, table = drafter.config, drafter.taps, target.params["embedding"]
    fresh = DFlashNetwork(config, len(taps), rngs=nnx.Rngs(seed), dtype=drafter.dtype)
    features = sample_features(target, taps, token_counts, seed)
    fresh.fuse.feature_scale[...] = feature_scale(features)
    norm = RMSNorm(config.hidden_size, config)
    tokens = jnp.asarray(sample_tokens(token_counts, seed, 4096))
    _, context = fresh.context_rows(features, jnp.arange(len(features)))
    rows = [
        np.asarray(x, np.float32)
        for x in (context, norm(table[tokens]), norm(table[drafter.mask_token]))
    ]
    if not np.mean(rows[-1] ** 2) > 0.5:
        raise ValueError(
            f"mask_token {drafter.mask_token} has an embedding of next to nothing: choose another"
        )
    params = nnx.to_pure_dict(nnx.state(fresh))
    for number, block in params["blocks"].items():
        params["blocks"][number] = look_back(block, config, drafter.block_size, *rows)
    # At its own size a random state is as sure as a trained one, of something wrong.
    params["final_norm"] = jax.tree.map(lambda x: 0.1 * x, target.params["final_norm"])
    return params
