"""G-tests of counts, and their limit."""

from __future__ import annotations

import numpy as np


def _pooled(weights, enough, *columns):
    """Columns with the cells of least weight summed into one, while it holds less than `enough`."""
    order = np.argsort(weights)
    few = order[np.cumsum(weights[order]) < enough]
    keep = np.setdiff1d(np.arange(len(weights)), few)
    return [np.append(column[keep], column[few].sum()) for column in columns]


def _g(observed, expected):
    some = observed > 0
    return 2 * (observed[some] * np.log(observed[some] / expected[some])).sum()


def g_statistic(counts, expected):
    """G = 2 Σ O ln(O / E) over cells pooled to expected counts of at least 5; and its degrees."""
    observed, wanted = _pooled(expected, 5, counts, expected)
    return _g(observed, wanted), len(wanted) - 1


def two_sample_g_statistic(one, other):
    """The same for two samples of one law, over cells pooled to 10 counts of both together."""
    table = np.array(_pooled(one + other, 10, one, other))
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    return _g(table, expected), int((table.sum(0) > 0).sum()) - 1


def chi_square_limit(degrees):
    """The chi-square quantile at 1 − 1e-6 (Wilson-Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 4.75 * (2 / (9 * degrees)) ** 0.5) ** 3
