"""The transcript's colours against counts worked by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import specjax
from specjax import DecodeResult, StopReason
from specjax.evaluation.transcript import Origin, Place, legend, origins, places
from tests.models.test_tokenizer import PIECES, sentencepiece


def result(tokens, cycles, tokenizer=None):
    accepted, drafted, committed = (np.array(column) for column in zip(*cycles, strict=True))
    return DecodeResult(
        [np.zeros(1, int)], [np.array(tokens)], [StopReason.EOS], [accepted], [drafted],
        [committed], [np.zeros((len(cycles), 0))], 3, 3, 0.0, 1.0, tokenizer,
    )  # fmt: skip


# Two of three kept; all of two kept; no draft; none of three kept; cut by a stop token.
CYCLES = [(2, 3, 3), (2, 2, 3), (0, 0, 1), (0, 3, 1), (1, 1, 1)]


def test_origins():
    accepted, corrected, bonus, undrafted = Origin
    assert origins(result(range(9), CYCLES)) == [
        accepted, accepted, corrected, accepted, accepted, bonus, undrafted, corrected, accepted,
    ]  # fmt: skip


def test_places():
    accepted, corrected, bonus, undrafted = Origin
    done = result(range(9), CYCLES)
    assert places(done)[1:4] == [
        Place(accepted, 1, 2, 2, 3, None),
        Place(corrected, 1, 3, 2, 3, None),
        Place(accepted, 2, 1, 2, 2, None),
    ]
    sure = [np.arange(15).reshape(5, 3) / 16]
    told = places(dataclasses.replace(done, confidence=sure))
    # The bonus token (after 2 of 2) and the undrafted one have no draft, though a third was told of.
    expected = [0, 1, 2, 3, 4, None, None, 9, 12]
    assert [x.confidence for x in told] == [x if x is None else x / 16 for x in expected]
    assert told[5] == Place(bonus, 2, 3, 2, 2, None)
    assert told[6] == Place(undrafted, 3, 1, 0, 0, None)


def test_origins_of_a_real_run_match_its_counts(tiny):
    done = specjax.decode(tiny, specjax.drafters.NGram(4), [5, 9, 2, 5, 9], max_new_tokens=64)
    told = origins(done)
    assert len(told) == len(done.tokens[0]) == 64
    assert told.count(Origin.ACCEPTED) == done.accepted[0].sum() > 0
    assert len(told) - told.count(Origin.ACCEPTED) == done.target_passes


def test_text_and_colours():
    pieces = ["▁a", "b", "c", "<0xC3>", "<0xA9>", "▁ab", "a", "b", "</s>"]
    text = specjax.transcript(result([PIECES.index(p) for p in pieces], CYCLES, sentencepiece()))
    assert text.plain == "abcé abab</s>"
    coloured = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    assert ("c", "bold red") in coloured
    assert ("é", "green") in coloured  # both of its bytes were drafted; shown with the second
    assert (" ab", "bold blue") in coloured
    assert ("a", "default") in coloured


def test_legend_names_every_colour():
    assert legend().plain.split() == ["accepted", "corrected", "bonus", "undrafted"]


def test_without_a_tokenizer():
    with pytest.raises(ValueError, match="needs a tokenizer"):
        specjax.transcript(result(range(9), CYCLES))
