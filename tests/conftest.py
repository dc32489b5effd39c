"""Tiny models and where the real one is, for all tests."""

from __future__ import annotations

import dataclasses
import os

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


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory):
    """Programs compiled once a run, even where a test clears jax's own caches."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))


@pytest.fixture(scope="session")
def tiny() -> Target:
    """A random Llama of 3 layers with grouped queries.

    Its weights are large enough that greedy text is varied, loops now and then, and stays far from
    ties.
    """
    target = random_target(TINY, seed=1)
    params = jax.tree.map(lambda x: 10 * x if x.ndim > 1 else x, target.params)
    return dataclasses.replace(target, params=params)


@pytest.fixture(scope="session")
def smollm2() -> Target:
    """SmolLM2-135M-Instruct in float32, where its file is."""
    path = download.packaged_path("smollm2")
    if not path.exists():
        pytest.skip(f"SmolLM2 is not at {path}; `make demo` fetches it")
    from specjax.checkpoints.load import load_target

    return load_target(path, dtype=np.float32)
