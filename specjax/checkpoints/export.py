"""A target or draft model as a Hugging Face folder: what `transformers` and other engines load."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from specjax.checkpoints import huggingface
from specjax.models.config import ModelConfig
from specjax.models.target import Target
from specjax.types import PyTree


def export_folder(target: Target, folder: str | pathlib.Path) -> None:
    """Writes `config.json`, safetensors and the tokenizer; `load_target` reads them back the same.

    Args:
      target: a model; its weights keep their type.
      folder: made if absent, overwritten file by file.

    Raises:
      ValueError: the model has an option that config.json cannot say (Llama 3's RoPE factors).
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = config_to_hf(target.config) | {"dtype": target.dtype.name}
    stops = list(target.stop_tokens)
    if stops:
        config["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    tensors = tensors_to_hf(target.config, target.params)
    save_file(tensors, folder / huggingface.SINGLE, metadata={"format": "pt"})
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
    if config.rope_factors:
        if len(set(config.rope_factors)) > 1:
            raise ValueError("RoPE factors that differ by frequency cannot be exported")
        rope |= {"rope_type": "linear", "factor": config.rope_factors[0]}
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


def tensors_to_hf(config: ModelConfig, params: PyTree) -> dict[str, np.ndarray]:
    """The inverse of `checkpoints.convert.convert`."""
    depth = config.hidden_size
    offset = 1.0 if config.post_norms else 0.0  # Gemma stores w of 1 + w
    tensors = {"model.embed_tokens.weight": np.asarray(params["embedding"])}

    def norm(name: str, scale: PyTree) -> None:
        tensors[f"{name}.weight"] = np.asarray(scale["scale"]) - np.float32(offset)

    for i in range(config.num_layers):
        block, name = params["blocks"][i], f"model.layers.{i}"
        attention = f"{name}.self_attn"
        fused = np.moveaxis(np.asarray(block["qkv"]), 0, -1)  # [G, H/G + 2, head_dim, D]
        for key, part in _split_qkv(fused).items():
            tensors[f"{attention}.{key}_proj.weight"] = part.reshape(-1, depth)
        if config.qkv_bias:
            for key, part in _split_qkv(np.asarray(block["qkv_bias"])).items():
                tensors[f"{attention}.{key}_proj.bias"] = part.reshape(-1)
        if config.qk_norm:
            norm(f"{attention}.q_norm", block["query_norm"])
            norm(f"{attention}.k_norm", block["key_norm"])
        out = np.asarray(block["attention_out"]).reshape(-1, depth)
        tensors[f"{attention}.o_proj.weight"] = out.T
        norm(f"{name}.input_layernorm", block["attention_norm"])
        if config.post_norms:
            norm(f"{name}.post_attention_layernorm", block["attention_post_norm"])
            norm(f"{name}.pre_feedforward_layernorm", block["mlp_norm"])
            norm(f"{name}.post_feedforward_layernorm", block["mlp_post_norm"])
        else:
            norm(f"{name}.post_attention_layernorm", block["mlp_norm"])
        for slot, key in enumerate(("gate", "up")):
            tensors[f"{name}.mlp.{key}_proj.weight"] = np.asarray(block["gate_up"])[:, slot].T
        tensors[f"{name}.mlp.down_proj.weight"] = np.asarray(block["down"]).T
    norm("model.norm", params["final_norm"])
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = np.asarray(params["head_weight"])
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


def _split_qkv(fused: np.ndarray) -> dict[str, np.ndarray]:
    """`[G, H/G + 2, …]` → its queries, keys and values."""
    return {"q": fused[:, :-2], "k": fused[:, -2], "v": fused[:, -1]}
