"""A target or draft model as a Hugging Face folder: what `transformers` and other engines load."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import numpy as np

from specjax.checkpoints import convert, huggingface
from specjax.models.config import ModelConfig, llama3_rope_factors
from specjax.models.target import Target


def export_folder(target: Target, folder: str | pathlib.Path) -> None:
    """Writes `config.json`, safetensors and the tokenizer; `load_target` reads them back the same.

    Args:
      target: a model; its weights keep their type.
      folder: made if absent, overwritten file by file.

    Raises:
      ValueError: the model has RoPE factors that config.json cannot say.
    """
    folder = pathlib.Path(folder)
    config = config_to_hf(target.config) | {"dtype": target.dtype.name}
    stops = list(target.stop_tokens)
    if stops:
        config["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    offset = 1.0 if target.config.post_norms else 0.0  # Gemma stores w of 1 + w
    recipes = convert.model_recipes(target.config, offset)
    tensors = convert.disassemble(recipes, target.params)
    huggingface.write_folder(folder, config, tensors)
    if target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `models.config.config_from_hf`."""
    gemma = config.post_norms
    family = "gemma3_text" if gemma else "qwen2" if config.qkv_bias else "llama"
    if config.qk_norm and not gemma:
        family = "qwen3"
    architecture = {"gemma3_text": "Gemma3", "qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if len(set(config.rope_factors)) == 1:
        rope |= {"rope_type": "linear", "factor": config.rope_factors[0]}
    elif config.rope_factors:
        rope |= {"rope_type": "llama3", **llama3_rope(config)}
    if gemma:
        sliding = {"rope_type": "default", "rope_theta": config.sliding_rope_theta}
        rope = {"full_attention": rope, "sliding_attention": sliding}
    raw = {
        "model_type": family,
        "architectures": [f"{architecture[family]}ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.context_length,
    }
    if gemma:
        kinds = ("full_attention", "sliding_attention")
        return raw | {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": round((config.query_scale or config.head_dim**-0.5) ** -2),
            "sliding_window": config.sliding_window,
            "layer_types": [kinds[slides] for slides in config.sliding_layers],
        }
    return raw | {"hidden_act": "silu"}


def drafter_to_hf(config: ModelConfig) -> dict[str, Any]:
    """`config_to_hf` of a drafter's layers, with the rotation as readers of version 4 have it, too."""
    described = config_to_hf(config)
    rope = described["rope_parameters"]
    scaling = None if rope["rope_type"] == "default" else rope
    return described | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def llama3_rope(config: ModelConfig) -> dict[str, float]:
    """The inverse of `models.config.llama3_rope_factors`, among the settings that were released.

    Raises:
      ValueError: no such setting gives the factors.
    """
    theta = config.rope_theta
    for factor, context in itertools.product((8.0, 32.0), (2**n for n in range(5, 20))):
        options = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        factors = llama3_rope_factors(config.head_dim, theta, original_context=context, **options)
        if np.allclose(factors, config.rope_factors, rtol=1e-5):
            return options | {"original_max_position_embeddings": context}
    raise ValueError(
        "RoPE factors that differ by frequency, and not as Llama 3's, have no config.json"
    )
