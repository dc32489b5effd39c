"""DFlash drafters on disk: z-lab's layout, DeepSpec's flat keys, and folders of `speculators`.

`fc`, `hidden_norm`, `layers.*`, `norm`; embedding and head are the target's and not there.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checkpoints import convert, huggingface
from specjax.checkpoints.export import drafter_to_hf
from specjax.drafters import manifest
from specjax.drafters.dflash.drafter import DFlash
from specjax.drafters.fusion import folded, fusion_recipe, unfolded
from specjax.models.config import ModelConfig, config_from_hf
from specjax.models.target import Target
from specjax.models.transformer import check_taps, head_of
from specjax.types import LoadedDrafter

_log = logging.getLogger(__name__)


def default_taps(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Evenly from block 1 to block L − 3 (z-lab's own choice); the middle one, if it is one."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_taps - 1)
    taps = tuple(round(1 + i * step) for i in range(num_taps))
    if len(set(taps)) < num_taps or min(taps) < 0:
        raise ValueError(f"a target of {num_target_layers} layers has no {num_taps} usual taps")
    return taps


def load(folder: pathlib.Path, target: Target, num_draft_tokens: int | None) -> LoadedDrafter:
    """The drafter of a folder; K is that of its block where none is given.

    Raises:
      FileNotFoundError: there is no such folder, or it lacks a file.
      ValueError: the drafter is of another target or method, or damaged; the message says in what.
    """
    raw, tensors = read_folder(folder, target)
    if any("markov_head" in name for name in tensors):
        raise ValueError(f"{folder} is a DSpark drafter: dspark:{folder}")
    own = own_keys(raw)
    if own.get("sample_from_anchor") or "markov_rank" in own:
        raise ValueError(
            f"{folder}: its anchor's slot predicts, too, as in DSpark; without a Markov head that is "
            "not supported"
        )
    drafter = DFlash(**read_options(raw, target, folder, num_draft_tokens, DFlash.first_slot))
    check_copies(tensors, target, folder)
    params = convert.assemble(recipes(drafter), tensors, target.dtype, redundant=SHARED)
    return LoadedDrafter(drafter, unfolded(params), f"dflash:{folder}")


SHARED = ("embed_tokens.weight", "lm_head.weight")  # frozen copies of the target's


def check_copies(
    tensors: Mapping[str, convert.Tensor], target: Target, folder: pathlib.Path
) -> None:
    """Raises ValueError where a folder has tables of another target."""
    for name, table in zip(
        SHARED, (target.params["embedding"], head_of(target.params)), strict=True
    ):
        if name in tensors and not convert.is_copy(jnp.asarray(tensors[name].read()), table):
            raise ValueError(f"{folder}: its {name} is not that of {target.name}")


def read_folder(
    folder: pathlib.Path, target: Target
) -> tuple[dict[str, Any], dict[str, convert.Tensor]]:
    """The config and the tensors, unread."""
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} is no drafter's folder: no config.json")
    raw = huggingface.read_json(folder / "config.json")
    manifest.check_target(folder, target)
    tensors = huggingface.folder_tensors(folder, other_types=("I64", "I32", "BOOL"))
    tensors = {name.removeprefix("model."): x for name, x in tensors.items()}
    second = any("candidate_selector" in name or "_conv." in name for name in tensors)
    if second or "DFlash2DraftModel" in (raw.get("architectures") or ()):
        raise ValueError(f"{folder} is a DFlash 2 drafter, which is not supported")
    return raw, tensors


def own_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a `config.json`, those nested for the drafter before those of the same name."""
    return {**raw, **(raw.get("dflash_config") or {})}


