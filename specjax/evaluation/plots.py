"""Figures as PNG files; matplotlib is imported when one is drawn."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.evaluation.speedup import Law, best_length


def sweep(
    path: str | pathlib.Path,
    name: str,
    measured: Mapping[str, Mapping[int, tuple[float, float, float]]],
    laws: Mapping[str, Law],
) -> None:
    """Speed-up over K, measured and predicted, beside the map of what α and β allow.

    Args:
      path: of the PNG.
      name: of the drafter.
      measured: of each set of prompts, by K: speed-up, and the ends of its interval (NaN for none).
      laws: of each set of prompts.
    """
    figure, (left, right) = _axes(2)
    for number, (prompts, points) in enumerate(measured.items()):
        colour, law = f"C{number}", laws[prompts]
        lengths = sorted(points)
        speeds = np.array([points[k] for k in lengths])
        spread = np.abs(np.nan_to_num(speeds[:, 1:].T - speeds[:, 0], nan=0.0))
        left.errorbar(
            lengths, speeds[:, 0], spread, fmt="o", color=colour, capsize=3, label=prompts
        )
        left.plot(lengths, [law.predicted(k) for k in lengths], "--", color=colour)
        best = law.best(lengths)
        left.plot(best, law.predicted(best), "*", color=colour, markersize=14)
        beta = law.beta + law.start / best  # a token of the best draft
        right.plot(beta, float(np.mean(law.alpha)), "o", color=colour, label=prompts)
    left.axhline(1, color="grey", linewidth=0.8)
    left.set(xlabel="K", ylabel="speed-up", title=f"{name}: measured (dots), predicted, K* (star)")
    left.legend()
    betas, alphas = np.linspace(0, 0.5, 41), np.linspace(0.05, 0.95, 37)
    speeds = [[best_length(alpha, beta)[1] for beta in betas] for alpha in alphas]
    lines = right.contour(betas, alphas, speeds, levels=[1.01, 1.25, 1.5, 2, 2.5, 3, 4, 6])
    right.clabel(lines, fmt="%g×")
    right.set(
        xlabel="β", ylabel="α", title="speed-up at the best K, verification as dear as a step"
    )
    right.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def _axes(count: int) -> tuple[Any, Sequence[Any]]:
    """A figure without a window, and its axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * count, 4.5), layout="constrained")
    return figure, figure.subplots(1, count)
