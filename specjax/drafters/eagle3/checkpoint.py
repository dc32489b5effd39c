"""EAGLE-3 drafters on disk: the layout of SafeAILab and SpecForge, which vLLM and SGLang serve.

`midlayer.*`, `fc`, `norm`, `lm_head`, `embed_tokens`, `d2t` (offsets: the target's id is i + d2t[i]),
`t2d` and a `config.json`. Folders of `speculators` are read too. Weights must be safetensors, which
SafeAILab's own `pytorch_model.bin` becomes with `safetensors.torch.save_file(torch.load(…), …)`.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Container, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints import convert, huggingface
from specjax.checkpoints.convert import Tensor
from specjax.checkpoints.export import drafter_to_hf
from specjax.drafters import manifest
from specjax.drafters.eagle3.drafter import Eagle3
from specjax.drafters.fusion import folded, fusion_recipe, unfolded
from specjax.drafters.vocabulary import DraftVocabulary
from specjax.models.config import ModelConfig, config_from_hf
from specjax.models.target import Target
from specjax.models.transformer import check_taps, head_of
from specjax.trees import DynamicTree, Tree
from specjax.types import LoadedDrafter

_log = logging.getLogger(__name__)

# Options of `speculators` that no layer here has.
REFUSED = ("fc_norm", "norm_before_fc", "norm_output")


def default_taps(config: ModelConfig) -> tuple[int, int, int]:
    """Low, middle and high: outputs of blocks 1, ⌊L/2⌋ − 1 and L − 4 (EAGLE-3's own choice)."""
    taps = 1, config.num_layers // 2 - 1, config.num_layers - 4
    if not taps[0] < taps[1] < taps[2]:
        raise ValueError(f"a target of {config.num_layers} layers has no usual taps: give them")
    return taps


def load(folder: pathlib.Path, target: Target, tree: Tree | DynamicTree) -> LoadedDrafter:
    """The drafter of a folder.

    Args:
      folder: `config.json` and safetensors.
      target: what it drafts for.
      tree: what is drafted.

    Raises:
      FileNotFoundError: there is no such folder, or it lacks a file.
      ValueError: the drafter is of another target, or damaged; the message says in what.
    """
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} is no EAGLE-3 folder: no config.json")
    raw = huggingface.read_json(folder / "config.json")
    config, taps, options = read_config(raw, target, folder)
    manifest.check_target(folder, target)
    tensors = huggingface.folder_tensors(folder, other_types=("I64", "I32", "BOOL"))
    tensors = {name.replace("layers.0.", "midlayer."): x for name, x in tensors.items()}
    vocabulary = _vocabulary(tensors, config, target, folder)
    recipes = _recipes(config, len(taps), target.config.vocab_size, tensors)
    params = convert.assemble(recipes, tensors, target.dtype, redundant=("d2t", "t2d"))
    params = unfolded(params)
    if vocabulary is not None and "head_weight" not in params:
        raise ValueError(f"{folder}: {config.vocab_size} draft tokens need an lm_head of their own")
    for name, theirs, shared in (
        ("embedding", "embed_tokens", target.params["embedding"]),
        ("head_weight", "lm_head", head_of(target.params)),
    ):
        if name not in params:
            _log.info("%s has no %s: the target's is used", folder, theirs)
        elif convert.is_copy(params[name], shared):
            del params[name]
    drafter = Eagle3(config, taps, jnp.dtype(target.dtype), vocabulary, tree, **options)
    return LoadedDrafter(drafter, params, f"eagle3:{folder}")


