"""Qwen2.5-Coder 0.5B and 1.5B from their GGUF files, against the logits of `transformers`."""

from __future__ import annotations

import json
import os
import pathlib

import numpy as np
import pytest

from specjax.checkpoints.load import load_target
from tests.fakes import all_logits

GOLDEN = json.loads(
    (pathlib.Path(__file__).parent.parent / "golden/qwen_gguf.json").read_text("utf-8")
)
FILES = [name for name in GOLDEN if name.endswith(".gguf")]


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_logits_equal_transformers(name):
    path = pathlib.Path(os.environ.get("SPECJAX_TEST_MODELS", ".")) / name
    if not path.exists():
        pytest.skip(f"{name} is not in the folder that SPECJAX_TEST_MODELS names")
    logits = all_logits(load_target(path, dtype=np.float32), GOLDEN["prompt"])
    expected = GOLDEN[name]
    assert logits.argmax(-1).tolist() == expected["argmax"]
    largest = logits.max(-1, keepdims=True)
    sums = np.log(np.exp(logits - largest).sum(-1)) + largest[:, 0]
    np.testing.assert_allclose(sums, expected["logsumexp"], atol=2e-3)
    np.testing.assert_allclose(logits[:, :: GOLDEN["stride"]], expected["logits"], atol=2e-3)
