"""Tensors of a checkpoint, by their Hugging Face names → params of `models.transformer`.

Projections that read the same input become one weight: q, k and v grouped by K/V head
`[D, G, H/G + 2, head_dim]`, gate and up `[D, 2, F]`. Few large products beat many small ones, and
the grouped axes shard without moving data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.config import ModelConfig

Progress = Callable[[str, int, int], None]  # (what, done, total)


class Tensor(NamedTuple):
    """A tensor of a checkpoint that has not been read yet."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


class _Recipe(NamedTuple):
    """How one parameter is made: the tensors it needs, and how they become its array."""

    path: tuple[Any, ...]
    sources: dict[str, tuple[int, ...]]
    combine: Callable[..., np.ndarray]


def _recipes(config: ModelConfig) -> Iterator[_Recipe]:
    depth, width, head = config.hidden_size, config.intermediate_size, config.head_dim
    groups, per_group = config.num_kv_heads, config.num_heads // config.num_kv_heads

    def same(x):
        return x

    def fuse_qkv(*projections):
        parts = [x.reshape(groups, -1, head, depth) for x in projections]
        return np.concatenate(parts, axis=1).transpose(3, 0, 1, 2)

    def output(x):
        return x.T.reshape(groups, per_group, head, depth)

    def fuse_gate_up(gate, up):
        return np.stack([gate.T, up.T], axis=1)

    yield _Recipe(("embedding",), {"model.embed_tokens.weight": (config.vocab_size, depth)}, same)
    for i in range(config.num_layers):
        hf, block = f"model.layers.{i}", ("blocks", i)
        norm = {f"{hf}.input_layernorm.weight": (depth,)}
        yield _Recipe((*block, "attention_norm", "scale"), norm, same)
        qkv = {
            f"{hf}.self_attn.q_proj.weight": (config.num_heads * head, depth),
            f"{hf}.self_attn.k_proj.weight": (groups * head, depth),
            f"{hf}.self_attn.v_proj.weight": (groups * head, depth),
        }
        yield _Recipe((*block, "qkv"), qkv, fuse_qkv)
        out = {f"{hf}.self_attn.o_proj.weight": (depth, config.num_heads * head)}
        yield _Recipe((*block, "attention_out"), out, output)
        norm = {f"{hf}.post_attention_layernorm.weight": (depth,)}
        yield _Recipe((*block, "mlp_norm", "scale"), norm, same)
        gate_up = {
            f"{hf}.mlp.gate_proj.weight": (width, depth),
            f"{hf}.mlp.up_proj.weight": (width, depth),
        }
        yield _Recipe((*block, "gate_up"), gate_up, fuse_gate_up)
        down = {f"{hf}.mlp.down_proj.weight": (depth, width)}
        yield _Recipe((*block, "down"), down, np.transpose)
    yield _Recipe(("final_norm", "scale"), {"model.norm.weight": (depth,)}, same)
    if not config.tie_embeddings:
        yield _Recipe(("head_weight",), {"lm_head.weight": (config.vocab_size, depth)}, same)


def _check(config: ModelConfig, recipes: list[_Recipe], tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError that names the missing, unexpected and misshaped tensors."""
    expected = {name: shape for recipe in recipes for name, shape in recipe.sources.items()}
    # Old Llama files store their rotary frequencies; a tied file may store its head twice.
    redundant = {"lm_head.weight"} if config.tie_embeddings else set()
    extra = [
        name
        for name in tensors
        if name not in expected
        and name not in redundant
        and not name.endswith("rotary_emb.inv_freq")
    ]
    faults = {
        "missing": [name for name in expected if name not in tensors],
        "unexpected": extra,
        "misshaped": [
            f"{name} {list(tensors[name].shape)}, expected {list(shape)}"
            for name, shape in expected.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ],
    }
    told = [
        f"{kind}: {', '.join(names[:4])}{f' and {len(names) - 4} more' if names[4:] else ''}"
        for kind, names in faults.items()
        if names
    ]
    if told:
        raise ValueError(f"the checkpoint's tensors do not fit its config; {'; '.join(told)}")


def convert(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    dtype: jax.typing.DTypeLike,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint's tensors into params, one parameter in memory at a time.

    Args:
      config: the architecture.
      tensors: by Hugging Face name (`model.layers.0.self_attn.q_proj.weight`, `[out, in]`).
      dtype: of the params.
      progress: told how many parameters are done.

    Raises:
      ValueError: tensors are missing, unexpected or misshaped; they are named.
    """
    recipes = list(_recipes(config))
    _check(config, recipes, tensors)
    flat = {}
    for done, recipe in enumerate(recipes):
        if progress:
            progress("loading weights", done, len(recipes))
        array = recipe.combine(*(tensors[name].read() for name in recipe.sources))
        flat[recipe.path] = jnp.asarray(np.ascontiguousarray(array), dtype)
    if progress:
        progress("loading weights", len(recipes), len(recipes))
    return nest(flat)


def nest(flat: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """{("blocks", 0, "qkv"): x} → {"blocks": {0: {"qkv": x}}}."""
    tree: dict[str, Any] = {}
    for (*parents, leaf), value in flat.items():
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = value
    return tree
