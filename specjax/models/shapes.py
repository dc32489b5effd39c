"""Shapes of released models, to measure them without their weights."""

from specjax.models.config import ModelConfig, llama3_rope_factors

SHAPES = {
    "smollm2_135m": ModelConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, rms_norm_eps=1e-5, rope_theta=1e5, tie_embeddings=True,
        context_length=8192,
    ),
    "qwen25_1_5b": ModelConfig(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12,
        num_kv_heads=2, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e6, qkv_bias=True,
        tie_embeddings=True, context_length=32768,
    ),
    "qwen3_0_6b": ModelConfig(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16,
        num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e6, qk_norm=True,
        tie_embeddings=True, context_length=40960,
    ),
    "qwen3_8b": ModelConfig(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32,
        num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e6, qk_norm=True,
        context_length=40960,
    ),
    "llama31_8b": ModelConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
        num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, rope_theta=5e5,
        rope_factors=llama3_rope_factors(
            128, 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
        ),
        context_length=131072,
    ),
}  # fmt: skip
