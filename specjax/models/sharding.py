"""One table from parameters to the axes of a device mesh.

The axes are `data` (rows of the batch), `fsdp` (rows too, and parameters are split along it) and
`tensor` (parameters and their products are split along it). The grouped layouts of `qkv` and
`gate_up` shard by K/V head and by MLP column, so that no projection moves data.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
EMBEDDINGS = ("embedding", "head_weight")  # what a drafting model may leave to its target

# Name of a parameter → the mesh axis of each of its axes. What is not here is replicated.
LAYOUT: dict[str, tuple[str | None, ...]] = {
    "embedding": ("tensor", "fsdp"),
    "head_weight": ("tensor", "fsdp"),
    "qkv": ("fsdp", "tensor", None, None),
    "qkv_bias": ("tensor", None, None),
    "attention_out": ("tensor", None, None, "fsdp"),
    "gate_up": ("fsdp", None, "tensor"),
    "down": ("tensor", "fsdp"),
    "fusion": ("fsdp", "tensor"),
}


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh of all devices; `data` = −1 takes what the others leave.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.device_count()
    if data == -1:
        data = devices // (fsdp * tensor)
    if min(data, fsdp, tensor) < 1 or data * fsdp * tensor != devices:
        raise ValueError(
            f"mesh data={data} × fsdp={fsdp} × tensor={tensor} does not make {devices} devices"
        )
    return jax.make_mesh((data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * 3)


def name_of(path: tuple) -> str:
    """Name of the parameter at the end of a path of a tree."""
    return str(getattr(path[-1], "key", path[-1]))


def param_shardings(params: Any, mesh: Mesh) -> Any:
    """The `NamedSharding` of every array, or shape, of a tree of params.

    An axis that its mesh axis does not divide is replicated, which the log says once a parameter name.
    """
    told = set()

    def one(path: tuple, leaf: Any) -> NamedSharding:
        name = name_of(path)
        spec = []
        for size, axis in zip(leaf.shape, LAYOUT.get(name, (None,) * leaf.ndim), strict=True):
            if axis and size % mesh.shape[axis]:
                if (name, axis) not in told:
                    logging.getLogger(__name__).warning(
                        "%s %s is not split along %s: %d does not divide by %d",
                        name, leaf.shape, axis, size, mesh.shape[axis],
                    )  # fmt: skip
                told.add((name, axis))
                axis = None
            spec.append(axis)
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(one, params)


def batch_sharding(mesh: Mesh, rows: int, *, leading: int = 0) -> NamedSharding:
    """Rows of a batch over `data` and `fsdp`, behind `leading` axes that are not split.

    Raises:
      ValueError: the mesh does not divide the rows.
    """
    ways = math.prod(mesh.shape[axis] for axis in ("data", "fsdp"))
    if rows % ways:
        raise ValueError(f"a batch of {rows} rows does not divide by data × fsdp = {ways}")
    return NamedSharding(mesh, PartitionSpec(*[None] * leading, ("data", "fsdp")))
