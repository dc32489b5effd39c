"""Figures of evaluations: as rows, and the rows as a table in the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.evaluation import kinds
from specjax.evaluation.identity import worst
from specjax.evaluation.runner import Evaluation, peer_tokens_per_second
from specjax.evaluation.speedup import Costs

if TYPE_CHECKING:
    from rich.table import Table

Row = Mapping[str, Any]


def figures(result: Evaluation, costs: Costs | None) -> dict[str, Any]:
    """A row: what was measured, as JSON has it.

    Args:
      result: of one drafter.
      costs: of the parts of its cycles, at its batch size; None where they are not known.
    """
    predicted = parts = None
    if costs is not None:
        predicted = result.predicted_speedup(costs)
        mean_pass = result.pass_seconds(costs)
        parts = {
            "plain": costs.plain,
            "draft": costs.draft,
            "pass": mean_pass,
            "overhead": result.cycle_seconds - costs.draft - mean_pass,
        }
    return {
        "num_draft_tokens": result.num_draft_tokens,
        "tau": result.tau,
        "tau_interval": listed(result.tau_interval),
        "tau_of_prompts": result.tau_of_prompts,
        "tau_of_prompts_interval": listed(result.tau_of_prompts_interval),
        "alpha": listed(result.alpha),
        "survival": listed(result.survival),
        "accepted_share": known(result.accepted_share),
        "passes_per_token": result.passes_per_token,
        "plain_tokens_per_second": result.plain_tokens_per_second,
        "speculative_tokens_per_second": result.speculative_tokens_per_second,
        "speedup": result.speedup,
        "speedup_interval": listed(result.speedup_interval),
        "predicted_speedup": predicted,
        "prediction_error": None if predicted is None else predicted / result.speedup - 1,
        "cycle_ms": 1e3 * result.cycle_seconds,
        **{
            f"{part}_ms": None if parts is None else 1e3 * parts[part]
            for part in ("plain", "draft", "pass", "overhead")
        },
        "compile_seconds": result.compile_seconds,
        "identical": worst(result.identical) if result.identical else None,
        "peer_plain_tokens_per_second": peer_tokens_per_second(result.peer_plain),
        "times_peer_plain": result.times_peer_plain,
        "peer_speculative_tokens_per_second": peer_tokens_per_second(result.peer_speculative),
        "times_peer_speculative": result.times_peer_speculative,
        "kinds": kinds.figures(kinds.acceptance(result.speculative)),
    }


def known(value: float) -> float | None:
    """A figure as JSON has it: no NaN."""
    return None if value != value else float(value)


def listed(values: Iterable[float]) -> list[float | None]:
    """Several figures as JSON has them."""
    return [known(value) for value in values]


def by_position_and_kind(
    rows: Sequence[Row],
) -> dict[str, tuple[np.ndarray, np.ndarray, dict[str, kinds.Acceptance]]]:
    """What `plots.acceptance` draws: α_k, J_k and counts by kind, by what tells the rows apart."""
    names = ["drafter", "prompts", *VARIED]
    varied = [name for name in names if len({row[name] for row in rows}) > 1] or ["drafter"]
    return {
        ", ".join(str(row[name]) for name in varied): (
            np.array(row["alpha"], float),
            np.array(row["survival"], float),
            {
                kind: kinds.Acceptance(count["accepted"], count["tried"], count["committed"])
                for kind, count in row["kinds"].items()
            },
        )
        for row in rows
    }


def within(row: Row, name: str, unit: str = "") -> str:
    """A figure, and its interval where it has one."""
    low, high = row[f"{name}_interval"]
    spread = "" if low is None else f" ({low:.2f}–{high:.2f})"
    return f"{row[name]:.2f}{unit}{spread}"


def _each(values: Sequence[float | None]) -> str:
    return " ".join(map(_short, values))


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _predicted(row: Row) -> str:
    value = row["predicted_speedup"]
    return "–" if value is None else f"{value:.2f}× ({100 * row['prediction_error']:+.0f} %)"


def _parts(row: Row) -> str:
    if row["draft_ms"] is None:
        return "–"
    return " + ".join(f"{row[f'{part}_ms']:.1f}" for part in ("draft", "pass", "overhead"))


def _peer(kind: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        if row[f"times_peer_{kind}"] is None:
            return "–"
        return f"{row[f'peer_{kind}_tokens_per_second']:.1f} ({row[f'times_peer_{kind}']:.2f}×)"

    return cell


# Heading → (cell, the figures without which the column is left out where no row has one).
COLUMNS: dict[str, tuple[Callable[[Row], str], str | None]] = {
    "prompts": (lambda row: f"{row['prompts']} ({row['num_prompts']})", None),
    "drafter": (lambda row: row["drafter"], None),
    "K": (lambda row: str(row["num_draft_tokens"]), None),
    "τ": (lambda row: within(row, "tau"), None),
    "τ of prompts": (lambda row: within(row, "tau_of_prompts"), None),
    "α_k": (lambda row: _each(row["alpha"]), None),
    "J_k": (lambda row: _each(row["survival"]), None),
    "accepted / drafted": (lambda row: _short(row["accepted_share"]), None),
    "passes / token": (lambda row: f"{row['passes_per_token']:.2f}", None),
    "plain tok/s": (lambda row: f"{row['plain_tokens_per_second']:.1f}", None),
    "spec. tok/s": (lambda row: f"{row['speculative_tokens_per_second']:.1f}", None),
    "speed-up": (lambda row: within(row, "speedup", "×"), None),
    "predicted (error)": (_predicted, "predicted_speedup"),
    "draft + pass + rest, ms": (_parts, "draft_ms"),
    "identical": (lambda row: row["identical"] or "–", "identical"),
    "transformers plain": (_peer("plain"), "times_peer_plain"),
    "speculative": (_peer("speculative"), "times_peer_speculative"),
}
VARIED = {"target": "target", "temperature": "T", "batch": "batch"}  # shown where they differ


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the figures that `experiments.evaluate` writes."""
    varied = [name for name in VARIED if len({row[name] for row in rows}) > 1]
    columns = [
        (heading, cell)
        for heading, (cell, needed) in COLUMNS.items()
        if needed is None or any(row[needed] is not None for row in rows)
    ]
    headings = [VARIED[name] for name in varied] + [heading for heading, _ in columns]
    lines = [
        [str(row[name]) for name in varied] + [cell(row) for _, cell in columns] for row in rows
    ]
    return headings, lines


def rich_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """A table for a terminal, whose cells are folded where they do not fit."""
    from rich.table import Table

    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """The same as a Markdown table, with a line break at its end."""
    rows = [headings, ["---"] * len(headings), *lines]
    told = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in rows)
    return "".join(told)
