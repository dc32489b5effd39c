"""Tiny models and where the real one is, for all tests."""

from __future__ import annotations

import dataclasses
import gc
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

from specjax.checkpoints import download
from specjax.models.config import ModelConfig
from specjax.models.target import Target, random_target

TINY = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_embeddings=False,
    context_length=4096,
)


# Of child processes: one device, and no more optimisation than programs that run once are worth.
QUICK = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory):
    """A folder that all processes of this run of the tests share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def compile_cache(shared_folder):
    """Programs compiled once a run, by whichever process, even where a test clears jax's own caches."""
    folder = shared_folder / "xla"
    folder.mkdir(exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(autouse=True)
def quick_compiles(request):
    """Programs of tiny models run for less time than optimising them takes."""
    jax.config.update("jax_disable_most_optimizations", "smollm2" not in request.fixturenames)


@pytest.fixture(autouse=True)
def room_for_programs():
    """Forgets compiled programs before the system's limit of memory maps, 65,530 a process, ends it."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
        gc.collect()


def random_with_large_weights(config: ModelConfig) -> Target:
    """Weights large enough that greedy text is varied, loops now and then, and stays far from ties."""
    target = random_target(config, seed=1)
    params = jax.tree.map(lambda x: 10 * x if x.ndim > 1 else x, target.params)
    return dataclasses.replace(target, params=params)


@pytest.fixture(scope="session")
def tiny() -> Target:
    """A random Llama of 3 layers with grouped queries."""
    return random_with_large_weights(TINY)


@pytest.fixture(scope="session")
def smollm2() -> Target:
    """SmolLM2-135M-Instruct in float32, where its file is."""
    path = download.packaged_path("smollm2")
    if not path.exists():
        pytest.skip(f"SmolLM2 is not at {path}; `make demo` fetches it")
    from specjax.checkpoints.load import load_target

    return load_target(path, dtype=np.float32)
