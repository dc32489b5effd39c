"""How `--drafter`, `--num_draft_tokens` and `--tree` say what is drafted."""

from __future__ import annotations

import dataclasses

import pytest

from experiments import drafts
from specjax.drafters import NGram
from specjax.trees import DynamicTree, Tree


@pytest.fixture
def asked(monkeypatch, tiny):
    """What the registry is asked for."""

    def load(spec, target, num_draft_tokens, *, tree):
        return spec, num_draft_tokens, tree

    monkeypatch.setattr("specjax.load_drafter", load)
    return lambda spec, *rest, **options: drafts.load_drafter(spec, tiny, *rest, **options)


def test_every_way_to_say_it(asked):
    assert asked("ngram", None, []) == ("ngram", None, None)
    assert asked("ngram:2", 6, []) == ("ngram:2", 6, None)
    assert asked("x", None, ["4", "2"]) == ("x", None, Tree.of_widths((4, 2)))
    dynamic = DynamicTree(16, 5, 4)
    assert asked("x", None, ["dynamic", "16", "5", "4"]) == ("x", None, dynamic)
    assert asked("x@3", None, ["4", "2"]) == ("x", 3, None)
    assert asked("x@4,2", 6, []) == ("x", None, Tree.of_widths((4, 2)))
    assert asked("x@dynamic,16,5,4", 6, []) == ("x", None, dynamic)


def test_controllers_stand_behind_what_is_drafted(asked, tiny, monkeypatch):
    assert drafts.parts("a+b") == ("a+b", None, None)
    assert drafts.parts("a+scheduler") == ("a", None, "scheduler")
    assert drafts.parts("a@7+fixed:3") == ("a", "7", "fixed:3")
    assert asked("x@7+fixed:3", None, [], controlled=True) == ("x", 7, None)
    assert asked("x@+fixed:3", 4, [], controlled=True) == ("x", 4, None)
    assert asked("x+fixed:3", 4, [], controlled=True) == ("x", 4, None)
    sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

    def controller(spec, confident=True, temperature=0.0):
        drafter = dataclasses.replace(NGram(7))
        object.__setattr__(drafter, "confident", confident)
        given = sampling | {"temperature": temperature}
        return drafts.load_controller(spec, tiny, drafter, 2, 256, "token", given)

    assert controller("x@7") is None
    assert int(controller("x@7+fixed:3").length) == 3
    assert float(controller("x@7+confidence:.5").threshold) == 0.5
    monkeypatch.setattr(drafts, "cycle_seconds", lambda *_, **options: {1: options["batch"], 8: 4})
    assert controller("x@7+scheduler").seconds.tolist() == [2, 4]
    assert controller("x@7+optimal").seconds.tolist() == [2, 4]
    assert int(controller("x@7+heuristic").first) == 4
    assert float(controller("x@7+threshold:0.25", temperature=1.0).threshold) == 0.25
    with pytest.raises(ValueError, match="threshold needs a temperature above 0"):
        controller("x@7+threshold:0.25")
    with pytest.raises(ValueError, match="no draft for fixed:3 to judge"):
        drafts.load_controller("none+fixed:3", tiny, None, 2, 256, "token", sampling)
    for word, message in (
        ("confidence:1.5", "a number from 0 to 1, got '1.5'"), ("confidence:", "got ''"),
        ("fixed:x", "unknown controller 'fixed:x'"), ("", "unknown controller ''"),
        ("scheduler:2", "unknown controller"), ("confidence:nan", "got 'nan'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            controller(f"x@7+{word}")
    for word in ("scheduler", "confidence:0.5"):
        with pytest.raises(ValueError, match="needs a drafter with a confidence head"):
            controller(f"x@7+{word}", confident=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x@7+fixed:3", None, []), r"whole drafts are verified here; leave \+fixed:3 out"),
        (("x", 3, ["4", "2"]), "give either --num_draft_tokens or --tree"),
        (("x", None, ["4", "b"]), "--tree takes numbers of children like 4,2,1"),
        (("x@", None, []), "--tree takes numbers of children like 4,2,1"),
        (("x@dynamic,5", None, []), "dynamic,TOTAL_TOKENS,DEPTH,TOP_K, got 'dynamic,5'"),
        (("x@99999", None, []), "a draft of 99999 tokens does not fit"),
        (("x@dynamic,100,2,4", None, []), "give 20 to choose from"),
    ],
)
def test_what_cannot_be_is_told(asked, arguments, message):
    with pytest.raises(ValueError, match=message):
        asked(*arguments)
