"""`experiments.evaluate` and `experiments.benchmark_decode` as a user runs them."""

from __future__ import annotations

import json

import pytest


def test_table_and_json(run, model, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text('{"turns": ["abab"]}\n{"turns": ["he he"]}\n')
    out = tmp_path / "results.json"
    done = run(
        "evaluate", f"--target={model}", "--drafter=ngram:2", "--drafter=early_exit:1",
        f"--prompts={tmp_path}/one.jsonl", f"--prompts={tmp_path}/two.jsonl", "--limit=1",
        "--num_draft_tokens=2", "--max_new_tokens=16", f"--json={out}",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(out.read_text())["rows"]
    assert [(row["prompts"], row["drafter"]) for row in rows] == [
        (name, drafter) for name in ("one", "two") for drafter in ("ngram:2", "early_exit:1")
    ]
    for row in rows:
        assert row["identical"] == "yes" and row["num_prompts"] == 1
        assert row["tau"] == pytest.approx(1 + sum(row["survival"]), abs=0.1)  # cut by the length
        assert row["passes_per_token"] == pytest.approx(1 / row["tau"])
        assert f"{row['speedup']:.2f}×" in done.stdout
    # The two files hold the same prompts: what is counted is the same, whatever was timed.
    assert [row["alpha"] for row in rows[:2]] == [row["alpha"] for row in rows[2:]]


@pytest.mark.slow
def test_every_combination_and_going_on(run, model, tmp_path):
    """Two temperatures, two K, parts and two turns; a file of results is gone on with, once."""
    for name, text in (("one", '["abab", "he"]'), ("two", '["he he"]')):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"turns": {text}}}\n')
    out, table, plot, second = (tmp_path / x for x in ("out.json", "out.md", "out.png", "two.png"))
    arguments = [
        f"--target={model}", "--drafter=ngram", "--drafter=early_exit:1@3", "--turns=2", "--parts",
        "--num_draft_tokens=1", "--num_draft_tokens=2", "--temperature=0", "--temperature=1",
        "--max_new_tokens=8", f"--json={out}", f"--markdown={table}", f"--plot={plot}",
        f"--acceptance_plot={second}",
    ]  # fmt: skip
    files = [f"--prompts={tmp_path}/{name}.jsonl" for name in ("one", "two")]
    done = run("evaluate", *arguments, *files)
    assert (done.returncode, done.stderr) == (0, "")
    whole = json.loads(out.read_text())
    told = [(row["temperature"], row["prompts"], row["drafter"]) for row in whole["rows"]]
    assert told == [
        (temperature, name, drafter)
        for temperature in (0.0, 1.0)
        for name in ("one", "two")
        for drafter in ("ngram@1", "ngram@2", "early_exit:1@3")
    ]
    for row in whole["rows"]:
        assert row["predicted_speedup"] > 0 and row["cycle_ms"] == pytest.approx(
            row["draft_ms"] + row["pass_ms"] + row["overhead_ms"]
        )
        assert sum(kind["committed"] for kind in row["kinds"].values()) > 0
        assert row["prediction_error"] == pytest.approx(
            row["predicted_speedup"] / row["speedup"] - 1
        )
    assert {"template_hash", "target_hash", "hash of ngram@1"} <= whole["rows"][0][
        "identity"
    ].keys()
    lines = table.read_text().splitlines()
    assert len(lines) == 2 + 12 + 2 and lines[-1].startswith("`python -m experiments.evaluate")
    assert plot.read_bytes().startswith(b"\x89PNG") and second.read_bytes().startswith(b"\x89PNG")
    # As it was after the first file of the second temperature: only the last is measured again.
    interrupted = whole | {"rows": whole["rows"][:9]}
    out.write_text(json.dumps(interrupted))
    assert run("evaluate", *arguments, *files).returncode == 0
    again = json.loads(out.read_text())
    assert again["rows"][:9] == whole["rows"][:9] and again["rows"][9:] != whole["rows"][9:]
    assert [row["alpha"] for row in again["rows"]] == [row["alpha"] for row in whole["rows"]]
    # Other prompts, another length, no results.
    (tmp_path / "two.jsonl").write_text('{"turns": ["lo"]}\n')
    for changed, message in (
        ([], "holds results with prompts {"),
        (["--max_new_tokens=9"], "max_new_tokens 8 (now 9)"),
        (["--noparts"], "parts True (now False)"),
    ):
        refused = run("evaluate", *arguments, *files, *changed)
        assert refused.returncode == 1 and message in refused.stderr
    out.write_text("[]")
    assert "holds no results" in run("evaluate", *arguments, *files).stderr


def test_all_files_are_checked_before_the_first_is_decoded(run, model, tmp_path):
    """The wrong top_p would be found by the first decoding; the prompt of the last file is sooner."""
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"turns": ["abab"]}\n')
    arguments = [
        f"--target={model}", f"--prompts={good}", f"--prompts={bad}", "--temperature=1", "--top_p=0",
    ]  # fmt: skip
    for text, message in (
        ("ab" * 5000, "tokens leaves no room for an answer in the target's context"),
        ("\\ud800", "surrogates not allowed"),
    ):
        bad.write_text(f'{{"turns": ["abab"]}}\n{{"turns": ["{text}"]}}\n')
        done = run("evaluate", *arguments)
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert "bad, prompt 2: " in done.stderr and message in done.stderr


