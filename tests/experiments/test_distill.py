"""`experiments.distill` as a user runs it: train, go on, export, decode with what was exported."""

from __future__ import annotations

import json

import pytest

from specjax.checkpoints.load import load_target

CONFIG = "configs/smollm2_draft_lm.py:runlocal"


@pytest.fixture(scope="module")
def distill(run, model, text):
    def distill(workdir, *arguments, config=CONFIG):
        return run(
            "distill", f"--config={config}", f"--workdir={workdir}", f"--config.target={model}",
            f"--config.data.path={text}", "--config.drafter.num_layers=1", "--config.total_steps=6",
            "--config.data.held_out=0.3", *arguments,
        )  # fmt: skip

    return distill


@pytest.mark.slow
def test_train_export_decode(distill, run, model, text, tmp_path):
    """Online and from cached features the same curve; the export decodes to plain decoding's text."""
    done = distill(tmp_path / "online")
    assert done.returncode == 0, done.stderr
    assert "8 of 8 examples, 0 longer than 256 tokens" in done.stdout
    cached = f"--config.features.path={tmp_path / 'features'}", "--config.features.dtype=float32"
    assert distill(tmp_path / "cached", *cached).returncode == 0
    online, from_cache = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("online", "cached")
    )
    assert {"held_out/alpha_1", "replayed/tau", "tau_at_0", "tau_at_1"} <= set().union(*online)
    held_out = [[x for x in rows if "held_out/alpha_1" in x] for rows in (online, from_cache)]
    assert held_out[0][0] == pytest.approx(held_out[1][0], rel=1e-5)  # before any step
    again = distill(tmp_path / "online")
    assert again.returncode == 0 and "step 1/" not in again.stdout  # nothing left to do
    folder = tmp_path / "online" / "drafter"
    assert load_target(folder).config.num_layers == 1
    decoded = run(
        "generate", f"--target={model}", f"--drafter={folder}", "--compare", "--prompt=he he",
        "--max_new_tokens=20", f"--json={tmp_path / 'out.json'}",
    )  # fmt: skip
    assert decoded.returncode == 0, decoded.stderr
    assert json.loads((tmp_path / "out.json").read_text())["identical"] == "yes"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": "configs/smollm2_draft_lm.py:runlokal"}, "only :runlocal is known"),
        (["--config.data.batch_size=3"], "3 rows does not divide by 1 hosts × 4 micro-batches"),
        (["--config.optimizer.name=sgd"], "unknown optimizer 'sgd'; known: adamw, muon"),
        (["--config.loss.forward_k=1.0"], "Did you mean"),
        (["--config.data.path=/no/such"], "/no/such"),
        (["--config.drafter.num_layers=9"], "layers, got 9"),
        (["--config.mesh.tensor=2"], "does not make 1 devices"),
        (["--config.data.pth=x"], "Did you mean"),
    ],
)
def test_what_cannot_be_is_one_line(distill, tmp_path, arguments, message):
    options = arguments if isinstance(arguments, dict) else {}
    arguments = [] if options else arguments
    done = distill(tmp_path, *arguments, **options)
    assert done.returncode in (1, 2) and message in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1
