"""Architecture of a target, read from a Hugging Face `config.json` or from GGUF metadata."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

SUPPORTED = ("llama", "qwen2", "qwen3", "gemma3_text")
GGUF_NAMES = {"gemma3": "gemma3_text"}  # where GGUF's name of an architecture differs


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
      vocab_size, hidden_size, num_layers: V, D, L.
      intermediate_size: F, width of the gated MLP.
      num_heads, num_kv_heads, head_dim: H query heads in G groups that share a K/V head.
      rms_norm_eps: added to the mean square before its root.
      rope_theta: base of the rotary frequencies theta^(−2i/head_dim).
      rope_factors: divisor of each of the head_dim/2 frequencies (long-context scaling), or ()
        for none. One form for what config.json describes and GGUF stores.
      qkv_bias: the attention projections have biases (Qwen2).
      qk_norm: queries and keys are normed per head, before their rotation (Qwen3, Gemma 3).
      post_norms: attention and MLP outputs are normed before they are added (Gemma 3).
      activation: of the MLP's gate, `silu` or `gelu_tanh`.
      embedding_scale: factor of the embedding's rows.
      query_scale: of the attention scores; 0 stands for head_dim^−½.
      sliding_window: tokens that a sliding layer sees, itself included.
      sliding_layers: which layers are sliding; () for none.
      sliding_rope_theta: base of the rotary frequencies of the sliding layers.
      tie_embeddings: the head is the embedding.
      context_length: longest sequence the model was made for.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_factors: tuple[float, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    activation: str = "silu"
    embedding_scale: float = 1.0
    query_scale: float = 0.0
    sliding_window: int = 0
    sliding_layers: tuple[bool, ...] = ()
    sliding_rope_theta: float = 10000.0
    tie_embeddings: bool = False
    context_length: int = 2048

    def __post_init__(self):
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "head_dim", "context_length",
        ):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"model config: {name} must be a positive integer, got {value!r}")
        factors = [("rope_factors", factor) for factor in self.rope_factors]
        for name, value in [
            ("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta), *factors,
        ]:  # fmt: skip
            if not isinstance(value, float) or not 0 < value < math.inf:
                raise ValueError(f"model config: {name} must be a positive number, got {value!r}")
        if type(self.tie_embeddings) is not bool:
            raise ValueError(
                f"model config: tie_embeddings must be true or false, got {self.tie_embeddings!r}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model config: num_heads {self.num_heads} is not a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )
        if self.rope_factors and len(self.rope_factors) != self.head_dim // 2:
            raise ValueError(
                f"model config: {len(self.rope_factors)} RoPE factors for head_dim "
                f"{self.head_dim}, expected {self.head_dim // 2}"
            )
        if self.sliding_layers and len(self.sliding_layers) != self.num_layers:
            raise ValueError(
                f"model config: {len(self.sliding_layers)} layer types for {self.num_layers} layers"
            )


def drafting_layers(
    target: ModelConfig,
    num_layers: int,
    *,
    vocab_size: int = 0,
    intermediate_size: int = 0,
    qk_norm: bool = False,
) -> ModelConfig:
    """Plain layers of a target's sizes and rotation, for drafters that read its features.

    No biases, windows, norms behind or scales of the target's own: what a Llama has, or with
    `qk_norm` a Qwen3. Sizes that are 0 are the target's.
    """
    return ModelConfig(
        vocab_size=vocab_size or target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        rope_factors=target.rope_factors,
        qk_norm=qk_norm,
        context_length=target.context_length,
    )


def llama3_rope_factors(
    head_dim: int,
    theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context: int,
) -> tuple[float, ...]:
    """Frequency divisors of Llama 3.1's RoPE scaling (Llama 3 report, §3.4.2; `llama3` in HF).

    Wavelengths above original_context / low_freq_factor are stretched by `factor`, those below
    original_context / high_freq_factor are kept, those between are blended linearly in
    original_context / wavelength.
    """
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        ratio = original_context / wavelength
        kept = (ratio - low_freq_factor) / (high_freq_factor - low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        factors.append(1.0 / ((1.0 - kept) / factor + kept))
    return tuple(factors)


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads a Hugging Face `config.json`, of transformers 4 (`rope_theta`, `rope_scaling`) or 5.

    Raises:
      ValueError: the architecture, or one of its options, is not supported (which is named), or a
        key is missing.
    """
    architecture = raw.get("model_type")
    _check_architecture(architecture)
    gemma = architecture == "gemma3_text"
    for key, expected in (
        ("hidden_activation" if gemma else "hidden_act", "gelu_pytorch_tanh" if gemma else "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("partial_rotary_factor", 1.0),
        ("use_sliding_window", False),
        ("use_bidirectional_attention", False),
        ("attn_logit_softcapping", None),
        ("final_logit_softcapping", None),
    ):
        if raw.get(key) not in (None, expected):
            raise ValueError(f"config.json: {key}={raw[key]!r} is not supported, only {expected!r}")
    try:
        hidden_size, num_heads = raw["hidden_size"], raw["num_attention_heads"]
        head_dim = raw.get("head_dim") or hidden_size // num_heads
        family = _gemma3_from_hf(raw) if gemma else _FAMILIES[architecture]
        theta, factors = _rope_from_hf(raw, head_dim)
        return ModelConfig(
            vocab_size=raw["vocab_size"],
            hidden_size=hidden_size,
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=raw.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(theta),
            rope_factors=factors,
            tie_embeddings=raw.get("tie_word_embeddings", gemma),
            context_length=raw.get("max_position_embeddings") or 2048,
            **family,
        )
    except KeyError as error:
        raise ValueError(f"config.json: key {error.args[0]!r} is missing") from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"config.json: a value cannot be used: {error}") from None


