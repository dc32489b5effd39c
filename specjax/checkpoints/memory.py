"""What the weights of a target need in memory, told before they are read."""

from __future__ import annotations

import logging
import pathlib

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.config import ModelConfig
from specjax.models.transformer import Transformer

GIB = 2**30


def weights(config: ModelConfig, dtype: jax.typing.DTypeLike) -> tuple[int, int]:
    """Number of parameters of a model, and their bytes."""
    state = nnx.state(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), dtype=dtype)))
    leaves = jax.tree.leaves(state)
    return sum(x.size for x in leaves), sum(x.size * x.dtype.itemsize for x in leaves)


def free() -> int | None:
    """Bytes that are free on the device, or in the machine where that is a CPU; None: unknown."""
    stats = jax.local_devices()[0].memory_stats()
    if stats:
        limit = stats.get("bytes_limit")
        return limit and limit - stats["bytes_in_use"]
    try:
        lines = pathlib.Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return 1024 * next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def tell(name: str, config: ModelConfig, dtype: jnp.dtype) -> None:
    """Logs what a target's weights and each row of its cache need; warns if they cannot fit."""
    count, needed = weights(config, dtype)
    row = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    available = free()
    told = f"target {name}: {count / 1e9:.2f} G parameters, {needed / GIB:.2f} GiB in {dtype.name}"
    told += f", and {row / 1024:.0f} KiB a cached token"
    if available is not None:
        told += f" ({available / GIB:.1f} GiB free)"
    log = logging.getLogger(__name__)
    if available is None or needed <= available:
        log.info(told)
    elif dtype.itemsize < 4:
        log.warning("%s: they do not fit", told)
    else:
        log.warning("%s: they do not fit; load_target(…, dtype='bfloat16') halves them", told)