@pytest.mark.slow
def test_sampling_and_a_draft_lm(run, model, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"turns": ["abab"]}\n')
    out = tmp_path / "results.json"
    done = run(
        "evaluate", f"--target={model}", f"--drafter=draft_lm:{model}", "--temperature=0.8",
        "--top_p=0.9", "--top_k=20", "--min_p=0.01", "--seed=3", "--max_new_tokens=16",
        f"--prompts={tmp_path}/p.jsonl", f"--json={out}",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    results = json.loads(out.read_text())
    (row,) = results["rows"]
    assert row["temperature"] == 0.8 and results["settings"]["top_k"] == 20
    # The target as its own drafter: p = q, so nothing is rejected but for rounding.
    assert row["identical"] is None and row["alpha"][0] > 0.99


@pytest.mark.slow
def test_benchmark_on_a_model(run, model, tmp_path):
    out = tmp_path / "benchmark.json"
    done = run(
        "benchmark_decode", f"--target={model}", "--drafter=early_exit:1", "--num_draft_tokens=2",
        "--simulated_alpha=1.0", "--steps=3", "--repeats=2", "--max_len=128", f"--json={out}",
        f"--profile={tmp_path}/trace",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert figures["tau"] == 3.0
    predicted = 3 * figures["plain"]["median"]
    predicted /= figures["draft"]["median"] + figures["verify"]["median"]
    assert figures["predicted_speedup"] == pytest.approx(predicted)
    assert {"bandwidth_share", "overhead_share", "measured_over_predicted"} <= figures.keys()
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))


@pytest.mark.slow
def test_benchmark_above_temperature_zero(run, model, tmp_path):
    out = tmp_path / "benchmark.json"
    done = run(
        "benchmark_decode", f"--target={model}", "--drafter=early_exit:1", "--steps=20",
        "--num_draft_tokens=2", "--repeats=1", "--max_len=128", "--temperature=0.8", "--top_k=20",
        "--seed=3", f"--json={out}",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(out.read_text())
    assert 1 < figures["tau"] <= 3
    settings = {name: figures[name] for name in ("rule", "temperature", "top_k", "top_p", "seed")}
    assert settings == {"rule": "token", "temperature": 0.8, "top_k": 20, "top_p": 1.0, "seed": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "arguments", "status", "message"),
    [
        ("evaluate", ["--target=MODEL"], 1, "--prompts is missing"),
        ("evaluate", ["--target=MODEL", "--prompts=/no/such"], 1, "/no/such"),
        ("evaluate", ["--target=MODEL", "--prompts=EMPTY"], 1, "no prompts in it"),
        ("evaluate", ["--target=MODEL", "--prompts=GOOD", "--drafter=none"], 1, "--drafter=none"),
        ("evaluate", ["--target=MODEL", "--prompts=GOOD", "--drafter=x"], 1, "unknown drafter 'x'"),
        ("evaluate", ["--target=MODEL", "--prompts=GOOD", "--top_p=0", "--temperature=1"], 1,
         "top_p must be in (0, 1], got 0.0"),
        ("evaluate", ["--target=MODEL", "--prompts=GOOD", "--max_prompt_tokens=1"], 1,
         "all 1 prompts are longer than --max_prompt_tokens=1; the shortest has"),
        ("evaluate", ["--target=MODEL", "--prompts=GOOD", "--prompts=GOOD"], 1, "told apart"),
        ("evaluate", ["--target=MODEL", "--prompts=GOOD", "--tree=2,1", "--num_draft_tokens=2"], 1,
         "give either --num_draft_tokens or --tree"),
        ("sweep", ["--target=MODEL", "--drafter=ngram", "--prompts=GOOD", "--prompts=GOOD"], 1,
         "told apart"),
        ("evaluate", ["--plot=x.jpg"], 2, "takes the name of a .png file"),
        ("compare", ["--train=configs/smollm2_draft_lm.py"], 1, "--data is missing"),
        ("compare", ["--train=configs/smollm2_eagle3.py", "--train=configs/smollm2_eagle3.py",
         "--data=GOOD", "--prompts=GOOD", "--workdir=/no/such"], 1, "told apart"),
        ("evaluate", ["--repetition_penalty=1.1"], 2, "--repetition_penalty is not supported"),
        ("evaluate", ["--logit_bias", "x"], 2, "--logit_bias is not supported"),
        ("evaluate", ["--grammar=x"], 2, "--grammar is not supported"),
        ("benchmark_decode", [], 1, "give either --target or --random_init"),
        ("benchmark_decode", ["--random_init=gpt5"], 2, "gpt5"),
        ("benchmark_decode", ["--target=MODEL", "--max_len=20"], 1, "need max_len ≥"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(run, model, tmp_path, program, arguments, status, message):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "good.jsonl").write_text('{"turns": ["abab"]}\n')
    names = {
        "MODEL": str(model),
        "EMPTY": f"{tmp_path}/empty.jsonl",
        "GOOD": f"{tmp_path}/good.jsonl",
    }
    for name, value in names.items():
        arguments = [argument.replace(name, value) for argument in arguments]
    done = run(program, *arguments)
    assert done.returncode == status
    assert message in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
