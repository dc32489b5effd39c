"""`python -m experiments.doctor` on a tiny model."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import specjax
from specjax import drafters
from specjax.drafters import dspark


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(f'{{"turns": ["{text}"]}}\n' for text in ("a", "abab", "lll")))
    return path


@pytest.fixture
def folder(model, tmp_path):
    """A DSpark drafter at random, exported."""
    target = specjax.load_target(str(model))
    vocab = target.config.vocab_size
    loaded = dspark.from_config(
        target, 0, np.zeros(vocab, int), mask_token=vocab - 1, num_layers=1, block_size=2, taps=(1,),
        markov_rank=4,
    )  # fmt: skip
    drafters.export(dataclasses.replace(loaded, name="dspark"), target, tmp_path / "dspark")
    return tmp_path / "dspark"


def with_manifest(folder, **changes):
    path = folder / "specjax.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_no_drafter_is_nothing_to_examine(run, model, prompts):
    done = run("doctor", f"--target={model}", f"--prompts={prompts}", "--drafter=none")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "doctor: --drafter=none: there is no drafter to examine\n"


@pytest.mark.slow
def test_what_is_wrong_is_told_and_written(run, model, prompts, folder, tmp_path):
    """A chat template that has changed since; the table, the status and the figures say so."""
    figures = tmp_path / "out.json"
    with_manifest(folder, template_hash="0123456789abcdef")
    done = run(
        "doctor", f"--target={model}", f"--drafter={folder}", f"--prompts={prompts}",
        "--max_new_tokens=24", f"--json={figures}",
    )  # fmt: skip
    assert done.returncode == 1
    warning, verdict = done.stderr.splitlines()
    assert "was trained with another chat template" in warning
    assert verdict == "doctor: 1 of 14 checks: wrong is chat template"
    assert "0123456789abcdef" in done.stdout and "slot alignment" in done.stdout
    told = json.loads(figures.read_text())
    wrong = [row["check"] for row in told["rows"] if row["status"] == "wrong"]
    assert wrong == ["chat template"] and told["settings"]["num_prompts"] == 3
    assert told["tau"] >= 1 and len(told["alpha"]) == 2


@pytest.mark.slow
def test_nothing_wrong_is_status_0(run, model, prompts, tmp_path):
    figures = tmp_path / "out.json"
    done = run(
        "doctor", f"--target={model}", "--drafter=ngram@3", f"--prompts={prompts}",
        "--max_new_tokens=24", f"--json={figures}",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "Nothing is wrong" in done.stdout
    statuses = {row["check"]: row["status"] for row in json.loads(figures.read_text())["rows"]}
    assert statuses["slot alignment"] == "ok" and statuses["taps"] == "not applicable"


@pytest.mark.slow
def test_a_drafter_of_another_target_is_refused(run, model, prompts, folder):
    with_manifest(folder, target_hash="0123456789abcdef", target="another")
    done = run("doctor", f"--target={model}", f"--drafter={folder}", f"--prompts={prompts}")
    assert done.returncode == 1
    assert "was trained for another, and" in done.stderr and done.stderr.count("\n") == 1
