"""Makes confidence true: sequential temperature scaling on counted cycles (DeepSeek-AI 2026, §4.2).

What the scheduler spends is the survival of a draft, the product of confidences up to it. So slot after
slot, those before it held, a temperature is chosen under which that product is the share of drafts that
really survive. A drafter keeps them as `confidence_temperatures`.
"""

from __future__ import annotations

import numpy as np

GRID = tuple(2 ** (step / 4) for step in range(-8, 13))  # of temperatures, 1/4…8
BINS = 20


def temperatures(confidence: np.ndarray, accepted: np.ndarray, drafted: np.ndarray) -> np.ndarray:
    """The temperature of each slot, `[K]`, under which survival has the least calibration error.

    Args:
      confidence: `[n, K]`, as told in n cycles at temperature 1, in (0, 1).
      accepted, drafted: `[n]`, as `specjax.metrics` defines them.

    Raises:
      ValueError: a slot was in play in no cycle.
    """
    logits, before = _logits(confidence), np.ones(len(confidence))
    chosen = []
    for slot in range(confidence.shape[1]):
        tried = drafted > slot
        if not tried.any():
            raise ValueError(f"draft {slot + 1} was in play in none of {len(tried)} cycles")
        survived = accepted[tried] > slot
        # By rising distance from 1, so that among equals the one that changes least is chosen.
        grid = sorted(GRID, key=lambda t: abs(np.log(t)))
        products = [before * _sigmoid(logits[:, slot] / t) for t in grid]
        errors = [calibration_error(product[tried], survived) for product in products]
        best = int(np.argmin(errors))
        chosen.append(grid[best])
        before = products[best]
    return np.array(chosen)


def survival(confidence: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """`[n, K]`: products of confidences that were told at temperature 1, at other temperatures."""
    return np.cumprod(_sigmoid(_logits(confidence) / scales), axis=1)


def calibration_error(told: np.ndarray, happened: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error (Guo et al. 2017): mean |told − happened| over bins of equal width.

    Args:
      told: `[n]` probabilities.
      happened: `[n]` bool.
      bins: how many.
    """
    return float(
        sum(count * abs(p - share) for p, share, count in reliability(told, happened, bins))
    )


def reliability(
    told: np.ndarray, happened: np.ndarray, bins: int = BINS
) -> list[tuple[float, float, float]]:
    """Of every bin that is not empty: mean probability told, share that happened, share of the n."""
    place = np.minimum((told * bins).astype(int), bins - 1)
    rows = []
    for bin_ in np.unique(place):
        inside = place == bin_
        rows.append((told[inside].mean(), happened[inside].mean(), inside.mean()))
    return rows


def _logits(confidence: np.ndarray) -> np.ndarray:
    inside = np.clip(np.asarray(confidence, np.float64), 1e-7, 1 - 1e-7)
    return np.log(inside) - np.log1p(-inside)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
