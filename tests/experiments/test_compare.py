"""`experiments.compare` as a user runs it, with seconds of training."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time

import pytest

from tests.checkpoints.test_load import TEMPLATE

# What `configs/` trains, for a model of 4 layers and 61 tokens.
CONFIG = """
from configs import common

def get_config(mode=""):
    config = common.for_mode(common.get_config(), "runlocal")
    config.target = {target!r}
    config.data.held_out = 0.3
    config.data.template_options = {{"longer": {longer}}}
    config.features.dtype = "float32"
    config.drafter = {drafter!r}
    return config
"""
DRAFTERS = {
    "draft_lm": {"name": "draft_lm", "num_layers": 1, "num_draft_tokens": 2},
    "dflash": {"name": "dflash", "mask_token": 3, "num_layers": 1, "block_size": 3, "num_taps": 1},
}


def config_file(folder, model, name, longer=True):
    path = folder / f"{name}.py"
    path.write_text(CONFIG.format(target=str(model), drafter=DRAFTERS[name], longer=longer))
    return path


@pytest.mark.slow
def test_same_time_same_features_one_report(run, model, text, tmp_path):
    configs = [f"--train={config_file(tmp_path, model, name)}" for name in DRAFTERS]
    (tmp_path / "p.jsonl").write_text('{"turns": ["abab"]}\n{"turns": ["he he"]}\n')
    arguments = [
        *configs, f"--data={text}", f"--workdir={tmp_path / 'fight'}",
        f"--prompts={tmp_path}/p.jsonl", "--max_new_tokens=8", "--temperature=0",
    ]  # fmt: skip
    done = run("compare", *arguments, "--minutes=0.02")
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "fight" / "plan.json").read_text())
    for name, figures in plan["drafters"].items():
        assert figures["steps"] == max(1, round(1.2 / figures["seconds_a_step"]))
        lines = (tmp_path / "fight" / name / "metrics.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["step"] == figures["steps"]
    rows = json.loads((tmp_path / "fight" / "evaluation.json").read_text())["rows"]
    assert len(rows) == 3 and {row["identical"] for row in rows} == {"yes"}
    assert [row["num_draft_tokens"] for row in rows[1:]] == [2, 2]  # as the configs have it
    report = (tmp_path / "fight" / "report.md").read_text()
    for name in DRAFTERS:
        assert report.count(f"| {name} |") == 2
    assert f"{rows[0]['tau']:.2f} (" in report and "| ngram |" in report
    assert (tmp_path / "fight" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "fight" / "features" / "manifest.json").exists()
    asked = hashlib.sha256(f"{{% set longer = true %}}\n{TEMPLATE}".encode()).hexdigest()[:16]
    learnt = json.loads((tmp_path / "fight" / "dflash" / "drafter" / "specjax.json").read_text())
    assert [x["template_hash"] for x in (learnt, rows[0]["identity"])] == [asked] * 2
    again = run("compare", *arguments, "--minutes=0.02")  # nothing left but the report
    assert again.returncode == 0 and "step 1/" not in again.stdout
    other = run("compare", *arguments, "--minutes=1")
    assert other.returncode == 1 and "minutes 0.02 (now 1.0)" in other.stderr
    unfit = run(
        "compare", *arguments, f"--workdir={tmp_path / 'new'}", "--temperature=1",
        "--rule=tree_traversal",
    )  # fmt: skip
    assert unfit.returncode == 1 and "tree_traversal verifies sampled trees" in unfit.stderr
    assert not list((tmp_path / "new").glob("*/metrics.jsonl"))
    config_file(tmp_path, model, "dflash", longer=False)
    edited = run("compare", *arguments, "--minutes=0.02")
    assert edited.returncode == 1 and "plan.json is of configs" in edited.stderr
    differ = run("compare", *arguments, f"--workdir={tmp_path / 'new'}")
    assert differ.returncode == 1 and 'with template options {"longer": false}' in differ.stderr


@pytest.mark.slow
def test_sigterm_ends_the_training_that_runs(environment, model, text, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"turns": ["abab"]}\n')
    arguments = [
        f"--train={config_file(tmp_path, model, 'draft_lm')}", f"--data={text}", "--minutes=2",
        f"--prompts={tmp_path}/p.jsonl", f"--workdir={tmp_path / 'fight'}",
    ]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "experiments.compare", *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        while not (tmp_path / "fight" / "draft_lm" / "metrics.jsonl").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        process.terminate()
        told = process.stderr.read()
    assert process.returncode == 1 and "experiments.distill was asked to end early" in told
    assert list((tmp_path / "fight" / "draft_lm" / "checkpoints" / "last").iterdir())
