"""Optax pipelines, chosen by a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax

from specjax.models.sharding import EMBEDDINGS, name_of

# Muon orthogonalises matrices: which axes of a parameter are rows and columns; others count matrices.
# Everything else is Adam's: biases, scales, and the tables, whose rows are looked up one by one.
MATRICES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "qkv": ((0,), (1, 3)),  # each of the query heads of a group, keys and values apart
    "attention_out": ((0, 1, 2), (3,)),
    "gate_up": ((0,), (2,)),  # gate and up are two matrices
    "down": ((0,), (1,)),
}


def _matrix_axes(path: tuple, x: jax.Array) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Rows and columns of a matrix; None for what is none, or a table."""
    name = name_of(path)
    matrix = x.ndim == 2 and min(x.shape) > 1 and name not in EMBEDDINGS
    plain = ((0,), (1,)) if matrix else None
    return MATRICES.get(name, plain)


def schedule(
    kind: str, peak: float, total_steps: int, warmup_steps: int, decay_steps: int = 0
) -> optax.Schedule:
    """Learning rate by step: linear warm-up from 0, then `cosine`, `wsd` or `constant`.

    `wsd` stays at its peak and falls linearly to 0 in the last `decay_steps`; 0 for all of them.
    """
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warmup_steps must be 0…{total_steps - 1}, got {warmup_steps}")
    rise = optax.linear_schedule(0.0, peak, max(warmup_steps, 1))
    left = total_steps - warmup_steps
    if kind == "cosine":
        rest = optax.cosine_decay_schedule(peak, left)
    elif kind == "wsd":
        if not 0 <= decay_steps <= left:
            raise ValueError(f"decay_steps must be 0…{left}, got {decay_steps}")
        decay_steps = decay_steps or left
        fall = optax.linear_schedule(peak, 0.0, decay_steps)
        rest = optax.join_schedules([lambda _: peak, fall], [left - decay_steps])
    elif kind == "constant":
        rest = optax.constant_schedule(peak)
    else:
        raise ValueError(f"unknown schedule {kind!r}; known: cosine, wsd, constant")
    return optax.join_schedules([rise, rest], [warmup_steps]) if warmup_steps else rest


def make_optimizer(
    config: Mapping[str, Any], total_steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The pipeline clip → `adamw` or `muon` → schedule; weight decay on matrices and tables only.

    Muon's own momentum is 0.95 (Nesterov); `b1` and `b2` are of the Adam that updates the rest.

    Args:
      config: `name`, `learning_rate`, `schedule`, `warmup_steps`, `decay_steps`, `clip` (global norm,
        0 for none), `weight_decay`, `b1`, `b2`.
      total_steps: length of the schedule.

    Returns:
      The transformation, and its learning rate by step.
    """
    rate = schedule(
        config["schedule"], config["learning_rate"], total_steps, config["warmup_steps"],
        config.get("decay_steps", 0),
    )  # fmt: skip

    def decayed(params: Any) -> Any:
        def one(path: tuple, x: jax.Array) -> bool:
            return _matrix_axes(path, x) is not None or name_of(path) in EMBEDDINGS

        return jax.tree_util.tree_map_with_path(one, params)

    def matrices(params: Any) -> Any:
        def one(path: tuple, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
            axes = _matrix_axes(path, x)
            return axes and optax.contrib.MuonDimensionNumbers(*axes)

        return jax.tree_util.tree_map_with_path(one, params)

    if config["name"] == "adamw":
        update = optax.adamw(
            rate,
            b1=config["b1"],
            b2=config["b2"],
            weight_decay=config["weight_decay"],
            mask=decayed,
        )
    elif config["name"] == "muon":
        update = optax.contrib.muon(
            rate, adam_b1=config["b1"], adam_b2=config["b2"], weight_decay=config["weight_decay"],
            weight_decay_mask=decayed, muon_weight_dimension_numbers=matrices,
            consistent_rms=0.2,
        )  # fmt: skip
    else:
        raise ValueError(f"unknown optimizer {config['name']!r}; known: adamw, muon")
    clip = optax.clip_by_global_norm(config["clip"]) if config["clip"] else optax.identity()
    return optax.chain(clip, update), rate
