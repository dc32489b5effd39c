r"""Measures drafters on prompt files, each against plain decoding of the same prompts.

  python -m experiments.evaluate --target=smollm2 --drafter=ngram --drafter=early_exit:20 \
    --prompts=gsm8k.jsonl --limit=10 --json=results.json

A prompt file has one `{"turns": ["…"]}` a line; the first turn is used.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

import specjax
from experiments import launch
from specjax.decoding.decode import cache_size, encode_prompts
from specjax.evaluation.identity import worst
from specjax.evaluation.prompts import read_prompts
from specjax.evaluation.runner import Evaluation, evaluate
from specjax.models.target import Target

_TARGET = launch.define_target()
_DRAFTERS = flags.DEFINE_multi_string(
    "drafter", ["ngram"], f"{launch.DRAFTER_SPECS}; may be repeated."
)
_PROMPTS = flags.DEFINE_multi_string("prompts", [], "A prompt file; may be repeated.")
_LIMIT = flags.DEFINE_integer("limit", None, "Prompts a file; all by default.", lower_bound=1)
_NUM_DRAFT_TOKENS = launch.define_num_draft_tokens()
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Longest answer, in tokens.")
_SAMPLING = launch.define_sampling()
_JSON = launch.define_json()


def main() -> None:
    """Loads everything, evaluates file after file, prints the table, writes."""
    launch.require(target=_TARGET.value, prompts=_PROMPTS.value)
    launch.check_writable(_JSON.value)
    files = {path: read_prompts(path, _LIMIT.value) for path in _PROMPTS.value}
    target = launch.load_target(_TARGET.value)
    drafters = {
        spec: specjax.load_drafter(spec, target, _NUM_DRAFT_TOKENS.value)
        for spec in _DRAFTERS.value
    }
    if None in drafters.values():
        raise ValueError("--drafter=none: plain decoding is measured beside every drafter anyway")
    encoded = {path: encode(target, path, texts) for path, texts in files.items()}
    rows = []
    for path, prompts in encoded.items():
        budgets = np.full(len(prompts), _MAX_NEW_TOKENS.value)
        size = min(cache_size(target, prompts, budgets), target.config.context_length)
        with launch.progress() as report:
            results = evaluate(
                target, drafters, prompts, progress=report, max_len=size,
                max_new_tokens=_MAX_NEW_TOKENS.value, **launch.sampling_options(_SAMPLING),
            )  # fmt: skip
        rows += [figures(path, name, result) for name, result in results.items()]
    show(rows)
    settings = {
        "target": target.name,
        "dtype": target.dtype.name,
        "max_new_tokens": _MAX_NEW_TOKENS.value,
        **{name: flag.value for name, flag in _SAMPLING.items()},
        **launch.machine(),
    }
    launch.write_json(_JSON.value, {"settings": settings, "rows": rows})


def encode(target: Target, path: str, texts: list[str]) -> list[np.ndarray]:
    """Token ids of a file's prompts, each with room for an answer.

    Raises:
      ValueError: one of them cannot be used; the message has the file and its number, from 1.
    """
    prompts = []
    for number, text in enumerate(texts, start=1):
        try:
            prompts += encode_prompts(target, text)
            cache_size(target, prompts[-1:], np.ones(1, int))
        except ValueError as error:
            raise ValueError(f"{path}, prompt {number}: {error}") from None
    return prompts


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
