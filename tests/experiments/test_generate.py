"""`experiments.generate` as a user runs it: output, JSON, and one line for every mistake."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import numpy as np
import pytest

import specjax
from tests.checkpoints.test_load import changed_copy, write_gguf
from tests.evaluation.test_html_transcript import read


@pytest.fixture(scope="module")
def generate(run):
    return functools.partial(run, "generate")


def test_compare_transcript_page_and_json(generate, model, tmp_path):
    out, page = tmp_path / "figures.json", tmp_path / "page.html"
    done = generate(
        f"--target={model}", "--drafter=ngram", "--prompt=he he", "--prompt=abab",
        "--num_draft_tokens=3", "--max_new_tokens=24", "--compare", "--repeats=1", "--transcript",
        f"--json={out}", f"--html={page}",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(out.read_text())
    assert figures["identical"] == "yes" and figures["num_draft_tokens"] == 3
    answers = figures["answers"]
    assert [answer["prompt"] for answer in answers] == ["he he", "abab"]
    tokens = sum(len(answer["tokens"]) for answer in answers)
    assert figures["tau"] == tokens / sum(answer["target_passes"] for answer in answers)
    speeds = [answer["speedup"] for answer in answers]
    assert min(speeds) - 1e-9 <= figures["speedup"] <= max(speeds) + 1e-9
    target = specjax.load_target(model)
    expected = specjax.decode(target, None, "abab", max_new_tokens=24)
    assert answers[1]["tokens"] == expected.tokens[0].tolist()
    assert read(page.read_text("utf-8")).answers == [
        target.tokenizer.decode(answer["tokens"]) for answer in answers
    ]
    assert "accepted  corrected  bonus" in done.stdout
    assert f"speed-up {speeds[1]:.2f}×, identical: yes" in done.stdout


def test_plain_answer(generate, model):
    done = generate(f"--target={model}", "--drafter=none", "--prompt=abab", "--max_new_tokens=5")
    assert (done.returncode, done.stderr) == (0, "")
    expected = specjax.decode(specjax.load_target(model), None, "abab", max_new_tokens=5)
    assert expected.texts[0].strip() in done.stdout


@pytest.mark.slow
def test_equal_prompts_are_sampled_each_with_its_own_coins(generate, model, tmp_path):
    out = tmp_path / "figures.json"
    done = generate(
        f"--target={model}", "--drafter=ngram", "--prompt=abab", "--prompt=abab",
        "--temperature=1", "--seed=3", "--max_new_tokens=16", f"--json={out}",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    one, other = (answer["tokens"] for answer in json.loads(out.read_text())["answers"])
    assert one != other


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--target is missing"),
        (["--target=MODEL"], "--prompt is missing"),
        (
            ["--target=MODEL", "--prompt=a", "--drafter=eagle"],
            "unknown drafter 'eagle'; known: none",
        ),
        (["--target=MODEL", "--prompt=a", "--num_draft_tokens=0"], "must be at least 1, got 0"),
        (
            ["--target=MODEL", "--prompt=a", "--max_new_tokens=0"],
            "max_new_tokens must be at least 1",
        ),
        (["--target=MODEL", "--prompt="], "prompt 0 is empty"),
        (["--target=MODEL", "--prompt=abc", "--max_len=4"], "a prompt of 5 tokens leaves no room"),
        (["--target=MODEL", "--prompt=a", "--drafter=none", "--compare"], "need a drafter"),
        (["--target=nowhere", "--prompt=a"], "target 'nowhere' not found: no such folder or GGUF"),
        (["--target=no/where", "--prompt=a"], "target 'no/where': no folder or file of that name"),
        (
            ["--target=MODEL", "--prompt=a", "--json=/no/such/x"],
            "/no/such/x",
        ),
        (["--target=MODEL", "--prompt=a", "--html=/no/such/y"], "/no/such/y"),
    ],
)
def test_mistakes_are_one_line(generate, model, arguments, message):
    done = generate(*(argument.replace("MODEL", str(model)) for argument in arguments))
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter_name=ngram"], "Unknown command line flag 'drafter_name'"),
        (["--max_new_tokens=many"], "max_new_tokens"),
        (["--template_options=[1]"], 'expected {"name": value, …}, got [1]'),
        (["--template_options={"], "template_options"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_wrong_flags_are_one_line(generate, arguments, message):
    done = generate(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_verbose_shows_the_traceback(generate):
    done = generate("--target=nowhere", "--prompt=a", "--verbose")
    assert done.returncode != 0
    assert "Traceback" in done.stderr and "FileNotFoundError" in done.stderr


def test_nan_weights_are_one_line(generate, tmp_path):
    def spoil(tensors):
        tensors["model.norm.weight"] = np.full(32, np.nan, np.float32)

    folder = changed_copy(tmp_path, spoil)
    path = write_gguf(tmp_path / "nan.gguf", folder)
    done = generate(f"--target={path}", "--prompt=abc")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "the target's output is not finite after 0 tokens" in done.stderr


def test_damaged_weights_are_one_line(generate, tmp_path):
    folder = changed_copy(tmp_path, lambda tensors: tensors.popitem())
    done = generate(f"--target={folder}", "--prompt=abc")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "the checkpoint's tensors do not fit its config; missing: " in done.stderr


def test_import_is_light():
    """`import specjax` brings in nothing that is needed only later."""
    code = "import sys, specjax; print([m for m in ('transformers', 'gguf', 'grain', 'torch', " \
           "'matplotlib', 'huggingface_hub') if m in sys.modules])"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
