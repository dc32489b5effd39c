"""`python -m experiments.sweep` on a tiny model."""

from __future__ import annotations

import json

import pytest

from specjax.evaluation.speedup import Law


def prompt_file(folder):
    path = folder / "one.jsonl"
    path.write_text('{"turns": ["he hello he hello he"]}\n{"turns": ["lo lo lo"]}\n')
    return path


@pytest.mark.slow
def test_every_k_is_measured_and_predicted(run, model, tmp_path):
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    done = run(
        "sweep", f"--target={model}", "--drafter=ngram", "--drafter=early_exit:1", "--lengths=1,3",
        "--max_new_tokens=16",
        f"--prompts={prompt_file(tmp_path)}", f"--json={out}", f"--plot={plot}",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(out.read_text())
    assert [(row["drafter"], row["num_draft_tokens"]) for row in figures["rows"]] == [
        ("ngram", 1), ("ngram", 3), ("early_exit:1", 1), ("early_exit:1", 3),
    ]  # fmt: skip
    for said, rows in zip(figures["laws"], (figures["rows"][:2], figures["rows"][2:]), strict=True):
        law = Law(
            tuple(said["alpha"]), said["start"], said["beta"],
            tuple((k, growth) for k, growth in said["verification"]), said["drafting"],
        )  # fmt: skip
        assert 0 < law.drafting <= 1 and (law.drafting == 1) == (said["drafter"] != "ngram")
        for row in rows:
            assert row["predicted"] == pytest.approx(law.predicted(row["num_draft_tokens"]))
            assert row["speedup"] > 0 and f"{row['tau']:.2f}" in done.stdout
        assert said["best_predicted"] == law.best([1, 3])
        assert f"{said['drafter']}, one: " in done.stdout and "K* predicted" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--lengths=4", "--lengths takes two K or more"),
        ("--lengths=1,x", "--lengths takes two K or more"),
        ("--batch=3", "one: 2 prompts are no batches of 3"),
        ("--wanted=0", "wanted"),
    ],
)
def test_what_makes_no_sweep(run, model, tmp_path, argument, message):
    done = run(
        "sweep", f"--target={model}", "--drafter=ngram", f"--prompts={prompt_file(tmp_path)}", argument
    )  # fmt: skip
    assert done.returncode in (1, 2) and message in done.stderr and done.stderr.count("\n") == 1
