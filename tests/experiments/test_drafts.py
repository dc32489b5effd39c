"""How `--drafter`, `--num_draft_tokens` and `--tree` say what is drafted."""

from __future__ import annotations

import pytest

from experiments import launch
from specjax.trees import DynamicTree, Tree


@pytest.fixture
def asked(monkeypatch, tiny):
    """What the registry is asked for."""

    def load(spec, target, num_draft_tokens, *, tree):
        return spec, num_draft_tokens, tree

    monkeypatch.setattr("specjax.load_drafter", load)
    return lambda *arguments: launch.load_drafter(arguments[0], tiny, *arguments[1:])


def test_every_way_to_say_it(asked):
    assert asked("ngram", None, []) == ("ngram", None, None)
    assert asked("ngram:2", 6, []) == ("ngram:2", 6, None)
    assert asked("x", None, ["4", "2"]) == ("x", None, Tree.of_widths((4, 2)))
    dynamic = DynamicTree(16, 5, 4)
    assert asked("x", None, ["dynamic", "16", "5", "4"]) == ("x", None, dynamic)
    assert asked("x@3", None, ["4", "2"]) == ("x", 3, None)
    assert asked("x@4,2", 6, []) == ("x", None, Tree.of_widths((4, 2)))
    assert asked("x@dynamic,16,5,4", 6, []) == ("x", None, dynamic)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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
