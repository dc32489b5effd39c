"""Figures as PNG files; matplotlib is imported when one is drawn."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.drafters.dspark.calibration import BINS, Reliability
from specjax.evaluation.kinds import Acceptance
from specjax.evaluation.speedup import Law, best_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sweep(
    path: str | pathlib.Path,
    measured: Mapping[str, Mapping[str, Mapping[int, tuple[float, float, float]]]],
    laws: Mapping[str, Mapping[str, Law]],
) -> Figure:
    """Speed-up over K of every drafter, measured and predicted, beside the map of what α and β allow.

    Args:
      path: of the PNG.
      measured: of each drafter and set of prompts, by K: speed-up, and the ends of its interval (NaN
        for none).
      laws: of each drafter and set of prompts.

    Returns:
      The figure as it was saved.
    """
    columns = min(len(measured) + 1, 3)
    figure, axes = _axes(columns, -(-(len(measured) + 1) // columns))
    panels, (map_, *unused) = axes[: len(measured)], axes[len(measured) :]
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
            map_.plot(beta, float(np.mean(law.alpha)), marker, color=colour)
        map_.plot([], [], marker, color="grey", label=drafter)
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set(xlabel="K", ylabel="speed-up", title=drafter)
    betas, alphas = np.linspace(0, 0.8, 65), np.linspace(0.05, 0.95, 37)
    speeds = [[best_length(alpha, beta)[1] for beta in betas] for alpha in alphas]
    lines = map_.contour(betas, alphas, speeds, levels=[1.01, 1.25, 1.5, 2, 2.5, 3, 4, 6])
    map_.clabel(lines, fmt="%g×")
    map_.set(xlabel="β", ylabel="α", title="speed-up at the best K, verification as dear as a step")
    map_.legend(loc="upper right", fontsize=8)
    for ax in unused:
        ax.remove()
    handles, labels = panels[0].get_legend_handles_labels()
    title = "speed-up measured (dots), predicted (dashed), its best K (star):"
    figure.legend(handles, labels, title=title, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=120)
    return figure


def evaluation(path: str | pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """τ and speed-up of every drafter on every set of prompts, with their intervals.

    Args:
      path: of the PNG.
      rows: as `experiments.evaluate` writes them.

    Returns:
      The figure as it was saved.
    """
    figure, (left, right) = _axes(2)
    _bars(left, rows, "tau")
    _bars(right, rows, "speedup")
    left.set(title="τ, tokens a cycle")
    right.set(title="speed-up over plain decoding")
    labels = left.get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)
    return figure


def fight(
    path: str | pathlib.Path,
    curves: Mapping[str, Sequence[Mapping[str, float]]],
    rows: Sequence[Mapping[str, Any]],
) -> Figure:
    """Drafters that were trained for the same time: replayed τ over minutes, τ and speed-up at the end.

    Args:
      path: of the PNG.
      curves: of each drafter, its `minutes` and `replayed/tau`. (Teacher-forced α is of other tokens
        in every family.)
      rows: as `experiments.evaluate` writes them.

    Returns:
      The figure as it was saved.
    """
    figure, (left, middle, right) = _axes(3)
    names = list(dict.fromkeys(row["drafter"] for row in rows))
    for name, points in curves.items():
        minutes, taus = zip(*((x["minutes"], x["replayed/tau"]) for x in points), strict=True)
        left.plot(minutes, taus, "o-", color=f"C{names.index(name)}", label=name)
    left.set(xlabel="minutes of training", title="replayed τ, held-out text")
    _bars(middle, rows, "tau")
    _bars(right, rows, "speedup")
    middle.set(title="τ, tokens a cycle")
    right.set(title="speed-up over plain decoding")
    labels = middle.get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=len(names), fontsize=8)
    figure.savefig(path, dpi=120)
    return figure


def acceptance(
    path: str | pathlib.Path,
    by_drafter: Mapping[str, tuple[np.ndarray, np.ndarray, Mapping[str, Acceptance]]],
) -> Figure:
    """Acceptance over the position in the draft, beside acceptance by the kind of the token.

    Args:
      path: of the PNG.
      by_drafter: α_1, …, J_1, …, and what `specjax.evaluation.kinds.acceptance` counted, by the
        drafter's name.

    Returns:
      The figure as it was saved.
    """
    figure, (left, right) = _axes(2)
    names = list(dict.fromkeys(kind for *_, kinds in by_drafter.values() for kind in kinds))
    width = 0.8 / len(by_drafter)
    for number, (drafter, (alpha, survival, kinds)) in enumerate(by_drafter.items()):
        colour = f"C{number}"
        positions = np.arange(1, len(alpha) + 1)
        left.plot(positions, alpha, "o-", color=colour, label=drafter)
        left.plot(positions, survival, "s--", color=colour, markersize=4, alpha=0.7)
        counted = [(at, kinds[name]) for at, name in enumerate(names) if name in kinds]
        known = [(at, one) for at, one in counted if one.tried]
        bars = right.bar(
            [at - 0.4 + width * (number + 0.5) for at, _ in known],
            [one.rate for _, one in known],
            width,
            color=colour,
        )
        tried = [str(one.tried) for _, one in known]
        right.bar_label(bars, tried, fontsize=8, padding=2, rotation=90 * (len(by_drafter) > 2))
    left.xaxis.get_major_locator().set_params(integer=True)
    left.set(xlabel="position in the draft", ylim=(0, 1.05))
    left.set_title("accepted: α_k (dots), J_k (squares, dashed)")
    right.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names])
    right.set(ylabel="accepted / tried", ylim=(0, 1.1))
    right.set_title("by kind of the token; over the bars: drafts tried")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=120)
    return figure


def reliability(
    path: str | pathlib.Path, drafts: Sequence[tuple[Reliability, Reliability]]
) -> Figure:
    """Predicted against counted survival, one diagram for each position in the draft.

    On the diagonal a prediction is true. Every diagram goes as far as its points do, one bin at least.

    Args:
      path: of the PNG.
      drafts: before and after calibration, by position.

    Returns:
      The figure as it was saved.
    """
    columns = min(len(drafts), 3)
    figure, axes = _axes(columns, -(-len(drafts) // columns), width=4.5)
    looks = {
        "before": {"facecolors": "none", "edgecolors": "C0", "linewidths": 1.5, "zorder": 4},
        "after": {"facecolors": "C1", "edgecolors": "none", "alpha": 0.8, "zorder": 3},
    }
    for number, (ax, pair) in enumerate(zip(axes, drafts, strict=False), start=1):
        for look, bins in zip(looks.values(), pair, strict=True):
            area = 20 + 400 * bins.count / bins.count.sum()
            ax.scatter(bins.predicted, bins.happened, area, **look)
        ends = np.concatenate(
            [values for bins in pair for values in (bins.predicted, bins.happened)]
        )
        end = min(max(1.1 * max(ends, default=1.0), 1 / BINS), 1.0)
        ax.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        limits = -0.05 * end, 1.05 * end
        ax.set(xlim=limits, ylim=limits, box_aspect=1)
        ax.locator_params(nbins=5)
        ax.set(xlabel="predicted survival", ylabel="survived")
        errors = " → ".join(f"{bins.error:.3f}" for bins in pair)
        ax.set_title(f"draft {number}, {pair[0].count.sum()} cycles\nerror {errors}", fontsize=11)
    for ax in axes[len(drafts) :]:
        ax.remove()
    handles = [axes[0].scatter([], [], 60, **look) for look in looks.values()]
    names = ["before calibration", "after (area: share of the cycles)"]
    figure.legend(handles, names, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)
    return figure


def _bars(axis: Any, rows: Sequence[Mapping[str, Any]], figure: str) -> None:
    """A figure of rows with its interval: bars of all drafters side by side, by prompts."""

    def group(row: Mapping[str, Any]) -> str:
        return f"{row['prompts']}\nT {row['temperature']:g}, B {row['batch']}"

    groups = list(dict.fromkeys(map(group, rows)))
    names = list(dict.fromkeys((row["target"], row["drafter"]) for row in rows))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        own = [row for row in rows if (row["target"], row["drafter"]) == name]
        places = [groups.index(group(row)) + (number + 0.5) * width - 0.4 for row in own]
        values = np.array([[row[figure], *row[f"{figure}_interval"]] for row in own], float)
        spread = np.abs(np.nan_to_num(values[:, 1:].T - values[:, 0], nan=0.0))
        label = name[1] if len({target for target, _ in names}) == 1 else " · ".join(name)
        axis.bar(places, values[:, 0], width, yerr=spread, capsize=2, label=label)
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_xticks(range(len(groups)), groups, fontsize=8)


def _axes(columns: int, rows: int = 1, width: float = 6.5) -> tuple[Figure, Sequence[Any]]:
    """A figure without a window, and its axes, row by row; the width is of each, in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, 4.5 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).ravel()
