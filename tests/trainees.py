"""Small drafters of every kind that is trained, for tests that must hold for all of them."""

from __future__ import annotations

import numpy as np

from specjax.drafters import eagle3
from specjax.drafters.draft_lm import draft_lm, from_layers
from specjax.models.target import Target
from specjax.types import LoadedDrafter


def _eagle3(target: Target, k: int) -> LoadedDrafter:
    return eagle3.from_config(
        target, 0, np.ones(target.config.vocab_size), taps=(0, 1, 2), draft_vocab_size=56,
        ttt_steps=k, num_draft_tokens=k,
    )  # fmt: skip


TRAINEES = {
    "draft_lm": lambda target, k: draft_lm(from_layers(target, 2), target, k),
    "eagle3": _eagle3,
}
