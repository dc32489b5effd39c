"""τ, J_k, α_k and target passes from per-cycle counts: the one place that defines them.

Counts are numpy arrays of any equal shapes, one entry a cycle; entries whose `committed` is 0 are
padding (a row that had ended) and count nowhere. All figures are pooled over what they are given.

* `drafted`: valid drafted tokens of the cycle; in a tree the deepest valid level below the accepted
  path. Where a stop token cut the draft, only those up to
  it: the ones behind it were never in play.
* `accepted`: drafted tokens kept, 0…drafted.
* `committed`: tokens the cycle committed: accepted + 1, the correction or bonus token included;
  accepted alone where the last of them was a stop token, or where the target's output after it was
  not finite. A pass that commits nothing for that reason is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def target_passes(committed: np.ndarray) -> int:
    """Forward passes of the target after prefill, one a cycle and row."""
    return int(np.sum(committed > 0))


def tau(committed: np.ndarray) -> float:
    """τ: tokens committed per cycle. Plain decoding has τ = 1; NaN where there was no cycle."""
    passes = target_passes(committed)
    return float(np.sum(committed)) / passes if passes else float("nan")


def tau_interval(rows: Sequence[np.ndarray], **options: Any) -> tuple[float, float]:
    """Bootstrap interval of τ over prompts: cycles of one prompt are not independent.

    Args:
      rows: `committed` of each prompt.
      options: those of `interval`.
    """
    sums = np.array([[np.sum(row), target_passes(row)] for row in rows], np.float64)
    return interval(sums, lambda drawn: drawn[:, 0] / drawn[:, 1], **options)


def interval(
    sums: np.ndarray,
    figure: Callable[[np.ndarray], np.ndarray],
    *,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap interval of a figure of sums; NaN where there is one part only.

    Args:
      sums: `[n, m]`, the m sums of each of n independent parts.
      figure: of sums over all parts, `[draws, m]` → `[draws]`.
      level: share of the draws that lies inside.
      draws, seed: of parts, with replacement.
    """
    if len(sums) < 2:
        return float("nan"), float("nan")
    picked = np.random.default_rng(seed).integers(0, len(sums), (draws, len(sums)))
    low, high = np.quantile(figure(sums[picked].sum(1)), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def survival(accepted: np.ndarray, committed: np.ndarray, depth: int) -> np.ndarray:
    """J_k = Pr[accepted ≥ k] for k = 1…K: per position, *unconditional*.

    τ = 1 + Σ J_k, less the token that a cycle cut short by a stop token did not commit.

    Returns:
      `[K]` float64.
    """
    kept = accepted[committed > 0]
    return np.array([np.mean(kept >= k) if kept.size else np.nan for k in _ranks(depth)])


def alpha(
    accepted: np.ndarray, drafted: np.ndarray, committed: np.ndarray, depth: int
) -> np.ndarray:
    """α_k: accepted / tried at position k, *conditional* on all before it being accepted.

    Draft k was tried where it exists (drafted ≥ k) and k − 1 were accepted.

    Returns:
      `[K]` float64; NaN where position k was never tried.
    """
    alive = committed > 0
    rates = []
    for k in _ranks(depth):
        tried = np.sum(alive & (drafted >= k) & (accepted >= k - 1))
        rates.append(np.sum(alive & (accepted >= k)) / tried if tried else np.nan)
    return np.array(rates)


def replay(agreement: np.ndarray, *, stopped: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The cycles of chain drafts along a text, had decoding said exactly that.

    At temperature 0, on the target's own greedy text, these are the cycles that decoding counts.

    Args:
      agreement: `[n, K]` bool; draft k after token t, those before it being right, is the text's token
        t + k. Token 0 is the first anchor; n tokens follow it.
      stopped: the last token is a stop token; otherwise the text ended where its budget did.

    Returns:
      `accepted`, `drafted`, `committed`, `[cycles]` int each.
    """
    length, depth = agreement.shape
    cycles, at = [], 0
    while at < length:
        left = length - at
        drafted = depth if stopped else min(depth, left - 1)
        row = agreement[at, : min(drafted, left)]
        accepted = len(row) if row.all() else int(np.argmin(row))
        if accepted == left:
            cycles.append((accepted, accepted, accepted))
        else:
            cycles.append((accepted, drafted, accepted + 1))
        at += cycles[-1][2]
    return tuple(np.array(cycles, int).reshape(-1, 3).T)


def _ranks(depth: int) -> range:
    return range(1, depth + 1)
