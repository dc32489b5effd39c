"""config.json in both schemas, RoPE scaling by hand, and what is refused."""

from __future__ import annotations

import math

import pytest

from specjax.models.config import (
    ModelConfig,
    config_from_gguf,
    config_from_hf,
    llama3_rope_factors,
)

RAW = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama3_factors_by_hand():
    # theta 500000, head_dim 128, as in Llama 3.1. Frequency 0 has wavelength 2π: kept. The last has
    # wavelength 2π·500000^(126/128), beyond 8192: stretched by 8. Frequency 31 is between.
    factors = llama3_rope_factors(
        128, 500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
    )
    wavelength = 2 * math.pi * 500000 ** (62 / 128)
    smooth = (8192 / wavelength - 1) / 3
    assert factors[0] == 1.0 and factors[63] == 8.0
    assert 0 < smooth < 1
    assert factors[31] == pytest.approx(1 / ((1 - smooth) / 8 + smooth), rel=1e-12)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **SCALING}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **SCALING}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **SCALING}},
    ],
)
def test_both_rope_schemas_say_the_same(rope):
    config = config_from_hf(RAW | rope)
    assert config.rope_theta == 500.0
    assert config.rope_factors == llama3_rope_factors(
        16, 500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
    )


def test_defaults_of_old_llama_configs():
    raw = {key: value for key, value in RAW.items() if key != "num_key_value_heads"}
    config = config_from_hf(raw)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert config.rope_factors == () and not config.tie_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported; supported: llama, qwen2"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "RoPE type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "llama3"}}, "key 'factor' is missing"),
        ({"hidden_size": "64"}, "a value cannot be used"),
        ({"rope_parameters": "x"}, "a value cannot be used"),
        ({"rope_theta": 0}, "rope_theta must be a positive number, got 0.0"),
        ({"tie_word_embeddings": "false"}, "tie_embeddings must be true or false, got 'false'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"max_position_embeddings": 1e30}, "context_length must be a positive integer"),
        ({"num_hidden_layers": [2]}, "num_layers must be a positive integer"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
    ],
)
def test_what_cannot_be_run_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(RAW | change)


def test_null_means_default():
    assert config_from_hf(RAW | {"attention_bias": None, "rope_scaling": None}).rope_factors == ()


def test_missing_key_is_named():
    with pytest.raises(ValueError, match="key 'num_hidden_layers' is missing"):
        config_from_hf({key: value for key, value in RAW.items() if key != "num_hidden_layers"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "rwkv7"}, "architecture 'rwkv7' is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling 'yarn' is not supported"),
        ({"llama.rope.dimension_count": 8}, "RoPE on 8 of 16 dims is not supported"),
        ({"llama.block_count": None}, "key 'llama.block_count' is missing"),
    ],
)
def test_gguf_metadata_that_cannot_be_run(change, message):
    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": 64,
        "llama.attention.head_count": 4,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    with pytest.raises(ValueError, match=message):
        config_from_gguf(metadata | change, vocab_size=128, tied=True)


@pytest.mark.parametrize(
    ("size", "hf_scalar", "scale"),
    [
        # From the released config.json: layers, hidden size, heads, K/V heads, head size.
        ((26, 1152, 4, 1, 256), 256, 256**-0.5),
        ((34, 2560, 8, 4, 256), 256, 256**-0.5),
        ((62, 5376, 32, 16, 128), 168, 168**-0.5),
    ],
)
def test_query_scale_of_gemma_3(size, hf_scalar, scale):
    layers, width, heads, kv, head = size
    metadata = {
        "general.architecture": "gemma3",
        "gemma3.block_count": layers,
        "gemma3.embedding_length": width,
        "gemma3.attention.head_count": heads,
        "gemma3.attention.head_count_kv": kv,
        "gemma3.attention.key_length": head,
        "gemma3.attention.sliding_window": 1024,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.feed_forward_length": 64,
    }
    raw = RAW | {
        "model_type": "gemma3_text",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head,
        "query_pre_attn_scalar": hf_scalar,
        "sliding_window": 1024,
    }
    from_gguf = config_from_gguf(metadata, vocab_size=128, tied=True)
    for config in (from_gguf, config_from_hf(raw)):
        assert (config.query_scale or config.head_dim**-0.5) == pytest.approx(scale, rel=1e-12)


def test_rope_factors_must_fit_the_head():
    with pytest.raises(ValueError, match="3 RoPE factors for head_dim 8, expected 4"):
        ModelConfig(8, 16, 16, 1, 2, 2, 8, rope_factors=(1.0, 2.0, 3.0))
