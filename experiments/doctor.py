r"""Finds why acceptance is low: one check for each thing that is usually wrong with a drafter.

  python -m experiments.doctor --target=smollm2 --drafter=runs/smollm2_dflash/drafter \
    --prompts=test_prompts.jsonl --limit=4

The target answers some prompts greedily, and the drafter drafts along the answers: as it is, and with
one thing changed at a time. Where clearly more would be accepted with, say, other taps, they are wrong,
and the table says what to do. A prompt file has one `{"turns": ["…"]}` or `{"prompt": "…"}` a line;
take prompts that the drafter was made for. Ends with status 0 where nothing is wrong, 1 otherwise.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments import drafts, launch
from specjax.distillation.doctor import Finding, Status, diagnose
from specjax.distillation.probe import Probe
from specjax.evaluation import tables
from specjax.evaluation.prompts import read_prompts

_TARGET = launch.define_target()
_TEMPLATE_OPTIONS = launch.define_template_options()
_DRAFTER = flags.DEFINE_string("drafter", None, f"{drafts.SPECS}.")
_NUM_DRAFT_TOKENS = drafts.define_num_draft_tokens()
_PROMPTS = flags.DEFINE_string("prompts", None, "A prompt file.")
_LIMIT = flags.DEFINE_integer("limit", 4, "Prompts that are answered.", lower_bound=1)
_MAX_NEW_TOKENS = launch.define_max_new_tokens(64)
_JSON = launch.define_json()

CONSOLE = Console(width=None if sys.stdout.isatty() else 140)


def main() -> None:
    """Loads, examines, prints the table, writes, and ends by what was found."""
    launch.require(target=_TARGET.value, drafter=_DRAFTER.value, prompts=_PROMPTS.value)
    launch.check_writable(_JSON.value)
    texts = read_prompts(_PROMPTS.value, _LIMIT.value)
    target = launch.load_target(_TARGET.value, _TEMPLATE_OPTIONS.value)
    loaded = drafts.load_drafter(_DRAFTER.value, target, _NUM_DRAFT_TOKENS.value, [])
    if loaded is None:
        raise ValueError(f"--drafter={_DRAFTER.value}: there is no drafter to examine")
    prompts = launch.encode(target, _PROMPTS.value, dict(enumerate(texts, start=1)))
    findings, probe = diagnose(
        target, loaded, prompts, folder=drafts.folder_of(_DRAFTER.value),
        max_new_tokens=_MAX_NEW_TOKENS.value,
    )  # fmt: skip
    show(findings, probe)
    settings = {
        "target": target.name,
        "dtype": target.dtype.name,
        "drafter": _DRAFTER.value,
        "prompts": pathlib.Path(_PROMPTS.value).name,
        "num_prompts": len(prompts),
        "max_new_tokens": _MAX_NEW_TOKENS.value,
        **launch.machine(),
    }
    rows = [dataclasses.asdict(finding) for finding in findings]
    launch.write_json(_JSON.value, {"settings": settings, **figures(probe), "rows": rows})
    wrong = [finding.check for finding in findings if finding.status is Status.WRONG]
    if wrong:
        raise ValueError(f"{len(wrong)} of {len(findings)} checks: wrong is {', '.join(wrong)}")


def figures(probe: Probe) -> dict[str, Any]:
    """What the drafter achieved on these prompts."""
    result = probe.result
    return {
        "num_draft_tokens": result.num_draft_tokens,
        "num_tokens": result.num_tokens,
        "tau": result.tau,
        "alpha": tables.listed(result.alpha),
    }


def show(findings: list[Finding], probe: Probe) -> None:
    """Prints the table."""
    told = figures(probe)
    alpha = " ".join("–" if x is None else f"{x:.2f}" for x in told["alpha"])
    table = Table(
        title=f"{told['num_tokens']} tokens in {len(probe.result.tokens)} answers: τ "
        f"{told['tau']:.2f}, α_k {alpha}",
        title_justify="left",
    )
    for heading in ("check", "", "seen", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        cells = finding.check, finding.status, finding.seen, finding.advice
        table.add_row(*map(Text, cells))  # "[MASK]" is no markup
    CONSOLE.print(table)
    statuses = [finding.status for finding in findings]
    if Status.WRONG in statuses:
        return
    unsure = statuses.count(Status.UNSURE)
    CONSOLE.print(
        f"Nothing is wrong as far as can be told; unsure: {unsure}."
        if unsure
        else "Nothing is wrong: this is what the drafter can do on prompts like these."
    )


if __name__ == "__main__":
    launch.run(main)
