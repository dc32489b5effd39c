"""Makes confidence true: sequential temperature scaling on counted cycles (DeepSeek-AI 2026, §4.2).

What the scheduler spends is the survival of a draft, the product of confidences up to it. So slot after
slot, those before it held, a temperature is chosen under which that product is the share of drafts that
really survive. A drafter keeps them as `confidence_temperatures`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Of temperatures, 1/4…8, those near 1 first: among equals the one that changes least is chosen.
GRID = tuple(2 ** (step / 4) for step in sorted(range(-8, 13), key=abs))
BINS = 20


def fit_temperatures(
    confidence: np.ndarray, accepted: np.ndarray, drafted: np.ndarray
) -> np.ndarray:
    """The temperature of each slot, `[K]`, under which survival has the least calibration error.

    A cycle that a stop token cut tells nothing of the slots behind it, where a stop token that was
    rejected tells of a failure: survival is predicted a little too low there, the more the shorter
    the answers are.

    Args:
      confidence: `[n, K]`, of n cycles at temperature 1; logits beyond ±16 count as that.
      accepted, drafted: `[n]`, as `specjax.metrics` defines them.

    Raises:
      ValueError: a slot was in play in no cycle, or a confidence is not finite.
    """
    if not np.isfinite(confidence).all():
        raise ValueError("a confidence is not finite: the drafter's weights are damaged")
    logits, before = _logits(confidence), np.ones(len(confidence))
    chosen = []
    for slot in range(confidence.shape[1]):
        tried = drafted > slot
        if not tried.any():
            raise ValueError(f"draft {slot + 1} was in play in none of {len(tried)} cycles")
        survived = accepted[tried] > slot
        products = [before * _sigmoid(logits[:, slot] / t) for t in GRID]
        errors = [reliability(product[tried], survived).error for product in products]
        best = int(np.argmin(errors))
        chosen.append(GRID[best])
        before = products[best]
    return np.array(chosen)


def predicted_survival(confidence: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """`[n, K]`: products of confidences `[n, K]` of temperature 1, at other temperatures `[K]`."""
    return np.cumprod(_sigmoid(_logits(confidence) / temperatures), axis=1)


class Reliability(NamedTuple):
    """What was predicted against what happened, in bins; those that hold nothing are left out.

    Attributes:
      predicted: `[bins]`, the mean prediction of each.
      happened: `[bins]`, how often it came true.
      count: `[bins]`, predictions in each.
    """

    predicted: np.ndarray
    happened: np.ndarray
    count: np.ndarray

    @property
    def error(self) -> float:
        """Expected calibration error (Guo et al. 2017): mean |predicted − happened| of a prediction.

        NaN where there was none, like the means.
        """
        return self._mean(np.abs(self.predicted - self.happened))

    @property
    def mean_predicted(self) -> float:
        """Of all predictions."""
        return self._mean(self.predicted)

    @property
    def mean_happened(self) -> float:
        """How often any came true."""
        return self._mean(self.happened)

    def _mean(self, values: np.ndarray) -> float:
        total = self.count.sum()
        return float(values @ self.count / total) if total else float("nan")


def reliability(predicted: np.ndarray, happened: np.ndarray, bins: int = BINS) -> Reliability:
    """The bins of the reliability diagram, over which the calibration error is a mean.

    Args:
      predicted: `[n]` probabilities.
      happened: `[n]` bool.
      bins: how many, of equal width.
    """
    place = np.minimum((predicted * bins).astype(int), bins - 1)
    count = np.bincount(place, minlength=bins)
    held = count > 0
    sums = (np.bincount(place, values, bins)[held] for values in (predicted, happened))
    return Reliability(*(values / count[held] for values in sums), count[held])


def _logits(confidence: np.ndarray) -> np.ndarray:
    inside = np.clip(np.asarray(confidence, np.float64), 1e-7, 1 - 1e-7)
    return np.log(inside) - np.log1p(-inside)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
