"""Figures as PNG files; matplotlib is imported when one is drawn."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.evaluation.speedup import Law, best_length


def sweep(
    path: str | pathlib.Path,
    measured: Mapping[str, Mapping[str, Mapping[int, tuple[float, float, float]]]],
    laws: Mapping[str, Mapping[str, Law]],
) -> None:
    """Speed-up over K of every drafter, measured and predicted, beside the map of what α and β allow.

    Args:
      path: of the PNG.
      measured: of each drafter and set of prompts, by K: speed-up, and the ends of its interval (NaN
        for none).
      laws: of each drafter and set of prompts.
    """
    figure, (*panels, map_) = _axes(len(measured) + 1)
    for marker, panel, (drafter, sets) in zip(
        itertools.cycle("os^Dv"), panels, measured.items(), strict=False
    ):
        for number, (prompts, points) in enumerate(sets.items()):
            colour, law = f"C{number}", laws[drafter][prompts]
            lengths = sorted(points)
            speeds = np.array([points[k] for k in lengths])
            spread = np.abs(np.nan_to_num(speeds[:, 1:].T - speeds[:, 0], nan=0.0))
            panel.errorbar(
                lengths, speeds[:, 0], spread, fmt="o", color=colour, capsize=3, label=prompts
            )
            panel.plot(lengths, [law.predicted(k) for k in lengths], "--", color=colour)
            best = law.best(lengths)
            panel.plot(best, law.predicted(best), "*", color=colour, markersize=14)
            beta = law.beta + law.start / best  # a token of the best draft
            label = f"{drafter}, {prompts}"
            map_.plot(beta, float(np.mean(law.alpha)), marker, color=colour, label=label)
        panel.axhline(1, color="grey", linewidth=0.8)
        title = f"{drafter}: measured (dots), predicted, K* (star)"
        panel.set(xlabel="K", ylabel="speed-up", title=title)
        panel.legend()
    betas, alphas = np.linspace(0, 0.8, 65), np.linspace(0.05, 0.95, 37)
    speeds = [[best_length(alpha, beta)[1] for beta in betas] for alpha in alphas]
    lines = map_.contour(betas, alphas, speeds, levels=[1.01, 1.25, 1.5, 2, 2.5, 3, 4, 6])
    map_.clabel(lines, fmt="%g×")
    map_.set(xlabel="β", ylabel="α", title="speed-up at the best K, verification as dear as a step")
    map_.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)


def evaluation(path: str | pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """τ and speed-up of every drafter on every set of prompts, with their intervals.

    Args:
      path: of the PNG.
      rows: as `experiments.evaluate` writes them.
    """
    figure, (left, right) = _axes(2)
    _bars(left, rows, "tau")
    _bars(right, rows, "speedup")
    left.set(title="τ, tokens a cycle")
    right.set(title="speed-up over plain decoding")
    labels = left.get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)


def fight(
    path: str | pathlib.Path,
    curves: Mapping[str, Sequence[Mapping[str, float]]],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Drafters that were trained for the same time: α_1 over minutes, τ and speed-up at the end.

    Args:
      path: of the PNG.
      curves: of each drafter, its `minutes` and `held_out/alpha_1`.
      rows: as `experiments.evaluate` writes them.
    """
    figure, (left, middle, right) = _axes(3)
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    for name, points in curves.items():
        minutes, alphas = zip(*((x["minutes"], x["held_out/alpha_1"]) for x in points), strict=True)
        left.plot(minutes, alphas, "o-", color=f"C{names.index(name)}", label=name)
    left.set(xlabel="minutes of training", title="teacher-forced α_1, held-out text")
    _bars(middle, rows, "tau")
    _bars(right, rows, "speedup")
    middle.set(title="τ, tokens a cycle")
    right.set(title="speed-up over plain decoding")
    labels = middle.get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=len(names), fontsize=8)
    figure.savefig(path, dpi=120)


def _bars(axis: Any, rows: Sequence[Mapping[str, Any]], figure: str) -> None:
    """A figure of rows with its interval: bars of all drafters side by side, by prompts."""

    def group(row: Mapping[str, Any]) -> str:
        name = pathlib.Path(row["prompts"]).stem
        return f"{name}\nT {row['temperature']:g}, B {row['batch']}"

    groups = list(dict.fromkeys(map(group, rows)))
    names = list(dict.fromkeys((row["target"], row["drafter"]) for row in rows))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        own = [row for row in rows if (row["target"], row["drafter"]) == name]
        places = [groups.index(group(row)) + (number + 0.5) * width - 0.4 for row in own]
        values = np.array([[row[figure], *row[f"{figure}_interval"]] for row in own], float)
        spread = np.abs(np.nan_to_num(values[:, 1:].T - values[:, 0], nan=0.0))
        axis.bar(places, values[:, 0], width, yerr=spread, capsize=2, label=name[1])
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_xticks(range(len(groups)), groups, fontsize=8)


def _axes(count: int) -> tuple[Any, Sequence[Any]]:
    """A figure without a window, and its axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * count, 4.5), layout="constrained")
    return figure, figure.subplots(1, count)
