"""The law of speculative decoding's speed-up: what acceptance and cost give, and what a wish needs.

A cycle commits 1 + Σ_k α_1 ⋯ α_k tokens on average, and costs βK for its draft and v(K) for its
verification, both over a plain step (Leviathan et al. 2023, theorem 3.8, where all α_k are one α and v
is 1: a step that reads weights takes no longer for K + 1 tokens than for one):

  S(K) = (1 + Σ_k α_1 ⋯ α_k) / (βK + v(K))

`Law` is fitted to what was measured: drafters of a whole block have a part that does not grow with K,
and v grows where products, not reads, take the time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

Alpha = float | Sequence[float]


def expected_tokens(alpha: Alpha, k: int) -> float:
    """E[τ]: tokens a cycle with K drafts commits; (1 − α^(K + 1)) / (1 − α) where all α_k are alike.

    Args:
      alpha: of every position, or α_1, α_2, …, the last of them for all further ones.
      k: K.
    """
    rates = np.atleast_1d(np.asarray(alpha, np.float64))
    if not ((rates >= 0) & (rates <= 1)).all():
        raise ValueError(f"α must lie in 0…1, got {alpha}")
    return float(1 + np.cumprod(rates[np.minimum(np.arange(k), len(rates) - 1)]).sum())


def speedup(alpha: Alpha, k: int, beta: float, verification: float = 1.0) -> float:
    """S(K), over plain decoding.

    Args:
      alpha: as in `expected_tokens`.
      k: K.
      beta: cost of a draft step.
      verification: v(K).
    """
    return expected_tokens(alpha, k) / (beta * k + verification)


def best_length(
    alpha: Alpha, beta: float, longest: int = 64, *, fixed: float = 0.0
) -> tuple[int, float]:
    """K* and S(K*) with v = 1; K* = 0 where no draft pays.

    Args:
      alpha, beta: as in `speedup`.
      longest: the most drafts.
      fixed: cost of a draft that does not grow with K, as of one pass for a whole block.
    """
    speeds = [1.0]
    speeds += [speedup(alpha, k, beta, 1 + fixed) for k in range(1, longest + 1)]
    best = int(np.argmax(speeds))
    return best, speeds[best]


def needed_alpha(
    wanted: float, beta: float, longest: int = 64, *, fixed: float = 0.0
) -> float | None:
    """The least α of every position with which the best K gives this speed-up; None if none does."""
    if best_length(1.0, beta, longest, fixed=fixed)[1] < wanted:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        reached = best_length(middle, beta, longest, fixed=fixed)[1] >= wanted
        low, high = (low, middle) if reached else (middle, high)
    return high


def needed_beta(
    wanted: float, alpha: Alpha, longest: int = 64, *, fixed: float = 0.0
) -> float | None:
    """The greatest β with which the best K gives this speed-up; None if not even 0 does."""
    lengths = range(1, longest + 1)
    costs = [(expected_tokens(alpha, k) / wanted - 1 - fixed) / k for k in lengths]
    return max(costs) if max(costs) >= 0 else None


def estimated_alpha(accepted: np.ndarray, drafted: np.ndarray) -> float:
    """One α for all positions from counted cycles: accepted / (accepted + rejections).

    Accepted over drafted, the "acceptance rate" of many dashboards, falls with K at the same α; this
    does not, since only tokens that were decided about count.

    Args:
      accepted, drafted: of every cycle, as `specjax.metrics` defines them.
    """
    decided = np.sum(accepted) + np.sum(accepted < drafted)
    return float(np.sum(accepted) / decided) if decided else float("nan")


def conditional(survival: np.ndarray) -> np.ndarray:
    """J_k / J_{k − 1} of J_1, J_2, …: α_k of a drafter taken to draft K tokens in every cycle.

    The law then has the counted τ, also of one that often drafts fewer. NaN behind J_k = 0.
    """
    before = np.append(1.0, survival[:-1])
    return np.divide(survival, before, out=np.full(len(survival), np.nan), where=before > 0)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of a plain step, and of the parts of a cycle with K drafts."""

    plain: float
    draft: float
    verify: float


@dataclasses.dataclass(frozen=True)
class Law:
    """S(K) of one drafter on one machine.

    Attributes:
      alpha: α_1, α_2, …
      start, beta: a draft costs start + βK.
      verification: (K, v(K)) ascending; a line between.
      drafting: share of the cycles that have a draft to verify; the others take a plain step.
    """

    alpha: tuple[float, ...]
    start: float
    beta: float
    verification: tuple[tuple[int, float], ...]
    drafting: float = 1.0

    @classmethod
    def fit(cls, alpha: Sequence[float], costs: Mapping[int, Costs], drafting: float = 1.0) -> Law:
        """From acceptance and from costs measured at two K or more.

        Args:
          alpha: of the longest drafts; positions that were never reached (NaN) have that before them.
          costs: by K.
          drafting: as above.

        Raises:
          ValueError: there is no α_1, or fewer than two K.
        """
        known = [value for value in alpha if value == value]
        if not known or len(costs) < 2:
            raise ValueError(
                f"a law needs α_1 and two K, got α {list(alpha)} and K {sorted(costs)}"
            )
        lengths = sorted(costs)
        shares = [costs[k].draft / costs[k].plain for k in lengths]
        beta, start = np.polyfit(lengths, shares, 1)
        growth = tuple((k, costs[k].verify / costs[k].plain) for k in lengths)
        draft = float(max(start, 0)), float(max(beta, 0))
        return cls(tuple(map(float, known)), *draft, growth, float(drafting))

    def v(self, k: int) -> float:
        """Verification of K drafts, over a plain step, which is that of none."""
        lengths, growth = zip((0, 1.0), *self.verification, strict=True)
        return float(np.interp(k, lengths, growth))

    def predicted(self, k: int) -> float:
        """S(K)."""
        cost = self.start + self.beta * k + 1 + self.drafting * (self.v(k) - 1)
        return expected_tokens(self.alpha, k) / cost

    def best(self, lengths: Sequence[int]) -> int:
        """K* among some K."""
        return max(lengths, key=self.predicted)
