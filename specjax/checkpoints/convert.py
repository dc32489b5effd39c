"""Tensors of a checkpoint, by their Hugging Face names → params of `models.transformer`.

Projections that read the same input become one weight: q, k and v grouped by K/V head
`[D, G, H/G + 2, head_dim]`, gate and up `[D, 2, F]`. Few large products beat many small ones, and
the grouped axes shard without moving data.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.config import ModelConfig
from specjax.types import Progress


class Tensor(NamedTuple):
    """A tensor of a checkpoint that has not been read yet."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


class TensorRecipe(NamedTuple):
    """How one parameter is stored: in which tensors, how they become its array, and the inverse.

    `wide` parameters are float32 in a model of any type.
    """

    path: tuple[Any, ...]
    sources: dict[str, tuple[int, ...]]
    combine: Callable[..., np.ndarray]
    split: Callable[[np.ndarray], Sequence[np.ndarray]]
    wide: bool = False


def norm_recipe(path: tuple[Any, ...], name: str, size: int, offset: float = 0.0) -> TensorRecipe:
    """A norm's scale from the weight of that name; `offset` is added to what is stored."""
    add = np.float32(offset)
    return TensorRecipe(
        (*path, "scale"), {f"{name}.weight": (size,)},
        lambda x: x.astype(np.float32) + add, lambda scale: [scale - add], wide=True,
    )  # fmt: skip


def table_recipe(path: tuple[Any, ...], name: str, shape: tuple[int, int]) -> TensorRecipe:
    """An embedding or a head, as it is stored."""
    return TensorRecipe(path, {f"{name}.weight": shape}, lambda x: x, lambda x: [x])


def linear_recipe(path: tuple[Any, ...], name: str, inputs: int, outputs: int) -> TensorRecipe:
    """A projection, stored `[out, in]`."""
    return TensorRecipe(path, {f"{name}.weight": (outputs, inputs)}, np.transpose, lambda x: [x.T])


def model_recipes(config: ModelConfig, norm_offset: float) -> Iterator[TensorRecipe]:
    """All parameters of a `models.transformer.Transformer`."""
    depth = config.hidden_size
    table = (config.vocab_size, depth)
    yield table_recipe(("embedding",), "model.embed_tokens", table)
    for i in range(config.num_layers):
        yield from block_recipes(config, ("blocks", i), f"model.layers.{i}", norm_offset)
    yield norm_recipe(("final_norm",), "model.norm", depth, norm_offset)
    if not config.tie_embeddings:
        yield table_recipe(("head_weight",), "lm_head", table)


def block_recipes(
    config: ModelConfig,
    path: tuple[Any, ...],
    name: str,
    norm_offset: float = 0.0,
    *,
    qkv_inputs: int = 1,
) -> Iterator[TensorRecipe]:
    """The parameters of a `models.transformer.Block` at a path, in the tensors under a name."""
    depth, width, head = config.hidden_size, config.intermediate_size, config.head_dim
    groups, per_group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    attention = f"{name}.self_attn"

    def norm(parameter: str, tensor: str, size: int = depth) -> TensorRecipe:
        return norm_recipe((*path, parameter), tensor, size, norm_offset)

    def fuse_qkv(*projections: np.ndarray) -> np.ndarray:
        parts = [x.reshape(groups, -1, head, *x.shape[1:]) for x in projections]
        fused = np.concatenate(parts, axis=1)
        return np.moveaxis(fused, 3, 0) if fused.ndim == 4 else fused  # weight, bias

    def split_qkv(fused: np.ndarray) -> list[np.ndarray]:
        fused = np.moveaxis(fused, 0, 3) if fused.ndim == 4 else fused
        parts = fused[:, :-2], fused[:, -2], fused[:, -1]
        return [x.reshape(-1, *fused.shape[3:]) for x in parts]

    sizes = {"q": config.num_heads * head, "k": groups * head, "v": groups * head}
    yield norm("attention_norm", f"{name}.input_layernorm")
    inputs = qkv_inputs * depth
    qkv = {f"{attention}.{p}_proj.weight": (size, inputs) for p, size in sizes.items()}
    yield TensorRecipe((*path, "qkv"), qkv, fuse_qkv, split_qkv)
    if config.qkv_bias:
        bias = {f"{attention}.{p}_proj.bias": (size,) for p, size in sizes.items()}
        yield TensorRecipe((*path, "qkv_bias"), bias, fuse_qkv, split_qkv)
    if config.qk_norm:
        yield norm("query_norm", f"{attention}.q_norm", head)
        yield norm("key_norm", f"{attention}.k_norm", head)
    yield TensorRecipe(
        (*path, "attention_out"),
        {f"{attention}.o_proj.weight": (depth, config.num_heads * head)},
        lambda x: x.T.reshape(groups, per_group, head, depth),
        lambda x: [x.reshape(-1, depth).T],
    )
    if config.post_norms:
        yield norm("attention_post_norm", f"{name}.post_attention_layernorm")
        yield norm("mlp_norm", f"{name}.pre_feedforward_layernorm")
        yield norm("mlp_post_norm", f"{name}.post_feedforward_layernorm")
    else:
        yield norm("mlp_norm", f"{name}.post_attention_layernorm")
    yield TensorRecipe(
        (*path, "gate_up"),
        {f"{name}.mlp.{p}_proj.weight": (width, depth) for p in ("gate", "up")},
        lambda gate, up: np.stack([gate.T, up.T], axis=1),
        lambda x: [x[:, 0].T, x[:, 1].T],
    )
    yield linear_recipe((*path, "down"), f"{name}.mlp.down_proj", width, depth)


