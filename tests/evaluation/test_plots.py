"""Figures hold the numbers they were given, and are written as PNG."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.drafters.dspark.calibration import reliability
from specjax.evaluation import plots
from specjax.evaluation.kinds import Acceptance, Kind
from tests.evaluation.test_tables import ROW


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_acceptance(tmp_path):
    path = tmp_path / "a.png"
    counts = {kind: Acceptance(0, 0, 0) for kind in Kind}
    ngram = counts | {Kind.WORD: Acceptance(3, 4, 9), Kind.SPACE: Acceptance(0, 5, 5)}
    other = counts | {Kind.WORD: Acceptance(1, 2, 9), Kind.DIGIT: Acceptance(6, 7, 8)}
    drafters = {
        "ngram": (np.array([0.5, 0.25, np.nan]), np.array([0.5, 0.125, 0.0]), ngram),
        "eagle3": (np.array([0.75]), np.array([0.625]), other),
    }
    figure = plots.acceptance(path, drafters)
    assert is_png(path)
    left, right = figure.axes
    lines = [line.get_ydata() for line in left.lines]
    for line, given in zip(lines, [x for pair in drafters.values() for x in pair[:2]], strict=True):
        np.testing.assert_array_equal(line, given)
    np.testing.assert_array_equal(left.lines[0].get_xdata(), [1, 2, 3])
    assert [label.get_text() for label in figure.legends[0].get_texts()] == ["ngram", "eagle3"]
    names = [label.get_text().replace("\n", " ") for label in right.get_xticklabels()]
    assert names == list(Kind)
    drawn = [
        [(names[round(bar.get_center()[0])], bar.get_height()) for bar in bars]
        for bars in right.containers
    ]
    # A kind that was never tried has no bar; one that was never accepted has one of height 0.
    assert drawn == [
        [("word start", 3 / 4), ("white space", 0)], [("word start", 1 / 2), ("digit", 6 / 7)],
    ]  # fmt: skip
    assert [text.get_text() for text in right.texts] == ["4", "5", "2", "7"]


@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_reliability(tmp_path, drafts):
    path = tmp_path / "r.png"
    rng = np.random.default_rng(0)
    told = rng.random((drafts, 2, 500))
    happened = rng.random((drafts, 500)) < told[:, 1]
    pairs = [
        tuple(reliability(x, came) for x in pair) for pair, came in zip(told, happened, strict=True)
    ]
    if drafts > 2:  # of the last draft nothing is known
        pairs[-1] = (reliability(np.zeros(0), np.zeros(0, bool)),) * 2
    figure = plots.reliability(path, pairs)
    assert is_png(path)
    assert len(figure.axes) == drafts
    for number, (ax, pair) in enumerate(zip(figure.axes, pairs, strict=True), start=1):
        np.testing.assert_array_equal(ax.lines[0].get_xydata(), [[0, 0], [1, 1]])
        assert ax.get_title() == (
            f"draft {number}, {pair[0].count.sum()} cycles\n"
            f"error {pair[0].error:.3f} → {pair[1].error:.3f}"
        )
        for bins, points in zip(pair, ax.collections[:2], strict=True):
            np.testing.assert_array_equal(points.get_offsets(), np.stack(bins[:2], axis=1))
            areas = points.get_sizes() - 20
            np.testing.assert_allclose(areas * bins.count.sum(), 400 * bins.count)
            for value, limits in zip(bins[:2], (ax.get_xlim(), ax.get_ylim()), strict=True):
                assert (value >= limits[0]).all() and (value <= limits[1]).all()
    names = [label.get_text() for label in figure.legends[0].get_texts()]
    assert [name.split()[0] for name in names] == ["before", "after"]


def heights(figure):
    """The bars of each axis of a plot."""
    return [[bar.get_height() for bar in axis.patches] for axis in figure.axes]


def test_bars_are_the_figures(tmp_path):
    rows = [ROW, ROW | {"drafter": "other", "tau": 2.0, "speedup": 0.5}]
    figure = plots.evaluation(tmp_path / "a.png", rows)
    assert heights(figure) == [[1.5, 2.0], [1.5, 0.5]]
    assert is_png(tmp_path / "a.png")


def test_the_fight_shows_how_tau_rose(tmp_path):
    points = [{"minutes": 0.0, "replayed/tau": 1.1}, {"minutes": 2.0, "replayed/tau": 1.4}]
    figure = plots.fight(tmp_path / "b.png", {"a|b": points}, [ROW])
    assert heights(figure)[1:] == [[1.5], [1.5]]
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[0.0, 1.1], [2.0, 1.4]]
