"""A DSpark drafter to train."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
from flax import nnx

from specjax.drafters.dflash.create import (
    check_mask_token,
    first_layers,
    first_params,
    loss_vocabulary,
)
from specjax.drafters.dspark.checkpoint import load
from specjax.drafters.dspark.drafter import DSpark, new_confidence, new_markov
from specjax.models.target import Target
from specjax.types import LoadedDrafter


def from_config(
    target: Target,
    seed: int,
    token_counts: np.ndarray,
    *,
    model: str = "",
    mask_token: int = -1,
    num_layers: int = 5,
    block_size: int = 7,
    taps: tuple[int, ...] = (),
    num_taps: int = 5,
    intermediate_size: int = 0,
    qk_norm: bool = True,
    num_draft_tokens: int = 0,
    num_anchors: int = 512,
    decay: float = 4.0,
    random_anchors: bool = True,
    strict_anchors: bool = False,
    loss_vocab_size: int = 0,
    markov_rank: int = 256,
    markov_head: str = "vanilla",
    confidence: float = 1.0,
    confidence_with_markov: bool = True,
    detach_confidence: bool = False,
) -> LoadedDrafter:
    """The trunk as DFlash's, the heads near zero; the arguments are those of both drafters."""
    training = {
        "num_anchors": num_anchors, "decay": decay, "random_anchors": random_anchors,
        "strict_anchors": strict_anchors, "detach_confidence": detach_confidence,
        "loss_vocabulary": loss_vocabulary(loss_vocab_size, token_counts),
    }  # fmt: skip
    if model:
        loaded = load(pathlib.Path(model), target, num_draft_tokens or None)
        training["confidence_temperatures"] = ()  # were fitted to a head that now changes
        if loaded.drafter.confidence:
            training["confidence"] = confidence
        return dataclasses.replace(loaded, drafter=dataclasses.replace(loaded.drafter, **training))
    layers = first_layers(target, num_layers, taps, num_taps, intermediate_size, qk_norm)
    check_mask_token(mask_token, target, token_counts)
    drafter = DSpark(
        *layers, block_size, mask_token, num_draft_tokens or block_size - DSpark.first_slot,
        markov_rank=markov_rank, markov_head=markov_head, confidence=confidence,
        confidence_with_markov=confidence_with_markov, **training,
    )  # fmt: skip
    params = first_params(drafter, target, seed, token_counts)
    params["markov"] = nnx.to_pure_dict(nnx.state(new_markov(drafter, nnx.Rngs(seed + 1))))
    if confidence:
        params["confidence"] = nnx.to_pure_dict(
            nnx.state(new_confidence(drafter, nnx.Rngs(seed + 2)))
        )
    return LoadedDrafter(drafter, params, "dspark")
