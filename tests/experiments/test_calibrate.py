"""`python -m experiments.calibrate` on a tiny model."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import specjax
from specjax import drafters
from specjax.drafters import dspark


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """A DSpark drafter at random, exported."""
    target = specjax.load_target(str(model))
    counts = np.zeros(target.config.vocab_size, int)
    loaded = dspark.from_config(
        target, 0, counts, mask_token=target.config.vocab_size - 1, num_layers=1, block_size=2,
        taps=(1,), markov_rank=4,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("dspark")
    drafters.export(dataclasses.replace(loaded, name="dspark"), target, path)
    return path


def prompts(tmp_path, count):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"turns": ["he {n} hello"]}}\n' for n in range(count)))
    return path


@pytest.mark.slow
def test_temperatures_are_written_with_the_drafter(run, model, folder, tmp_path):
    out, figures, plot = (tmp_path / name for name in ("calibrated", "out.json", "out.png"))
    done = run(
        "calibrate", f"--target={model}", f"--drafter={folder}", f"--out={out}", "--batch=2",
        f"--prompts={prompts(tmp_path, 4)}", "--max_new_tokens=24", f"--json={figures}",
        f"--plot={plot}",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(figures.read_text())["rows"]
    config = json.loads((out / "config.json").read_text())
    assert config["confidence_temperatures"] == [row["temperature"] for row in rows]
    assert [row["draft"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 <= row["error_after"] <= 1 and row["cycles"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000
    again = run(
        "generate", f"--target={model}", f"--drafter={out}@2+scheduler", "--compare",
        "--prompt=he he", "--max_new_tokens=12", f"--json={figures}",
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert json.loads(figures.read_text())["identical"] == "yes"


def test_what_cannot_be_calibrated_is_told(run, model, tmp_path):
    done = run(
        "calibrate", f"--target={model}", "--drafter=ngram", f"--out={tmp_path / 'x'}",
        f"--prompts={prompts(tmp_path, 2)}",
    )  # fmt: skip
    assert done.returncode == 1 and "is no DSpark drafter" in done.stderr