def read_options(
    raw: Mapping[str, Any],
    target: Target,
    folder: pathlib.Path,
    num_draft_tokens: int | None,
    first_slot: int,
) -> dict[str, Any]:
    """The fields of `DFlash` that a `config.json` says.

    Raises:
      ValueError: they do not fit the target, or are not supported.
    """
    layer, wanted = raw.get("transformer_layer_config", raw), target.config
    own = own_keys(raw)
    for key, neutral in (("output_multiplier", 1.0), ("final_logit_softcapping", 0.0)):
        if own.get(key) not in (None, neutral):
            raise ValueError(f"{folder}: {key}={own[key]!r} is not supported")
    if (raw.get("draft_vocab_size") or wanted.vocab_size) != wanted.vocab_size:
        raise ValueError(f"{folder}: a draft vocabulary is not supported in dflash")
    config = _layers(layer)
    manifest.check_fit(
        folder,
        target,
        ("hidden size", config.hidden_size, wanted.hidden_size),
        ("a vocabulary of", config.vocab_size, wanted.vocab_size),
        ("a target of layers", raw.get("num_target_layers", wanted.num_layers), wanted.num_layers),
    )
    taps = own.get("target_layer_ids")
    if raw.get("aux_hidden_state_layer_ids"):  # counts the blocks that read the features
        taps = [tap - 1 for tap in raw["aux_hidden_state_layer_ids"]]
    if taps is None:
        taps = default_taps(wanted.num_layers, config.num_layers)
    check_taps(tuple(taps), wanted)
    _warn_of_shifted(tuple(taps), wanted.num_layers, folder)
    block_size, mask_token = own.get("block_size", 16), own.get("mask_token_id")
    if mask_token is None:
        raise ValueError(f"{folder}: config.json has no mask_token_id")
    if mask_token in said_tokens(target):
        _log.warning(
            "%s: its mask token %d is a stop token or padding of %s",
            folder,
            mask_token,
            target.name,
        )
    most = block_size - first_slot
    if num_draft_tokens is not None and num_draft_tokens > most:
        _log.warning(
            "%s was trained on blocks of %d; longer ones gain nothing (DFlash, table 8: trained on 8, "
            "run on 16, 5.02 tokens a cycle on MATH-500; on 8, 5.21; trained on 16, 6.33)",
            folder, block_size,
        )  # fmt: skip
    return {
        "config": config,
        "taps": tuple(taps),
        "dtype": jnp.dtype(target.dtype),
        "block_size": block_size,
        "mask_token": mask_token,
        "num_draft_tokens": most if num_draft_tokens is None else num_draft_tokens,
        "embedding_scale": float(own.get("input_embedding_scale") or 1.0),
        "causal_windows": raw.get("is_causal") is not False
        and not raw.get("sliding_window_non_causal", False),
    }


def _layers(layer: Mapping[str, Any]) -> ModelConfig:
    """The layers, sliding ones among them."""
    if layer.get("model_type") not in ("llama", "qwen3"):
        raise ValueError(f"layers of {layer.get('model_type')!r} are not supported")
    plain = {key: x for key, x in layer.items() if key != "use_sliding_window"}
    config = config_from_hf({**plain, "tie_word_embeddings": False})
    kinds = layer.get("layer_types") or ()
    if layer.get("is_causal") and set(kinds) != {"sliding_attention"}:
        raise ValueError("config.json: is_causal with layers of full attention is not supported")
    if "sliding_attention" not in kinds:
        return config
    if not layer.get("sliding_window"):
        raise ValueError("config.json: sliding layers need a sliding_window")
    return dataclasses.replace(
        config,
        sliding_layers=tuple(kind == "sliding_attention" for kind in kinds),
        sliding_window=layer["sliding_window"],
        sliding_rope_theta=config.rope_theta,
    )


def _warn_of_shifted(taps: tuple[int, ...], num_layers: int, folder: pathlib.Path) -> None:
    try:
        usual = default_taps(num_layers, len(taps))
    except ValueError:
        return
    if any(taps == tuple(tap + by for tap in usual) for by in (1, -1)):
        _log.warning(
            "%s: target_layer_ids %s look shifted by one: the usual ones are %s, outputs of blocks "
            "counted from 0", folder, list(taps), list(usual),
        )  # fmt: skip


def said_tokens(target: Target) -> set[int]:
    """Stop tokens and padding: what no mask can be."""
    padding = None if target.tokenizer is None else target.tokenizer.pad_token_id
    return {*target.stop_tokens, *([] if padding is None else [padding])}


def recipes(drafter: DFlash) -> Iterator[convert.TensorRecipe]:
    """The trunk's parameters."""
    config, depth = drafter.config, drafter.config.hidden_size
    yield fusion_recipe(len(drafter.taps), depth)
    yield convert.norm_recipe(("fused_norm",), "hidden_norm", depth)
    for i in range(config.num_layers):
        yield from convert.block_recipes(config, ("blocks", i), f"layers.{i}")
    yield convert.norm_recipe(("final_norm",), "norm", depth)


def export(loaded: LoadedDrafter, target: Target, folder: pathlib.Path) -> None:
    """Writes the drafter as z-lab does."""
    drafter = loaded.drafter
    params = folded(jax.device_get(loaded.params))
    tensors = convert.disassemble(recipes(drafter), params)
    described = describe(drafter, target) | {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {
            "mask_token_id": drafter.mask_token,
            "target_layer_ids": list(drafter.taps),
        },
        "block_size": drafter.block_size,
    }
    huggingface.write_folder(folder, described, tensors)


def describe(drafter: DFlash, target: Target) -> dict[str, Any]:
    """What a `config.json` says of the layers."""
    config = drafter.config
    if not config.qk_norm:
        _log.warning("%s: other engines norm queries and keys, this drafter does not", target.name)
    slides = config.sliding_layers or (False,) * config.num_layers
    return drafter_to_hf(config) | {
        "num_target_layers": target.config.num_layers,
        "layer_types": ["sliding_attention" if x else "full_attention" for x in slides],
        "use_sliding_window": any(slides),
        "sliding_window": config.sliding_window if any(slides) else None,
        "is_causal": False if any(slides) and not drafter.causal_windows else None,
        "input_embedding_scale": drafter.embedding_scale,
        "dtype": drafter.dtype.name,
    }
