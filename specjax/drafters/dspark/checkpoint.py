"""DSpark drafters on disk: DFlash's trunk with `markov_head.*` and `confidence_head.*`.

DeepSpec writes the keys of its config flat, and copies of the target's embedding and head; they must be
the target's.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from specjax.checkpoints import convert, huggingface
from specjax.checkpoints.convert import TensorRecipe, linear_recipe, table_recipe
from specjax.drafters.dflash import checkpoint as dflash
from specjax.drafters.dspark.drafter import DSpark
from specjax.drafters.fusion import folded, unfolded
from specjax.models.target import Target
from specjax.models.transformer import head_of
from specjax.types import LoadedDrafter

MIXES = {"gated": "gate_proj", "rnn": "joint_proj"}


def load(folder: pathlib.Path, target: Target, num_draft_tokens: int | None) -> LoadedDrafter:
    """The drafter of a folder; K is that of its block where none is given.

    Raises:
      FileNotFoundError: there is no such folder, or it lacks a file.
      ValueError: the drafter is of another target or method, or damaged; the message says in what.
    """
    raw, tensors = dflash.read_folder(folder, target)
    own = dflash.own_keys(raw)
    if not own.get("sample_from_anchor", True):
        raise ValueError(
            f"{folder}: blocks whose anchor predicts nothing are not supported in dspark"
        )
    if not own.get("markov_rank"):
        raise ValueError(f"{folder}: a DSpark drafter without a Markov head is not supported")
    fields = dflash.read_options(raw, target, folder, num_draft_tokens, DSpark.first_slot)
    drafter = DSpark(
        **fields,
        markov_rank=own["markov_rank"],
        markov_head=own.get("markov_head_type", "vanilla"),
        confidence=float(bool(own.get("enable_confidence_head", False))),
        confidence_with_markov=bool(own.get("confidence_head_with_markov", True)),
        confidence_temperatures=_temperatures(own.get("confidence_temperatures", []), folder),
    )
    dflash.check_copies(tensors, target, folder)
    params = convert.assemble(
        recipes(drafter, tensors), tensors, target.dtype, redundant=dflash.SHARED
    )
    if drafter.confidence and "weight_bias" not in params["confidence"]:
        params["confidence"]["weight_bias"] = np.zeros(1, drafter.dtype)
    return LoadedDrafter(drafter, unfolded(params), f"dspark:{folder}")


def _temperatures(given: Any, folder: pathlib.Path) -> tuple[float, ...]:
    numbers = isinstance(given, list) and all(type(x) in (int, float) for x in given)
    if not numbers or not all(0 < x < float("inf") for x in given):
        raise ValueError(
            f"{folder}: confidence_temperatures must be a list of numbers above 0, got {given!r}"
        )
    return tuple(map(float, given))


def recipes(drafter: DSpark, kept: Mapping[str, Any] | None = None) -> Iterator[TensorRecipe]:
    """The parameters; `kept` are the tensors there are, all of them by default."""
    config, rank = drafter.config, drafter.markov_rank
    table = config.vocab_size, rank
    yield from dflash.recipes(drafter)
    yield table_recipe(("markov", "embedding"), "markov_head.markov_w1", table)
    yield table_recipe(("markov", "head_weight"), "markov_head.markov_w2", table)
    kind = drafter.markov_head
    if kind in MIXES:
        name = f"markov_head.{MIXES[kind]}"
        inputs = config.hidden_size + rank * (2 if kind == "rnn" else 1)
        outputs = rank * (3 if kind == "rnn" else 1)
        yield linear_recipe(("markov", "mix"), name, inputs, outputs)
        yield _bias(("markov", "mix_bias"), f"{name}.bias", outputs)
    if drafter.confidence:
        inputs = config.hidden_size + (rank if drafter.confidence_with_markov else 0)
        yield linear_recipe(("confidence", "weight"), "confidence_head.proj", inputs, 1)
        name = "confidence_head.proj.bias"
        if kept is None or name in kept:
            yield _bias(("confidence", "weight_bias"), name, 1)


def _bias(path: tuple[str, ...], name: str, size: int) -> TensorRecipe:
    return TensorRecipe(path, {name: (size,)}, lambda x: x, lambda x: [x])


def export(loaded: LoadedDrafter, target: Target, folder: pathlib.Path) -> None:
    """Writes the drafter as DeepSpec does, with copies of the target's embedding and head."""
    drafter = loaded.drafter
    params = folded(jax.device_get(loaded.params))
    tensors = convert.disassemble(recipes(drafter), params)
    tables = target.params["embedding"], head_of(target.params)
    tensors |= {k: np.asarray(x) for k, x in zip(dflash.SHARED, tables, strict=True)}
    described = dflash.describe(drafter, target) | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token,
        "target_layer_ids": list(drafter.taps),
        "markov_rank": drafter.markov_rank,
        "markov_head_type": drafter.markov_head,
        "enable_confidence_head": bool(drafter.confidence),
        "confidence_head_with_markov": drafter.confidence_with_markov,
        "sample_from_anchor": True,
    }
    if drafter.confidence_temperatures:  # ours; other engines pass it over
        described["confidence_temperatures"] = list(drafter.confidence_temperatures)
    huggingface.write_folder(folder, described, tensors)
