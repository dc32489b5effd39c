r"""Measures drafters on prompt files, each against plain decoding of the same prompts.

  python -m experiments.evaluate --target=smollm2 --drafter=ngram --drafter=early_exit:20 \
    --prompts=gsm8k.jsonl --limit=10 --json=results.json

A prompt file has one `{"turns": ["…"]}` a line; the first turn is used.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

import specjax
from experiments import launch
from specjax.evaluation.identity import worst
from specjax.evaluation.prompts import read_prompts
from specjax.evaluation.runner import Evaluation, evaluate
from specjax.models.tokenizer import encode_prompt

_TARGET = launch.define_target()
_DRAFTERS = flags.DEFINE_multi_string(
    "drafter", ["ngram"], f"{launch.DRAFTER_SPECS}; may be repeated."
)
_PROMPTS = flags.DEFINE_multi_string("prompts", [], "A prompt file; may be repeated.")
_LIMIT = flags.DEFINE_integer("limit", None, "Prompts a file; all by default.", lower_bound=1)
_NUM_DRAFT_TOKENS = launch.define_num_draft_tokens()
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Longest answer, in tokens.")
_SAMPLING = launch.define_sampling()
_JSON = flags.DEFINE_string("json", None, "File to write the figures to.")


def main() -> None:
    """Loads everything, evaluates file after file, prints the table, writes."""
    launch.require(target=_TARGET.value, prompts=_PROMPTS.value)
    launch.check_writable(_JSON.value)
    files = {path: read_prompts(path, _LIMIT.value) for path in _PROMPTS.value}
    with launch.progress() as report:
        target = specjax.load_target(_TARGET.value, progress=report)
    drafters = {
        spec: specjax.load_drafter(spec, target, _NUM_DRAFT_TOKENS.value)
        for spec in _DRAFTERS.value
    }
    if None in drafters.values():
        raise ValueError("--drafter=none: plain decoding is measured beside every drafter anyway")
    rows = []
    for path, texts in files.items():
        chat = target.tokenizer is not None and target.tokenizer.chat_template is not None
        prompts = [encode_prompt(target.tokenizer, text, chat=chat) for text in texts]
        longest = max(map(len, prompts)) + _MAX_NEW_TOKENS.value
        size = min(1 << (longest - 1).bit_length(), target.config.context_length)
        with launch.progress() as report:
            results = evaluate(
                target, drafters, prompts, progress=report, max_len=size,
                max_new_tokens=_MAX_NEW_TOKENS.value, **launch.sampling_options(_SAMPLING),
            )  # fmt: skip
        rows += [figures(path, name, result) for name, result in results.items()]
    show(rows)
    if _JSON.value:
        settings = {
            "target": target.name,
            "dtype": target.dtype.name,
            "max_new_tokens": _MAX_NEW_TOKENS.value,
            **{name: flag.value for name, flag in _SAMPLING.items()},
            **launch.machine(),
        }
        text = json.dumps({"settings": settings, "rows": rows}, indent=1)
        pathlib.Path(_JSON.value).write_text(text + "\n", "utf-8")


def figures(path: str, name: str, result: Evaluation) -> dict[str, Any]:
    """One row of the table."""
    return {
        "prompts": pathlib.Path(path).name,
        "num_prompts": len(result.plain),
        "drafter": name,
        "num_draft_tokens": result.num_draft_tokens,
        "tau": result.tau,
        "alpha": launch.listed(result.alpha),
        "survival": launch.listed(result.survival),
        "plain_tokens_per_second": result.plain_tokens_per_second,
        "speculative_tokens_per_second": result.speculative_tokens_per_second,
        "speedup": result.speedup,
        "identical": worst(result.identical) if result.identical else None,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    table = Table()
    for heading in (
        "prompts", "drafter", "K", "τ", "α_k", "J_k", "plain tok/s", "spec. tok/s", "speed-up",
        "identical",
    ):  # fmt: skip
        table.add_column(heading, overflow="fold")

    def short(values):
        return " ".join("–" if value is None else f"{value:.2f}" for value in values)

    for row in rows:
        table.add_row(
            f"{row['prompts']} ({row['num_prompts']})",
            row["drafter"],
            str(row["num_draft_tokens"]),
            f"{row['tau']:.2f}",
            short(row["alpha"]),
            short(row["survival"]),
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['speculative_tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}×",
            row["identical"] or "–",
        )
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a file has room for the whole table
    console.print(table)


if __name__ == "__main__":
    launch.run(main)
