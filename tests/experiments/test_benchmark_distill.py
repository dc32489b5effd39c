"""`experiments.benchmark_distill` on a tiny model, beside torch where that is installed."""

from __future__ import annotations

import json

import pytest

from tests.experiments.test_distill import CONFIG


@pytest.mark.slow
def test_all_sides_take_the_same_steps(run, model, text, tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "speed.json"
    done = run(
        "benchmark_distill", f"--config={CONFIG}", f"--workdir={tmp_path / 'run'}",
        f"--config.target={model}", f"--config.data.path={text}", "--config.data.held_out=0.3",
        "--config.drafter.num_layers=1", "--steps=2", "--peer", f"--json={out}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert [row["side"] for row in figures["rows"]] == ["cached", "online", "torch, cached"]
    assert all(row["seconds_a_step"] > 0 and row["peak_bytes"] > 2**27 for row in figures["rows"])
    assert figures["cache"]["rows"] > 0
