"""Small drafters of every kind that is trained, for tests that must hold for all of them."""

from __future__ import annotations

import numpy as np

from specjax.drafters import dflash, dspark, eagle3
from specjax.drafters.draft_lm import draft_lm, from_layers
from specjax.models.target import Target
from specjax.types import LoadedDrafter


def _eagle3(target: Target, k: int) -> LoadedDrafter:
    """It drafts all tokens but the first few."""
    return eagle3.from_config(
        target, 0, np.arange(target.config.vocab_size), taps=(0, 1, 2), draft_vocab_size=60,
        ttt_steps=k, num_draft_tokens=k,
    )  # fmt: skip


def _dflash(target: Target, k: int) -> LoadedDrafter:
    """With fewer blocks a row than there are tokens to begin them at."""
    return dflash.from_config(
        target, 0, np.zeros(target.config.vocab_size, int), mask_token=60, taps=(0, 2),
        num_layers=2, block_size=k + 1, num_anchors=12,
    )  # fmt: skip


def _dspark(target: Target, k: int) -> LoadedDrafter:
    return dspark.from_config(
        target, 0, np.zeros(target.config.vocab_size, int), mask_token=60, taps=(0, 2),
        num_layers=2, block_size=k, num_anchors=64, markov_rank=8,
    )  # fmt: skip


TRAINEES = {
    "draft_lm": lambda target, k: draft_lm(from_layers(target, 2), target, k),
    "eagle3": _eagle3,
    "dflash": _dflash,
    "dspark": _dspark,
}