_FAMILIES = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}


def _check_architecture(architecture: Any) -> None:
    if architecture not in SUPPORTED:
        raise ValueError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(SUPPORTED)}"
        )


def _gemma3(
    hidden_size: int, num_layers: int, window: int, pattern: int | list[bool]
) -> dict[str, Any]:
    """What sets Gemma 3 apart.

    `pattern`: which layers slide, or n where every n-th is global and the others slide.
    """
    if isinstance(pattern, int):
        pattern = [(i + 1) % pattern > 0 for i in range(num_layers)]
    return {
        "qk_norm": True,
        "post_norms": True,
        "activation": "gelu_tanh",
        "embedding_scale": hidden_size**0.5,
        "sliding_window": window,
        "sliding_layers": tuple(map(bool, pattern)),
    }


def _gemma3_from_hf(raw: Mapping[str, Any]) -> dict[str, Any]:
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    if raw.get("layer_types"):
        pattern = [kind == "sliding_attention" for kind in raw["layer_types"]]
    fields = _gemma3(raw["hidden_size"], raw["num_hidden_layers"], raw["sliding_window"], pattern)
    local = (raw.get("rope_parameters") or {}).get("sliding_attention") or {}
    theta = local.get("rope_theta") or raw.get("rope_local_base_freq") or 10000.0
    query_scale = raw.get("query_pre_attn_scalar", 256) ** -0.5
    return fields | {"sliding_rope_theta": theta, "query_scale": query_scale}


def _rope_from_hf(raw: Mapping[str, Any], head_dim: int) -> tuple[float, tuple[float, ...]]:
    """Base and frequency divisors; transformers 5 keeps both in `rope_parameters`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)  # Gemma 3: one for each kind of layer
    default = 1e6 if raw["model_type"] == "gemma3_text" else 10000.0
    theta = rope.get("rope_theta", raw.get("rope_theta", default))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, ()
    if kind == "linear":
        return theta, (float(rope["factor"]),) * (head_dim // 2)
    if kind == "llama3":
        return theta, llama3_rope_factors(
            head_dim,
            theta,
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_context=rope["original_max_position_embeddings"],
        )
    raise ValueError(
        f"config.json: RoPE type {kind!r} is not supported; supported: default, linear, llama3"
    )


def config_from_gguf(
    metadata: Mapping[str, Any],
    *,
    vocab_size: int,
    tied: bool,
    rope_factors: tuple[float, ...] = (),
) -> ModelConfig:
    """Reads GGUF metadata (`general.architecture`, and for instance `llama.*`).

    Args:
      metadata: plain Python values by key.
      vocab_size: rows of the embedding.
      tied: the file has no `output.weight`.
      rope_factors: the file's `rope_freqs.weight`, if it has one.

    Raises:
      ValueError: the architecture or its RoPE scaling is not supported, or a key is missing.
    """
    name = metadata.get("general.architecture")
    architecture = GGUF_NAMES.get(name, name)
    _check_architecture(architecture)

    def get(key, default=None):
        value = metadata.get(f"{name}.{key}", default)
        if value is None:
            raise ValueError(f"GGUF metadata: key '{name}.{key}' is missing")
        return value

    hidden_size, num_heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden_size // num_heads)
    # llama3 scaling is not among these types: it is stored as rope_freqs.weight.
    scaling = get("rope.scaling.type", "none")
    if scaling == "linear":
        rope_factors = (float(get("rope.scaling.factor")),) * (head_dim // 2)
    elif scaling != "none":
        raise ValueError(f"GGUF metadata: RoPE scaling {scaling!r} is not supported")
    rotated = get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(f"GGUF metadata: RoPE on {rotated} of {head_dim} dims is not supported")
    gemma = architecture == "gemma3_text"
    if gemma:
        pattern = get("attention.sliding_window_pattern", 6)
        window = get("attention.sliding_window")
        family = _gemma3(hidden_size, get("block_count"), window, pattern)
        if get("block_count") == 62:  # 27B, whose scale no key of the file says
            family["query_scale"] = (hidden_size / num_heads) ** -0.5
    else:
        family = _FAMILIES[architecture]
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=get("feed_forward_length"),
        num_layers=get("block_count"),
        num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 1e6 if gemma else 10000.0),
        rope_factors=rope_factors,
        tie_embeddings=tied,
        context_length=get("context_length", 2048),
        **family,
    )
