"""Answers prompts speculatively.

  python -m experiments.generate --target=smollm2 --drafter=ngram --prompt="Why is the sky blue?"

`--compare` also decodes plainly and reports speed-up and whether the text is the same;
`--transcript` colours each token by its origin, `--html=FILE` writes that as a page which also tells of
every token its cycle, draft and confidence; `--json=FILE` writes all figures.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
from absl import flags
from rich.console import Console
from rich.text import Text

import specjax
from experiments import drafts, launch
from specjax.evaluation import tables
from specjax.evaluation.compare import Comparison, compare
from specjax.evaluation.html_transcript import html_transcript
from specjax.evaluation.identity import worst
from specjax.evaluation.transcript import legend
from specjax.models.target import Target
from specjax.types import DecodeResult, Drafter, LoadedDrafter, Progress

_TARGET = launch.define_target()
_TEMPLATE_OPTIONS = launch.define_template_options()
_DRAFTER = flags.DEFINE_string("drafter", "ngram", f"{drafts.CONTROLLED_SPECS}.")
_PROMPTS = flags.DEFINE_multi_string("prompt", [], "A prompt; may be repeated.")
_CHAT = flags.DEFINE_bool(
    "chat", None, "Render prompts through the chat template. Default: where the target has one."
)
_NUM_DRAFT_TOKENS = drafts.define_num_draft_tokens()
_TREE = drafts.define_tree()
_RULE = launch.define_rule()
_SAMPLING = launch.define_sampling()
_MAX_NEW_TOKENS = launch.define_max_new_tokens()
_MAX_LEN = flags.DEFINE_integer(
    "max_len", None, "Rows of the KV cache: prompt and answer. Default: what they need."
)
_COMPARE = flags.DEFINE_bool("compare", False, "Also decode plainly; report speed-up and identity.")
_REPEATS = flags.DEFINE_integer(
    "repeats", 3, "Timed runs of each with --compare, after one that compiles.", lower_bound=1
)
_TRANSCRIPT = flags.DEFINE_bool("transcript", False, "Colour each token by its origin.")
_HTML = flags.DEFINE_string("html", None, "HTML file to write the transcripts to.")
_JSON = launch.define_json()


def main() -> None:
    """Loads the target, answers each prompt by itself, prints, writes."""
    launch.require(target=_TARGET.value, prompt=_PROMPTS.value)
    if _DRAFTER.value == "none" and (_COMPARE.value or _TRANSCRIPT.value):
        raise ValueError("--compare and --transcript need a drafter, got --drafter=none")
    for path in (_HTML.value, _JSON.value):
        launch.check_writable(path)
    target = launch.load_target(_TARGET.value, _TEMPLATE_OPTIONS.value)
    drafter = drafts.load_drafter(
        _DRAFTER.value, target, _NUM_DRAFT_TOKENS.value, _TREE.value, controlled=True
    )
    options = {
        "max_new_tokens": _MAX_NEW_TOKENS.value,
        "max_len": _MAX_LEN.value,
        "chat": _CHAT.value,
        "rule": _RULE.value,
        **launch.sampling_options(_SAMPLING),
    }
    options["controller"] = drafts.load_controller(
        _DRAFTER.value, target, drafter, 1, 512, _RULE.value, options
    )
    answers = []
    for index, prompt in enumerate(_PROMPTS.value):
        with launch.progress() as report:
            result, comparison = answer(target, drafter, index, prompt, options, report)
        show(prompt, result, comparison)
        answers.append((result, comparison))
    if _HTML.value:
        pooled = DecodeResult.pooled([result for result, _ in answers])
        page = html_transcript(pooled, title=f"{target.name}, {_DRAFTER.value}")
        pathlib.Path(_HTML.value).write_text(page, "utf-8")
    launch.write_json(_JSON.value, summary(target, answers))


def answer(
    target: Target,
    drafter: Drafter | LoadedDrafter | None,
    index: int,
    prompt: str,
    options: dict[str, Any],
    report: Progress | None,
) -> tuple[DecodeResult, Comparison | None]:
    """The answer to one prompt, and the comparison with plain decoding if it was asked for.

    Each prompt has its own coins, by its index.
    """
    options = options | {"key": jax.random.fold_in(options["key"], index)}
    if _COMPARE.value:
        comparison = compare(
            target, drafter, prompt, repeats=_REPEATS.value, progress=report, **options
        )
        result = comparison.speculative
    else:
        comparison = None
        result = specjax.decode(target, drafter, prompt, progress=report, **options)
    if specjax.StopReason.NAN in result.stop_reason:
        raise FloatingPointError(
            f"the target's output is not finite after {len(result.tokens[0])} tokens of the answer "
            f"to {prompt!r}; are its weights damaged, or its type {target.dtype} too narrow?"
        )
    return result, comparison


def show(prompt: str, result: DecodeResult, comparison: Comparison | None) -> None:
    """Prints one answer and its figures."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(f"> {prompt}", style="bold"))
    if _TRANSCRIPT.value:
        console.print(specjax.transcript(result))
        console.print(legend())
    else:
        console.print(Text(result.texts[0]))
    if result.num_draft_tokens:
        console.print(
            f"τ {result.tau:.2f} tokens a cycle: {len(result.tokens[0])} tokens in "
            f"{result.target_passes} target passes; ended by {result.stop_reason[0].name}"
        )
    if comparison:
        console.print(
            f"plain {comparison.plain_tokens_per_second:.1f} tokens/s, speculative "
            f"{comparison.speculative_tokens_per_second:.1f} tokens/s, speed-up "
            f"{comparison.speedup:.2f}×, identical: {comparison.identical or 'sampled, not compared'}"
        )
    console.print()


def figures_of(result: DecodeResult, comparison: Comparison | None) -> dict[str, Any]:
    """The figures of one answer."""
    return {
        "prompt_tokens": len(result.prompts[0]),
        "tokens": result.tokens[0].tolist(),
        "text": result.texts[0],
        "stop_reason": result.stop_reason[0].name,
        "target_passes": result.target_passes,
        "tau": result.tau,
        "alpha": tables.listed(result.alpha),
        "survival": tables.listed(result.survival),
        "plain_tokens_per_second": comparison and comparison.plain_tokens_per_second,
        "speculative_tokens_per_second": comparison and comparison.speculative_tokens_per_second,
        "speedup": comparison and comparison.speedup,
        "identical": comparison and comparison.identical,
    }


def summary(
    target: Target, answers: list[tuple[DecodeResult, Comparison | None]]
) -> dict[str, Any]:
    """All figures: of every answer, pooled over them, and where they were measured."""
    rows = [figures_of(*pair) for pair in answers]

    def seconds(kind: str) -> float:
        return sum(len(row["tokens"]) / row[f"{kind}_tokens_per_second"] for row in rows)

    identical = [row["identical"] for row in rows]
    return {
        "tau": DecodeResult.pooled([result for result, _ in answers]).tau,
        "speedup": seconds("plain") / seconds("speculative") if _COMPARE.value else None,
        "identical": worst(identical) if all(identical) else None,
        "target": target.name,
        "drafter": _DRAFTER.value,
        "num_draft_tokens": answers[0][0].num_draft_tokens,
        "max_new_tokens": _MAX_NEW_TOKENS.value,
        "rule": _RULE.value,
        "tree": _TREE.value,
        **{name: flag.value for name, flag in _SAMPLING.items()},
        "dtype": target.dtype.name,
        **launch.machine(),
        "answers": [{"prompt": p, **row} for p, row in zip(_PROMPTS.value, rows, strict=True)],
    }


if __name__ == "__main__":
    launch.run(main)