def _check(
    recipes: list[TensorRecipe], tensors: Mapping[str, Tensor], redundant: Container[str]
) -> None:
    """Raises ValueError that names the missing, unexpected and misshaped tensors."""
    expected = {name: shape for recipe in recipes for name, shape in recipe.sources.items()}
    extra = [
        name
        for name in tensors
        if name not in expected
        and name not in redundant
        and not name.endswith("rotary_emb.inv_freq")  # old Llama files have them
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
    *,
    norm_offset: float = 0.0,
) -> dict[str, Any]:
    """Reads a checkpoint's tensors into params, one parameter in memory at a time.

    Args:
      config: the architecture.
      tensors: by Hugging Face name (`model.layers.0.self_attn.q_proj.weight`, `[out, in]`).
      dtype: of the params; norm scales are float32.
      progress: told how many parameters are done.
      norm_offset: added to the stored norm weights (1 where they are stored around 0, as Gemma's).

    Raises:
      ValueError: tensors are missing, unexpected or misshaped; they are named.
    """
    # A tied file may store its head twice.
    redundant = {"lm_head.weight"} if config.tie_embeddings else ()
    return assemble(
        model_recipes(config, norm_offset), tensors, dtype, progress, redundant=redundant
    )


def assemble(
    recipes: Iterable[TensorRecipe],
    tensors: Mapping[str, Tensor],
    dtype: jax.typing.DTypeLike,
    progress: Progress | None = None,
    *,
    redundant: Container[str] = (),
) -> dict[str, Any]:
    """Params from recipes; the other arguments are those of `convert`.

    `redundant` tensors may be there and are not read.
    """
    recipes = list(recipes)
    _check(recipes, tensors, redundant)
    flat = {}
    for done, recipe in enumerate(recipes):
        if progress:
            progress("loading weights", done, len(recipes))
        array = recipe.combine(*(tensors[name].read() for name in recipe.sources))
        kind = jnp.float32 if recipe.wide else dtype
        flat[recipe.path] = jnp.asarray(np.ascontiguousarray(array), kind)
    if progress:
        progress("loading weights", len(recipes), len(recipes))
    return nest(flat)


def disassemble(recipes: Iterable[TensorRecipe], params: Any) -> dict[str, np.ndarray]:
    """The inverse of `assemble`: tensors by name, as they are stored."""
    tensors = {}
    for recipe in recipes:
        leaf = functools.reduce(operator.getitem, recipe.path, params)
        for name, part in zip(recipe.sources, recipe.split(np.asarray(leaf)), strict=True):
            tensors[name] = np.ascontiguousarray(part)
    return tensors


def is_copy(table: jax.Array, original: jax.Array) -> bool:
    """Whether two tables are the same but for the rounding to a narrower type."""
    if table.shape != original.shape:
        return False
    table, original = table.astype(jnp.float32), original.astype(jnp.float32)
    return bool(jnp.sum((table - original) ** 2) <= 1e-4 * jnp.sum(original**2))


def nest(flat: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """{("blocks", 0, "qkv"): x} → {"blocks": {0: {"qkv": x}}}."""
    tree: dict[str, Any] = {}
    for (*parents, leaf), value in flat.items():
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = value
    return tree
