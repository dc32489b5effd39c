"""The page, parsed: its text is the decoded text, its colours are the origins, nothing leaks out."""

from __future__ import annotations

import dataclasses
import html.parser

import numpy as np
import pytest

import specjax
from specjax import StopReason
from specjax.evaluation.html_transcript import html_transcript
from specjax.evaluation.transcript import Origin, origins
from specjax.trees import Tree
from tests.evaluation.test_transcript import CYCLES, result
from tests.fakes import PROMPTS
from tests.models.test_tokenizer import PIECES, sentencepiece

ORIGINS = {origin.name.lower(): origin for origin in Origin}
VOID = {"meta", "br"}


class Reader(html.parser.HTMLParser):
    """Texts by tag and class, spans counted to what they are in, and the spans of every answer."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.texts, self.spans = [], set(), [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.add(tag)
        if tag in VOID:
            return
        if tag == "span":
            text = self.open[-1][1]
            if text["of"] == ("div", "answer"):
                span = {"classes": attributes["class"].split(), "title": attributes["title"]}
                self.spans[-1].append(span | {"text": ""})
        else:
            text = {"of": (tag, attributes.get("class", "")), "text": ""}
            self.texts.append(text)
            if text["of"] == ("div", "answer"):
                self.spans.append([])
        self.open.append((tag, text))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            tag, text = self.open[-1]
            text["text"] += data
            if text["of"] == ("div", "answer"):
                assert tag == "span"  # nothing stands between the tokens
                self.spans[-1][-1]["text"] += data

    def of(self, tag, name=""):
        return [text["text"] for text in self.texts if text["of"] == (tag, name)]

    @property
    def answers(self):
        return self.of("div", "answer")


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    assert not reader.tags & {"script", "link", "img", "iframe"}
    return reader


def check(done):
    """What holds of every page."""
    reader = read(html_transcript(done))
    assert reader.answers == [done.tokenizer.decode(row) for row in done.tokens]
    assert reader.of("div", "prompt") == [done.tokenizer.decode(row) for row in done.prompts]
    for row, spans in enumerate(reader.spans):
        told = [ORIGINS[name] for span in spans for name in span["classes"] if name in ORIGINS]
        assert told == origins(done, row)
    return reader


def pieces(*names):
    return np.array([PIECES.index(name) for name in names])


# A character in two bytes, a line feed and a carriage return, and a stop token that cuts a draft.
TEXT = pieces("▁a", "b", "<0x0A>", "<0xC3>", "<0xA9>", "▁ab", "<0x0D>", "b", "</s>")


def test_a_page_worked_by_hand():
    sure = np.full((5, 3), 0.5)
    sure[0] = 0.875, 0.75, 0.125
    done = dataclasses.replace(result(TEXT, CYCLES, sentencepiece()), confidence=[sure])
    (spans,) = check(done).spans
    assert [span["text"] for span in spans] == ["a", "b", "\n", "", "é", " ab", "\r", "b", "</s>"]
    assert [span["classes"][1:] for span in spans] == [
        ["cycle"], [], ["newline"], ["cycle", "part"], [], [], ["cycle"], ["cycle"], ["cycle"],
    ]  # fmt: skip
    assert [span["title"].split("\n") for span in spans][1:3] == [
        ["accepted, draft 2", "cycle 1: 2 of 3 accepted", "confidence 0.75", f"token {TEXT[1]}"],
        [
            "corrected, in place of draft 3", "cycle 1: 2 of 3 accepted",
            "confidence of the rejected draft 0.12", f"token {TEXT[2]}",
        ],
    ]  # fmt: skip
    assert spans[5]["title"].startswith("bonus, after draft 2\ncycle 2: 2 of 2 accepted\ntoken")
    assert spans[6]["title"].startswith("undrafted\ncycle 3: 0 of 0 accepted\ntoken")
    # 9 tokens in 5 cycles. α_1: tried in 4, kept in 3; α_2: in 2 and 2; α_3: in 1 and 0.
    expected = "τ 1.80: 9 tokens in 5 target passes · α_k 0.75 1.00 0.00"
    assert read(html_transcript(done)).of("p", "figures") == [
        expected,
        f"{expected} · ended by EOS",
    ]


def test_what_is_hostile_is_only_text():
    hostile = "<script>alert(1)</script>&\"' --></div>{x}\r\n</style>"
    tokenizer = sentencepiece()
    tokens = np.array(tokenizer(hostile).input_ids)
    done = result(tokens, [(0, 0, 1)] * len(tokens), tokenizer)
    done = dataclasses.replace(done, prompts=[tokens])
    page = html_transcript(done, title=hostile)
    reader = check(done)
    assert hostile in reader.answers[0] and hostile in reader.of("div", "prompt")[0]
    assert "<script" not in page and "\r" not in page
    assert read(page).of("h1") == read(page).of("title") == [hostile]


def test_a_text_that_ends_inside_a_character():
    tokens = pieces("b", "<0xE2>", "<0x82>")
    spans = check(result(tokens, [(2, 3, 3)], sentencepiece())).spans[0]
    assert [span["text"] for span in spans] == ["b", "", "��"]


def test_an_answer_without_a_token():
    none = result(range(2), [(0, 0, 1)] * 2, sentencepiece())
    empty = [np.zeros(0, int)]
    none = dataclasses.replace(
        none, tokens=empty, accepted=empty, drafted=empty, committed=empty,
        confidence=[np.zeros((0, 0))], stop_reason=[StopReason.NAN],
    )  # fmt: skip
    figures = check(none).of("p", "figures")
    assert figures[1] == "τ –: 0 tokens in 0 target passes · α_k – – – · ended by NAN"


def test_a_page_of_plain_decoding():
    """Every token is a cycle, which no line need tell."""
    plain = result(TEXT, [(0, 0, 1)] * 9, sentencepiece())
    plain = dataclasses.replace(plain, num_draft_tokens=0, draft_depth=0)
    reader = check(plain)
    assert not any("cycle" in span["classes"] for span in reader.spans[0])
    assert reader.of("p", "figures")[0] == "τ 1.00: 9 tokens in 9 target passes"
    assert reader.of("p", "legend")[0].startswith("undrafted the target's own")


@pytest.mark.parametrize("drafts", ["chain", "tree"])
def test_pages_of_real_runs(tiny, drafts):
    drafter = specjax.drafters.NGram(4)
    if drafts == "tree":
        drafter = specjax.drafters.early_exit(tiny, 2, tree=Tree.of_widths((2, 2)))
    done = specjax.decode(tiny, drafter, PROMPTS[0], max_new_tokens=64)
    done = dataclasses.replace(done, tokenizer=sentencepiece())
    reader = check(specjax.DecodeResult.pooled([done, done]))
    for spans in reader.spans:
        assert sum("cycle" in span["classes"] for span in spans) == len(done.committed[0])
        assert "accepted" in spans[-1]["title"]
    assert "thin line" in reader.of("p", "legend")[0]


def test_without_a_tokenizer():
    with pytest.raises(ValueError, match="needs a tokenizer"):
        html_transcript(result(range(9), CYCLES))