def read_config(
    raw: Mapping[str, Any], target: Target, folder: pathlib.Path
) -> tuple[ModelConfig, tuple[int, ...], dict[str, bool]]:
    """The layer's architecture, the taps and the options that a `config.json` says.

    Raises:
      ValueError: they do not fit the target, or are not supported.
    """
    layer, wanted = raw.get("transformer_layer_config", raw), target.config
    for option in REFUSED:
        if raw.get(option):
            raise ValueError(f"{folder}: {option} is not supported")
    if layer.get("model_type") not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"{folder}: layers of {layer.get('model_type')!r} are not supported")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise ValueError(f"{folder}: sliding layers are not supported")
    size = raw.get("draft_vocab_size") or layer.get("vocab_size")
    config = config_from_hf({**layer, "vocab_size": size, "tie_word_embeddings": False})
    features = raw.get("target_hidden_size") or config.hidden_size
    manifest.check_fit(
        folder,
        target,
        ("hidden size", config.hidden_size, wanted.hidden_size),
        ("features of size", features, wanted.hidden_size),
        ("a target vocabulary of", layer.get("vocab_size"), wanted.vocab_size),
        ("layers", config.num_layers, 1),
    )
    taps = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    inputs = raw.get("eagle_aux_hidden_state_layer_ids")
    if taps is None and inputs is not None:  # of the blocks that read the features
        taps = [tap - 1 for tap in inputs]
    taps = default_taps(wanted) if taps is None else tuple(taps)
    check_taps(taps, wanted)
    return config, taps, {"norm_before_residual": bool(raw.get("norm_before_residual"))}


def _recipes(
    config: ModelConfig, num_taps: int, target_vocab_size: int, kept: Container[str]
) -> Iterator[convert.TensorRecipe]:
    """The parameters; embedding and head only where their tensors are kept."""
    depth = config.hidden_size
    yield fusion_recipe(num_taps, depth)
    yield from convert.block_recipes(config, ("layer",), "midlayer", qkv_inputs=2)
    yield convert.norm_recipe(("layer", "hidden_norm"), "midlayer.hidden_norm", depth)
    yield convert.norm_recipe(("final_norm",), "norm", depth)
    if "lm_head.weight" in kept:
        yield convert.table_recipe(("head_weight",), "lm_head", (config.vocab_size, depth))
    if "embed_tokens.weight" in kept:
        yield convert.table_recipe(("embedding",), "embed_tokens", (target_vocab_size, depth))


def _vocabulary(
    tensors: Mapping[str, Tensor], config: ModelConfig, target: Target, folder: pathlib.Path
) -> DraftVocabulary | None:
    """The draft vocabulary; None where it is the target's."""
    size, full = config.vocab_size, target.config.vocab_size
    if "d2t" not in tensors:
        if size != full:
            raise ValueError(f"{folder}: {size} draft tokens, but no d2t says which of {full}")
        return None
    offsets = tensors["d2t"].read()
    if offsets.shape != (size,):
        raise ValueError(f"{folder}: d2t is of shape {offsets.shape}, expected ({size},)")
    try:
        vocabulary = DraftVocabulary(tuple((offsets + np.arange(size)).tolist()), full)
    except ValueError as error:
        raise ValueError(f"{folder}, d2t: {error}") from None
    return None if size == full and not offsets.any() else vocabulary


def export(loaded: LoadedDrafter, target: Target, folder: pathlib.Path) -> None:
    """Writes the drafter as SafeAILab and SpecForge do.

    Embedding and head are written also where they are the target's: some engines expect them.
    """
    drafter, full = loaded.drafter, target.config.vocab_size
    config, vocabulary = drafter.config, drafter.vocabulary
    if config.qk_norm or len(drafter.taps) != 3:
        _log.warning(
            "%s: engines serve EAGLE-3 drafters of three taps (SGLang others, too) without q_norm and "
            "k_norm; this one has %d taps%s",
            folder, len(drafter.taps), " and both norms" * config.qk_norm,
        )  # fmt: skip
    shared = {"embedding": target.params["embedding"], "head_weight": head_of(target.params)}
    kept = ("lm_head.weight", "embed_tokens.weight")
    recipes = _recipes(config, len(drafter.taps), full, kept)
    ids = np.arange(full) if vocabulary is None else vocabulary.array
    params = folded(jax.device_get(shared | loaded.params))
    tensors = convert.disassemble(recipes, params) | {
        "d2t": ids.astype(np.int64) - np.arange(len(ids)),
        "t2d": np.isin(np.arange(full), ids),
    }
    described = drafter_to_hf(config) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": full,
        "draft_vocab_size": len(ids),
        "dtype": drafter.dtype.name,
        # SpecForge and SGLang name the blocks that make the features, vLLM those that read them.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(drafter.taps),
            "use_aux_hidden_state": True,
        },
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in drafter.taps],
        "norm_before_residual": drafter.norm_before_residual,
    }
    huggingface.write_folder(folder, described, tensors)
