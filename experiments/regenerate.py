r"""Lets the target answer prompts, for a drafter to learn from its own text.

  python -m experiments.regenerate --target=smollm2 --prompts=in.jsonl --out=out.jsonl \
    --drafter=ngram --temperature=0.7 --top_p=0.9

A prompt file has one `{"turns": ["…"]}` (the first is used) or `{"prompt": "…"}` a line. The answer
to prompt n becomes line n of `--out`, with `prompt`, `response`, `prompt_tokens`, `response_tokens` and
`stop`.

The same command again goes on where the last one stopped. What the answers depend on is kept in
`OUT.json`, and a file that was made otherwise is refused. `--drafter`, `--rule`, `--batch` and
`--limit` may change between runs: whoever drafts, the answers' law is the target's.

A batch is keyed by the index of its first prompt, and batches begin at multiples of `--batch`, also
where a run goes on inside one. So no two prompts share their randomness, and a run that was stopped
and went on has written what it would have written in one go.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
from absl import flags

import specjax
from experiments import drafts, launch
from specjax import metrics
from specjax.evaluation.prompts import read_prompts
from specjax.models.target import Target
from specjax.models.tokenizer import fingerprint
from specjax.types import DecodeResult, StopReason

_TARGET = launch.define_target()
_TEMPLATE_OPTIONS = launch.define_template_options()
_PROMPTS = flags.DEFINE_string("prompts", None, "A prompt file.")
_OUT = flags.DEFINE_string("out", None, "File that the answers are appended to.")
_LIMIT = flags.DEFINE_integer("limit", None, "Prompts to answer; all by default.", lower_bound=1)
_DRAFTER = flags.DEFINE_string("drafter", "ngram", f"{drafts.SPECS}.")
_NUM_DRAFT_TOKENS = drafts.define_num_draft_tokens()
_TREE = drafts.define_tree()
_RULE = launch.define_rule()
_SAMPLING = launch.define_sampling()
_MAX_NEW_TOKENS = launch.define_max_new_tokens(384)
_BATCH = flags.DEFINE_integer("batch", 8, "Prompts decoded together.", lower_bound=1)


def main() -> None:
    """Checks everything, decodes batch after batch, appends the answers, prints the figures."""
    launch.require(target=_TARGET.value, prompts=_PROMPTS.value, out=_OUT.value)
    texts = read_prompts(_PROMPTS.value, _LIMIT.value)
    target = launch.load_target(_TARGET.value, _TEMPLATE_OPTIONS.value)
    drafter = drafts.load_drafter(_DRAFTER.value, target, _NUM_DRAFT_TOKENS.value, _TREE.value)
    ids = launch.encode(target, _PROMPTS.value, dict(enumerate(texts, start=1)))
    out = pathlib.Path(_OUT.value)
    check_settings(out, settings(target))
    done = count_answers(out, texts)
    if done == len(texts):
        print(f"{out} answers all {done} prompts already")
        return
    options = launch.sampling_options(_SAMPLING)
    key, batch = options.pop("key"), _BATCH.value
    seconds, committed = 0.0, []
    with launch.progress() as report, out.open("a", encoding="utf-8") as file:
        for start in range(done - done % batch, len(texts), batch):
            result = specjax.decode(
                target, drafter, ids[start : start + batch], key=jax.random.fold_in(key, start),
                max_new_tokens=_MAX_NEW_TOKENS.value, rule=_RULE.value, **options,
            )  # fmt: skip
            lines = answers(texts[start : start + batch], result)
            file.writelines(lines[max(done - start, 0) :])
            file.flush()
            seconds += result.prefill_seconds + result.decode_seconds
            committed += result.committed
            if report:
                report("prompts", start + len(lines), len(texts))
    counts = np.concatenate(committed)
    print(
        f"{len(texts) - done} answers ({done} were there): "
        f"{counts.sum() / seconds:.1f} tokens/s, τ {metrics.tau(counts):.2f}"
    )


def settings(target: Target) -> dict[str, Any]:
    """What the answers depend on besides the prompts, up to their randomness."""
    return {
        "target": target.name,
        **fingerprint(target.tokenizer),
        **{name: flag.value for name, flag in _SAMPLING.items()},
        "max_new_tokens": _MAX_NEW_TOKENS.value,
    }


def check_settings(out: pathlib.Path, now: dict[str, Any]) -> None:
    """Writes the manifest of a new file; compares it with that of one that is gone on with.

    Raises:
      ValueError: the file has none, or was made with other settings; the message names them.
    """
    manifest = pathlib.Path(f"{out}.json")
    if not out.exists() or not out.stat().st_size:
        out.touch()
        manifest.write_text(json.dumps(now, indent=1) + "\n", "utf-8")
        return
    if not manifest.exists():
        raise ValueError(
            f"{out} has no {manifest.name}, so it is not gone on with: give another --out"
        )
    then = json.loads(manifest.read_text("utf-8"))
    other = [name for name in then | now if then.get(name) != now.get(name)]
    if other:
        differ = ", ".join(f"{name} {then.get(name)} (now {now.get(name)})" for name in other)
        raise ValueError(f"{out} was made with {differ}: give these again, or another --out")


def count_answers(out: pathlib.Path, texts: list[str]) -> int:
    """How many of the prompts the file answers; a last line that is half written is cut off.

    Raises:
      ValueError: a line answers another prompt than the one in its place.
    """
    end = 0
    with out.open("rb") as file:
        lines = [line for line in itertools.islice(file, len(texts)) if line.endswith(b"\n")]
    for number, (line, text) in enumerate(zip(lines, texts, strict=False), start=1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if prompt != text:
            raise ValueError(
                f"{out}, line {number} is no answer to the prompt in its place, {text[:40]!r}: "
                "give the prompts that it was made from, or another --out"
            )
        end += len(line)
    if len(lines) < len(texts):
        os.truncate(out, end)
    return len(lines)


def answers(texts: list[str], result: DecodeResult) -> list[str]:
    """The lines of a batch.

    Raises:
      FloatingPointError: the target's output is not finite.
    """
    if StopReason.NAN in result.stop_reason:
        raise FloatingPointError("the target's output is not finite (NaN): its weights are broken")
    rows = zip(texts, result.texts, result.prompts, result.tokens, result.stop_reason, strict=True)
    return [
        json.dumps(
            {
                "prompt": prompt,
                "response": response,
                "prompt_tokens": prompt_tokens.tolist(),
                "response_tokens": tokens.tolist(),
                "stop": stop.name.lower(),
            }
        )
        + "\n"
        for prompt, response, prompt_tokens, tokens, stop in rows
    ]


if __name__ == "__main__":
    launch.run(main)
