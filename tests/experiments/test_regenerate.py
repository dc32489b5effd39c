"""`experiments.regenerate` as a user runs, stops and goes on with it."""

from __future__ import annotations

import json

import pytest

from specjax.checkpoints.load import load_target
from specjax.distillation.data import read_examples
from specjax.models.tokenizer import fingerprint

LINES = [
    {"turns": ["abab", "not used"]},
    {"prompt": "he he"},
    {"prompt": "a"},
    {"turns": ["hello 123 hello 123"]},
    {"prompt": "xyz"},
]


@pytest.fixture(scope="module")
def regenerate(run, model, tmp_path_factory):
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in LINES))

    def regenerate(out, *arguments):
        return run(
            "regenerate", f"--target={model}", f"--prompts={prompts}", f"--out={out}", "--batch=2",
            "--temperature=0.8", "--top_p=0.9", "--max_new_tokens=12", *arguments,
        )  # fmt: skip

    return regenerate


@pytest.fixture(scope="module")
def whole(regenerate, tmp_path_factory):
    """What one run without a stop writes."""
    out = tmp_path_factory.mktemp("whole") / "out.jsonl"
    done = regenerate(out)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("5 answers (0 were there): ") and "tokens/s, τ " in done.stdout
    return out


def test_answers_can_be_learnt_from(whole, model):
    records = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [r["prompt"] for r in records] == [r.get("prompt") or r["turns"][0] for r in LINES]
    target = load_target(model)
    manifest = json.loads(whole.with_name("out.jsonl.json").read_text())
    assert fingerprint(target.tokenizer).items() < manifest.items()
    assert (manifest["temperature"], manifest["max_new_tokens"]) == (0.8, 12)
    examples, stats = read_examples(
        whole, target.tokenizer, vocab_size=target.config.vocab_size, max_tokens=99
    )
    assert stats.kept == 5
    for record, example in zip(records, examples, strict=True):
        assert example.tokens.tolist() == record["prompt_tokens"] + record["response_tokens"]
        assert example.loss_mask.sum() == len(record["response_tokens"])
        assert target.tokenizer.decode(example.prompt) == f"<|user|>{record['prompt']}<|bot|>"
        ended = record["response_tokens"][-1] in target.stop_tokens
        assert record["stop"] == ("eos" if ended else "length")
        assert ended or len(record["response_tokens"]) == 12


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(regenerate, whole, tmp_path):
    out = tmp_path / "out.jsonl"
    assert regenerate(out, "--limit=4").returncode == 0
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:3]) + lines[3][:20])  # stopped inside a batch and a line
    done = regenerate(out)
    assert done.returncode == 0 and done.stdout.startswith("2 answers (3 were there): ")
    assert out.read_bytes() == whole.read_bytes()
    done = regenerate(out)
    assert done.stdout == f"{out} answers all 5 prompts already\n"
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_a_drafter_leaves_greedy_answers_as_they_are(regenerate, tmp_path):
    texts = []
    for drafter in ("none", "early_exit:1"):
        out = tmp_path / f"{len(texts)}.jsonl"
        done = regenerate(out, "--temperature=0", f"--drafter={drafter}", "--limit=2")
        assert done.returncode == 0 and (drafter != "none" or "τ 1.00" in done.stdout)
        texts.append(out.read_text())
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (None, ["--top_p=1", "--seed=3"], "was made with top_p 0.9 (now 1.0), seed 0 (now 3)"),
        (lambda out: out.with_name("out.jsonl.json").unlink(), [], "has no out.jsonl.json"),
        (
            lambda out: out.write_text(out.read_text().replace("he he", "he")),
            [],
            "line 2 is no answer to the prompt in its place, 'he he'",
        ),
        (None, ['--template_options={"mood": 1}'], "chat template does not read 'mood'"),
        (None, ['--template_options={"longer": true}'], "was made with template_hash "),
        (None, ["--prompts=/no/such"], "/no/such"),
        (None, ["--out="], "--out is missing"),
    ],
)  # fmt: skip
def test_a_file_made_otherwise_is_refused(regenerate, whole, tmp_path, change, arguments, message):
    out = tmp_path / "out.jsonl"
    for name in ("out.jsonl", "out.jsonl.json"):
        out.with_name(name).write_bytes(whole.with_name(name).read_bytes())
    if change:
        change(out)
    before = out.read_bytes()
    done = regenerate(out, *arguments)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1
    assert out.read_bytes() == before
