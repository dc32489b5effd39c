"""What weights need: by hand, as loaded, and what is said about it."""

from __future__ import annotations

import logging
import pathlib

import jax
import jax.numpy as jnp
import pytest

from specjax.checkpoints import memory
from specjax.checkpoints.load import load_target
from specjax.models.shapes import SHAPES
from tests.checkpoints.test_load import GOLDEN, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))


def test_weights_of_a_released_model_by_hand():
    # SmolLM2-135M: tied embedding, 30 layers of q + o, k + v, three of the MLP, two norms; a norm.
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
    norms = (2 * 30 + 1) * 576
    matrices = 49152 * 576 + 30 * layer
    count, needed = memory.weights(SHAPES["smollm2_135m"], jnp.bfloat16)
    assert count == matrices + norms == 134_515_008
    assert needed == 2 * matrices + 4 * norms


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["llama_untied", "qwen2", "gemma3"])
def test_weights_are_as_many_bytes_as_are_loaded(name, dtype):
    target = load_target(GOLDEN / name, dtype=dtype)
    leaves = jax.tree.leaves(target.params)
    expected = sum(x.size for x in leaves), sum(x.nbytes for x in leaves)
    assert memory.weights(target.config, dtype) == expected


def test_free_memory_is_known_on_linux():
    known = pathlib.Path("/proc/meminfo").exists()
    assert memory.free() > 2**20 if known else memory.free() is None


def test_told_before_weights_are_read_from_folder_file_and_copy(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(memory, "free", lambda: 3 * memory.GIB)
    path = write_gguf(tmp_path / "m.gguf", GOLDEN / "llama_tied")
    for source in (GOLDEN / "llama_tied", path, path):
        caplog.clear()
        load_target(source, progress=lambda *_: caplog.records or pytest.fail("not told yet"))
        (record,) = caplog.records
        assert record.levelname == "INFO"
        assert record.message.startswith(f"target {source.name}: 0.00 G parameters, 0.00 GiB in fl")
        assert record.message.endswith("(3.0 GiB free)")


@pytest.mark.parametrize(
    ("dtype", "free", "level", "message"),
    [
        (
            jnp.float32, 24, "WARNING",
            "target x: 8.03 G parameters, 29.92 GiB in float32, and 256 KiB a cached token "
            "(24.0 GiB free): they do not fit; load_target(…, dtype='bfloat16') halves them",
        ),
        (
            jnp.bfloat16, 24, "INFO",
            "target x: 8.03 G parameters, 14.96 GiB in bfloat16, and 128 KiB a cached token "
            "(24.0 GiB free)",
        ),
        (
            jnp.bfloat16, 8, "WARNING",
            "target x: 8.03 G parameters, 14.96 GiB in bfloat16, and 128 KiB a cached token "
            "(8.0 GiB free): they do not fit",
        ),
        (
            jnp.bfloat16, None, "INFO",
            "target x: 8.03 G parameters, 14.96 GiB in bfloat16, and 128 KiB a cached token",
        ),
    ],
)  # fmt: skip
def test_what_is_told_of_a_large_model(monkeypatch, caplog, dtype, free, level, message):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(memory, "free", lambda: free and free * memory.GIB)
    memory.tell("x", SHAPES["llama31_8b"], jnp.dtype(dtype))
    assert [(x.levelname, x.message) for x in caplog.records] == [(level, message)]
