"""Tokenizers and chat templates, from a Hugging Face folder or from a GGUF file's metadata.

`transformers` is imported when the first tokenizer is made; it needs no torch for this.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

# How GGUF's pre-tokenizer names split text before byte-pair encoding.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT, _QWEN2_SPLIT = _SPLIT.replace("DIGITS", "{1,3}"), _SPLIT.replace("DIGITS", "")
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that are matched whole in the text


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """16 hexadecimal digits that tell vocabularies apart."""
    return _hash(json.dumps(sorted(tokenizer.get_vocab().items())))


def template_hash(tokenizer: PreTrainedTokenizerFast) -> str | None:
    """16 hexadecimal digits that tell chat templates apart; None where there is none."""
    return None if tokenizer.chat_template is None else _hash(tokenizer.get_chat_template())


def set_template_options(tokenizer: PreTrainedTokenizerFast, options: Mapping[str, Any]) -> None:
    """Gives the chat template arguments, such as `enable_thinking`, with every prompt.

    They become part of the template, and so of its hash: text, drafters and figures that were made with
    others are told apart. An option that was given before, or to the model that an exported folder was
    made from, is given anew.

    Args:
      tokenizer: is changed.
      options: texts, numbers, True, False or None by name.

    Raises:
      ValueError: there is no template, it does not read an option, or a value is of another kind.
    """
    if not options:
        return
    if tokenizer.chat_template is None:
        raise ValueError(f"this target has no chat template to read {', '.join(options)}")
    import jinja2

    given = tokenizer.chat_template  # one, or several by name
    lexed = jinja2.Environment().lex(_without(tokenizer.get_chat_template(), options))
    tokens = [(kind, word) for _, kind, word in lexed if kind != "whitespace"]
    names = {
        word
        for (_, before), (kind, word) in itertools.pairwise(tokens)
        if kind == "name" and before not in (".", "|")  # no attribute, no filter
    }
    for name, value in options.items():
        if name not in names - {"messages", "add_generation_prompt"}:
            raise ValueError(f"this target's chat template does not read {name!r}")
        if not isinstance(value, str | float | int | None):
            raise ValueError(f"{name}={value!r} is no text, number, true, false or null")
    literals = {
        name: "none" if value is None else json.dumps(value, ensure_ascii=False, allow_nan=False)
        for name, value in sorted(options.items())
    }
    lines = "".join(f"{{% set {name} = {value} %}}\n" for name, value in literals.items())
    tokenizer.chat_template = (
        lines + _without(given, options)
        if isinstance(given, str)
        else {name: lines + _without(template, options) for name, template in given.items()}
    )


def _without(template: str, options: Collection[str]) -> str:
    """A template less the lines that `set_template_options` put before it for some options."""
    end = re.match(r"(?:\{% set \w+ = .* %\}\n)*", template).end()
    lines = template[:end].split("\n")[:-1]
    return "".join(f"{x}\n" for x in lines if x.split()[2] not in options) + template[end:]


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> dict[str, str | None]:
    """`tokenizer_hash` and `template_hash` by name, for manifests."""
    return {
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer),
    }


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _transformers():
    # Otherwise the import prints that it found no torch, which specjax does not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers


def tokenizer_from_folder(folder: pathlib.Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a Hugging Face folder; None where it has no tokenizer files.

    Raises:
      ValueError: the files cannot be read.
    """
    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any((folder / name).exists() for name in files):
        return None
    try:
        return _transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds here, KeyError among them
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"{folder}: no readable tokenizer: {reason[0] if reason else error!r}"
        ) from error


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Builds the tokenizer that GGUF metadata describes (`tokenizer.ggml.*`).

    Raises:
      ValueError: the tokenizer model or its pre-tokenizer is not supported.
    """
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in builders:
        raise ValueError(
            f"GGUF tokenizer {kind!r} is not supported; supported: {', '.join(builders)}"
        )
    try:
        backend = builders[kind](metadata)
    except ValueError:
        raise
    except Exception as error:  # a missing key, or `tokenizers`, which raises Exception itself
        raise ValueError(f"GGUF tokenizer {kind!r} is damaged: {error}") from error
    from tokenizers import AddedToken

    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    for whole, add in (
        (_CONTROL, backend.add_special_tokens),
        (_USER_DEFINED, backend.add_tokens),
    ):
        add(
            [
                AddedToken(token, normalized=False, special=whole == _CONTROL)
                for token, kind in zip(tokens, types, strict=True)
                if kind == whole
            ]
        )

    def special(name):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is None:
            return None
        if type(index) is not int or not 0 <= index < len(tokens):
            raise ValueError(f"GGUF tokenizer: {name}_token_id {index!r} is no token")
        return tokens[index]

    _add_edges(backend, metadata, special("bos"), special("eos"))
    return _transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special("bos"),
        eos_token=special("eos"),
        unk_token=special("unknown"),
        pad_token=special("padding"),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _byte_level_bpe(metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = {
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "smollm": [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ],
        "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"), byte_level],
        "qwen2": [pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"), byte_level],
    }
    name = _pre_tokenizer(metadata)
    if name not in splits:
        raise ValueError(
            f"GGUF pre-tokenizer {name!r} is not supported; supported: {', '.join(splits)}"
        )
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    # Llama 3's own tokenizer takes a word that is in the vocabulary without merging it.
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=name == "llama-bpe"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits[name])
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(metadata: Mapping[str, Any]) -> str | None:
    name = metadata.get("tokenizer.ggml.pre")
    return "llama-bpe" if name in ("llama3", "llama-v3") else name


def _sentencepiece_bpe(metadata: Mapping[str, Any]) -> Tokenizer:
    """Llama 2's: pieces with scores; a pair merges where its union is a piece, best score first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [
        (-scores[index], index, (token[:cut], token[cut:]))
        for token, index in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = Tokenizer(
        models.BPE(
            vocab,
            [pair for *_, pair in sorted(merges)],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)] * prefix
    )
    return backend


