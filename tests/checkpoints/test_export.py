"""A model exported is the model that was loaded."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from specjax.checkpoints.export import export_folder
from specjax.checkpoints.load import load_target

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
FAMILIES = ("llama_tied", "llama_untied", "llama3_scaled", "qwen2", "qwen3", "gemma3")


@pytest.mark.parametrize("family", FAMILIES)
def test_export_and_load_again(family, tmp_path):
    target = load_target(GOLDEN / family, dtype=np.float32)
    export_folder(target, tmp_path)
    again = load_target(tmp_path, dtype=np.float32)
    assert again.config == target.config
    assert again.stop_tokens == target.stop_tokens
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-7), target.params, again.params
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_an_export(family, tmp_path):
    torch = pytest.importorskip("torch", reason="the extra `parity` is not installed")
    from transformers import AutoModelForCausalLM

    export_folder(load_target(GOLDEN / family, dtype=np.float32), tmp_path)
    expected = np.load(GOLDEN / family / "expected.npz")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(expected["tokens"]).long()).logits.numpy()
    assert np.abs(logits - expected["logits"]).max() <= 1e-4


def test_factors_that_config_json_cannot_say(tmp_path):
    target = load_target(GOLDEN / "llama3_scaled", dtype=np.float32)
    factors = tuple(np.linspace(1, 7, len(target.config.rope_factors)).tolist())
    config = dataclasses.replace(target.config, rope_factors=factors)
    target = dataclasses.replace(target, config=config)
    with pytest.raises(ValueError, match="RoPE factors that differ by frequency"):
        export_folder(target, tmp_path)
