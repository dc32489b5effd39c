"""Writes tiny random checkpoints of every family and their reference logits, with `transformers`.

  python tests/golden/make_golden.py      # needs the extra `parity`

Each folder is a complete Hugging Face checkpoint with random weights, and `expected.npz`:
`tokens [B, T]`, `logits [B, T, V]`, `hidden_states [B, T, layers + 1, D]` (embedding first, the
last one after the final norm).
"""

from __future__ import annotations

import pathlib

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
SHAPE = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "initializer_range": 0.3,  # large enough that every weight matters in the logits
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama_tied": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "llama_untied": {
        "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False,
        "head_dim": 12,
    },
    "llama3_scaled": {
        "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False,
        "head_dim": 16, "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {
        "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2,
        "tie_word_embeddings": False, "max_position_embeddings": 512,
    },
    "qwen3": {
        "model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "tie_word_embeddings": True, "max_position_embeddings": 512,
    },
    "gemma3": {
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "max_position_embeddings": 512, "initializer_range": 0.2,
    },
}  # fmt: skip


def reference(model, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of a transformers model."""
    with torch.no_grad():
        out = model(torch.from_numpy(tokens).long(), output_hidden_states=True)
    hidden = torch.stack(out.hidden_states, dim=2)
    return out.logits.float().numpy(), hidden.float().numpy()


def main() -> None:
    """Writes every model."""
    for seed, (name, options) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        options = {"model_type": "llama"} | SHAPE | options
        config = CONFIG_MAPPING[options.pop("model_type")](**options)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                # Norms and biases begin at their neutral values, which would hide mistakes.
                if "norm" in parameter_name or "bias" in parameter_name:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        # In shards for one of them, so that the index is read too.
        model.save_pretrained(HERE / name, max_shard_size="60KB" if seed == 1 else "1GB")
        tokens = np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], (2, 40))
        logits, hidden = reference(model, tokens)
        np.savez_compressed(
            HERE / name / "expected.npz", tokens=tokens, logits=logits, hidden_states=hidden
        )


if __name__ == "__main__":
    main()
