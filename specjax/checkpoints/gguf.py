"""GGUF files: metadata, and tensors dequantised to float32 under their Hugging Face names."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import numpy as np

from specjax.checkpoints.convert import Tensor

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma norms its outputs too, and Hugging Face gives the second name to another norm there.
_GEMMA_NAMES = _NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"


def read_gguf(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata as plain values, and the tensors, unread.

    Tensors keep GGUF's names where they have no Hugging Face counterpart.

    Raises:
      ValueError: the file is truncated, damaged, or stored in a quantisation that `gguf` cannot
        dequantise.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: truncated or damaged GGUF file: {error}") from None
    heads = {
        "attn_q": metadata.get("llama.attention.head_count"),
        "attn_k": metadata.get("llama.attention.head_count_kv"),
    }
    heads["attn_k"] = heads["attn_k"] or heads["attn_q"]
    names = _GEMMA_NAMES if metadata.get("general.architecture") == "gemma3" else _NAMES
    tensors = {}
    for stored in reader.tensors:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored.name)
        part = match and names.get(match[2])
        layer = f"model.layers.{match[1]}." if match and match[1] else ""
        name = f"{layer}{part}.{match[3]}" if part else stored.name
        permuted = heads.get(match[2]) if match else None
        shape = tuple(int(size) for size in reversed(stored.shape))
        tensors[name] = Tensor(
            shape, lambda stored=stored, permuted=permuted: _dequantize(path, stored, permuted)
        )
    return metadata, tensors


def _dequantize(path: pathlib.Path, stored: Any, permuted_heads: int | None) -> np.ndarray:
    import gguf

    try:
        values = gguf.quants.dequantize(stored.data, stored.tensor_type)
    except NotImplementedError:
        kind = stored.tensor_type.name
        raise ValueError(
            f"{path}: {stored.name} is stored as {kind}, which cannot be read"
        ) from None
    if permuted_heads:
        # llama-architecture q and k are stored for interleaved RoPE: rows (pair, half) of each head
        # go back to (half, pair).
        values = values.reshape(permuted_heads, -1, 2, values.shape[-1]).swapaxes(1, 2)
        values = values.reshape(-1, values.shape[-1])
    return values


def stop_tokens(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end a row: end of sequence, end of turn, end of message."""
    names = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(metadata[name] for name in names if name in metadata))