def _add_edges(backend: Tokenizer, metadata: Mapping[str, Any], bos: str, eos: str) -> None:
    """Adds the begin and end tokens around a text, where the file asks for them."""
    from tokenizers import processors

    # Where the file has no flag: Llama's own tokenizers (2 and 3) begin a text with BOS.
    usual = metadata["tokenizer.ggml.model"] == "llama" or _pre_tokenizer(metadata) == "llama-bpe"
    first = bos if metadata.get("tokenizer.ggml.add_bos_token", usual) else None
    last = eos if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    edges = [token for token in (first, last) if token]
    if edges:
        backend.post_processor = processors.TemplateProcessing(
            single=[*([first] if first else []), "$A", *([last] if last else [])],
            special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(edges)],
        )


def encode_prompt(tokenizer: PreTrainedTokenizerFast, text: str, *, chat: bool) -> list[int]:
    """Token ids of a prompt.

    Args:
      tokenizer: the target's.
      text: the prompt.
      chat: render it as a user's turn through the chat template, with the assistant's header
        after it; otherwise the text is encoded as it is.
    """
    if not chat:
        return tokenizer(text)["input_ids"]
    if tokenizer.chat_template is None:
        raise ValueError("this target has no chat template: use chat=False (--nochat)")
    return encode_turns(tokenizer, [text])


def encode_turns(tokenizer: PreTrainedTokenizerFast, turns: Sequence[str]) -> list[int]:
    """Token ids of a conversation, with the assistant's header behind it.

    Args:
      tokenizer: the target's.
      turns: the user's and the assistant's in turn, from the user's to the user's.

    Raises:
      ValueError: there is no chat template, or it cannot be rendered.
    """
    if tokenizer.chat_template is None:
        raise ValueError("this target has no chat template, so its prompts have one turn")
    import jinja2

    messages = [
        {"role": "assistant" if number % 2 else "user", "content": turn}
        for number, turn in enumerate(turns)
    ]
    try:
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"the target's chat template cannot be rendered: {error}") from error
    return rendered["input_ids"]


def token_texts(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int]) -> list[str]:
    """Splits the decoded text by token; a character cut across tokens goes to its last token."""
    texts, before = [], ""
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:end])
        if text.endswith("\ufffd") and end < len(tokens):
            texts.append("")  # the character's other bytes are still to come
            continue
        texts.append(text[len(before) :])
        before = text
    return texts
