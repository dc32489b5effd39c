"""Tokenizers built from GGUF metadata, worked by hand; text split by token."""

from __future__ import annotations

import pytest

from specjax.models.tokenizer import (
    fingerprint,
    set_template_options,
    token_texts,
    tokenizer_from_gguf,
)

BYTES = [f"<0x{value:02X}>" for value in range(256)]
PIECES = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab"]
# "bc" scores above "ab": in "abc" the pair b c merges first, and "ab" then has no b to take.
SCORES = [0.0] * 259 + [-9.0, -10.0, -11.0, -12.0, -2.0, -1.0, -3.0, -4.0]


def sentencepiece(**changes):
    return tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": PIECES,
            "tokenizer.ggml.scores": SCORES,
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 8,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
        }
    )


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc", ["<s>", "▁a", "bc"]),
        ("ab", ["<s>", "▁ab"]),
        ("b ab", ["<s>", "▁", "b", "▁ab"]),
        ("é", ["<s>", "▁", "<0xC3>", "<0xA9>"]),
        ("a</s>", ["<s>", "▁a", "</s>"]),
    ],
)
def test_llama2_pieces_merge_by_score(text, pieces):
    tokenizer = sentencepiece()
    ids = tokenizer(text).input_ids
    assert [PIECES[index] for index in ids] == pieces
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix("</s>")


def test_edges_are_added_as_the_file_says():
    def edges(**changes):
        return [PIECES[index] for index in sentencepiece(**changes)("ab").input_ids]

    assert edges(add_bos_token=False) == ["▁ab"]
    assert edges(add_eos_token=True) == ["<s>", "▁ab", "</s>"]
    assert edges(add_space_prefix=False) == ["<s>", "ab"]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["it", "'s", "Ġ12345", "ĠA"]),
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠA"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "45", "ĠA"]),
        ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠA"]),
    ],
)
def test_pre_tokenizers_split_as_they_should(pre, words):
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["x", "<s>"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 1,
    }
    # Llama 3's begins a text with BOS where the file does not say otherwise.
    expected = [1, 0] if pre == "llama-bpe" else [0]
    assert tokenizer_from_gguf(metadata)("x").input_ids == expected
    backend = tokenizer_from_gguf(metadata).backend_tokenizer
    split = backend.pre_tokenizer.pre_tokenize_str("it's 12345 A")
    assert [word for word, _ in split] == words


# Reads its options at the top, in a loop and in a macro; begins with what trimming would take.
OPTIONS = (
    "\n  {% macro mark() %}{{ 'a' if mood == 'a\"é😀' else 'b' }}{% endmacro %}"
    "{% for m in messages %}{{ mark() }}{{ m.role | trim if false }}"
    "{{ 'c' if deep is defined and deep is false }}{% endfor %}"
    "{% if deep is none %}ab{% endif %}{{ count }}moo{# moo #}{{ 'moo' if false }}"
)


@pytest.mark.parametrize(
    "options", [{"deep": False}, {"deep": None, "mood": 'a"é😀'}, {"count": 3, "deep": True}]
)
def test_template_options_are_as_if_given_with_every_prompt(options):
    tokenizer, chat = sentencepiece(), [{"role": "user", "content": "x"}]
    tokenizer.chat_template = OPTIONS
    expected = tokenizer.apply_chat_template(chat, tokenize=False, **options)
    before = fingerprint(tokenizer)
    set_template_options(tokenizer, {})
    assert fingerprint(tokenizer) == before
    set_template_options(tokenizer, options)
    assert tokenizer.apply_chat_template(chat, tokenize=False) == expected
    after = fingerprint(tokenizer)
    assert after["tokenizer_hash"] == before["tokenizer_hash"]
    assert after["template_hash"] != before["template_hash"]
    set_template_options(tokenizer, {"deep": "other", "mood": "a\u2028%} \n"})
    set_template_options(tokenizer, {"mood": "x"} | dict(reversed(options.items())))
    assert tokenizer.chat_template.count("{% set") == len({"mood", *options})
    tokenizer.chat_template = OPTIONS
    set_template_options(tokenizer, dict(reversed(options.items())))
    assert fingerprint(tokenizer) == after


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moo": "a"}, "chat template does not read 'moo'"),
        ({"mood %}": "a"}, "chat template does not read 'mood %}'"),
        ({"macr": "a"}, "chat template does not read 'macr'"),
        ({"role": "a"}, "chat template does not read 'role'"),
        ({"trim": "a"}, "chat template does not read 'trim'"),
        ({"messages": "a"}, "chat template does not read 'messages'"),
        ({"mood": ["a"]}, r"mood=\['a'\] is no text"),
        ({"mood": float("nan")}, "not JSON compliant"),
    ],
)
def test_template_options_that_change_nothing_are_refused(options, message):
    tokenizer = sentencepiece()
    with pytest.raises(ValueError, match="has no chat template to read"):
        set_template_options(tokenizer, options)
    tokenizer.chat_template = OPTIONS
    with pytest.raises(ValueError, match=message):
        set_template_options(tokenizer, options)
    assert tokenizer.chat_template == OPTIONS


def test_damaged_metadata_is_named():
    with pytest.raises(
        ValueError, match="GGUF tokenizer 'gpt2' is damaged: 'tokenizer.ggml.tokens'"
    ):
        tokenizer_from_gguf({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"})


def test_a_character_cut_across_tokens_goes_to_its_last_one():
    tokenizer = sentencepiece()
    ids = tokenizer("aéb").input_ids
    texts = token_texts(tokenizer, ids)
    assert texts == ["<s>", " a", "", "é", "b"]
    assert "".join(texts) == tokenizer.decode(ids)
    # Where the text ends inside a character, what there is of it is still shown.
    assert "".join(token_texts(tokenizer, ids[:3])) == tokenizer.decode(ids[:3])
