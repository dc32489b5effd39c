"""Training data: lines of text or token ids → token ids with a loss mask → packed batches.

A line of a JSONL file holds one of

* `prompt_tokens` and `response_tokens`, as `experiments.regenerate` writes them: the tokens that the
  target read and wrote, used as they are;
* `messages`, a list of `{"role": …, "content": …}`, with `tools` if it has any; or `conversations`, the
  same or with ShareGPT's `from` (`human`, `gpt`) and `value`;
* `prompt` and `response` as texts, which are two such messages.

Text goes through the tokenizer's chat template. What the target's assistant says is supervised, its
end of turn included; what the template writes before and between that is not.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from specjax.models.tokenizer import fingerprint, template_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """A text to learn from.

    Attributes:
      tokens: `[T]` int32.
      loss_mask: `[T]` bool; True where the token is the target's own text, to be predicted from the
        tokens before it. Never True at 0.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray

    @property
    def prompt(self) -> np.ndarray:
        """The tokens before the first supervised one."""
        return self.tokens[: np.argmax(self.loss_mask)]


@dataclasses.dataclass(frozen=True)
class ReadStats:
    """What was read: lines, examples kept and too long, and the tokens of those that were kept."""

    read: int
    kept: int
    too_long: int
    tokens: int
    supervised_tokens: int


def read_examples(
    path: str | pathlib.Path,
    tokenizer: PreTrainedTokenizerFast | None,
    *,
    vocab_size: int,
    max_tokens: int,
) -> tuple[list[Example], ReadStats]:
    """The examples of a file, in its order.

    Args:
      path: of the JSONL file. Its manifest `PATH.json`, where there is one, and the fields
        `tokenizer_hash` and `template_hash` of a line say what made its token ids.
      tokenizer: the target's; None where the file holds token ids.
      vocab_size: the target's.
      max_tokens: longer examples are left out, and counted.

    Raises:
      OSError: the file cannot be read.
      ValueError: a line cannot be used (the message has its number), or no example is left.
    """
    manifest = pathlib.Path(f"{path}.json")
    made_with = json.loads(manifest.read_text("utf-8")) if manifest.exists() else {}
    ours = {} if tokenizer is None else fingerprint(tokenizer)
    examples, read = [], 0
    for number, record in read_lines(path):
        try:
            if "response_tokens" in record:
                _check_origin(made_with | record, ours)
                example = _from_tokens(record)
            else:
                example = _from_text(record, tokenizer)
            wrong = example.tokens[(example.tokens < 0) | (example.tokens >= vocab_size)]
            if wrong.size:
                raise ValueError(
                    f"token id {wrong[0]} is outside the target's vocabulary of {vocab_size}: "
                    "was this tokenized for another model?"
                )
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        read += 1
        if len(example.tokens) <= max_tokens:
            examples.append(example)
    if not examples:
        raise ValueError(f"{path}: {read} examples, none of up to max_tokens={max_tokens} tokens")
    tokens, supervised = (
        sum(int(count(example)) for example in examples)
        for count in (lambda x: len(x.tokens), lambda x: x.loss_mask.sum())
    )
    stats = ReadStats(read, len(examples), read - len(examples), tokens, supervised)
    return examples, stats


def read_lines(path: str | pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number, from 1, and object of every line of a JSONL file that is not blank.

    Raises:
      OSError: the file cannot be read.
      ValueError: a line is no JSON object.
    """
    with pathlib.Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:  # no JSON or no UTF-8
                raise ValueError(f"{path}, line {number}: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object, got {line[:60]!r}"
                )
            yield number, record


def _check_origin(made_with: Mapping[str, Any], ours: Mapping[str, str | None]) -> None:
    for name, hash_ in ours.items():
        if made_with.get(name) not in (None, hash_):
            raise ValueError(
                f"its token ids were made with {name} {made_with[name]}, the target has {hash_}: "
                "make them with this target, or give text"
            )


def _from_tokens(record: Mapping[str, Any]) -> Example:
    parts = []
    for name in ("prompt_tokens", "response_tokens"):
        ids = np.asarray(record.get(name, []))
        if not ids.size:
            raise ValueError(f"{name} is missing or empty")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{name}: expected a list of token ids, got {str(record[name])[:60]}")
        parts.append(ids)
    tokens = np.concatenate(parts).clip(-1, 2**31 - 1).astype(np.int32)
    return Example(tokens, np.arange(len(tokens)) >= len(parts[0]))


def _from_text(record: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast | None) -> Example:
    if tokenizer is None:
        raise ValueError("this target has no tokenizer: give prompt_tokens and response_tokens")
    messages = record.get("messages", _from_sharegpt(record.get("conversations")))
    if messages is None:
        roles = {"user": "prompt", "assistant": "response"}
        if not all(isinstance(record.get(name), str) for name in roles.values()):
            raise ValueError(
                "expected messages, prompt and response, or prompt_tokens and response_tokens; "
                f"got {', '.join(record) or 'nothing'}"
            )
        messages = [{"role": role, "content": record[name]} for role, name in roles.items()]
    return encode_chat(tokenizer, messages, tools=record.get("tools"))


def _from_sharegpt(conversation: Any) -> Any:
    """Turns of `from` and `value` as messages; anything else as it is."""
    if not isinstance(conversation, list):
        return conversation
    roles = {"human": "user", "gpt": "assistant"}
    return [
        {"role": roles.get(turn["from"], turn["from"]), "content": turn["value"]}
        if isinstance(turn, dict) and turn.keys() >= {"from", "value"}
        else turn
        for turn in conversation
    ]


def encode_chat(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]], **options: Any
) -> Example:
    """Tokens of a conversation, and which of them the assistant wrote.

    They are marked by the template's `{% generation %}` where it has one. Otherwise each of the
    assistant's turns is what the conversation gains over the prompt for it, as decoding renders it,
    up to the last special token, which ends the turn: line breaks that the template adds after that
    are not supervised. A token that holds characters of both prompt and answer is not, either.

    Args:
      tokenizer: with a chat template.
      messages: `{"role": …, "content": …}` each, beginning with another than the assistant.
      options: further arguments of the template, such as `tools`.

    Raises:
      ValueError: the messages are malformed or an answer is empty; the template cannot be rendered,
        rewrites what came before, or leaves no token or every token supervised.
    """
    import jinja2

    _check_messages(messages)
    name = f"chat template {template_hash(tokenizer)}"
    if tokenizer.chat_template is None:
        raise ValueError("this target has no chat template: give token ids")
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False, **options)
    try:
        if _GENERATION.search(tokenizer.get_chat_template()):
            encoded = tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, **options
            )
            mask = np.asarray(encoded["assistant_masks"], bool)
        else:
            encoded = tokenizer(
                render(messages), add_special_tokens=False, return_offsets_mapping=True
            )
            mask = _assistant_mask(tokenizer, encoded, render, messages, name)
    except jinja2.TemplateError as error:
        raise ValueError(f"{name} cannot be rendered: {error}") from error
    if mask.all() or not mask.any():
        text = tokenizer.decode(encoded["input_ids"])
        raise ValueError(
            f"{name} marks {'every' if mask.any() else 'no'} token as the assistant's in "
            f"{text[:60]!r}…{text[-60:]!r}"
        )
    return Example(np.asarray(encoded["input_ids"], np.int32), mask)


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"expected a list of messages, got {str(messages)[:60]!r}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f'message {number}: expected {{"role": …, "content": "text"}}, '
                f"got {str(message)[:60]!r}"
            )
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"message {number}: its content is no text: {str(content)[:60]!r}")
        said = (content or "").strip() or message.get("tool_calls")
        if message["role"] == "assistant" and (number == 1 or not said):
            problem = "is empty" if number > 1 else "answers no prompt"
            raise ValueError(f"message {number}, the assistant's, {problem}")
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError("the assistant says nothing in it")


def _assistant_mask(
    tokenizer: PreTrainedTokenizerFast,
    encoded: Mapping[str, Any],
    render: Any,
    messages: Sequence[Mapping[str, Any]],
    name: str,
) -> np.ndarray:
    """`[T]` bool: what each assistant's turn adds to the prompt for it."""
    text = render(messages)
    starts, ends = np.asarray(encoded["offset_mapping"]).T
    special = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    is_special = np.isin(encoded["input_ids"], special)
    mask = np.zeros(len(starts), bool)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:index], add_generation_prompt=True)
        answered = render(messages[: index + 1])
        for part in (prompt, answered):
            if not text.startswith(part):
                same = len(os.path.commonprefix([part, text]))
                around = slice(max(same - 20, 0), same + 40)
                raise ValueError(
                    f"{name} rewrites the turn of message {index + 1} in a longer conversation: "
                    f"{part[around]!r} became {text[around]!r}; end the conversation there, or use "
                    "a template that only adds"
                )
        turn = (starts >= len(prompt)) & (ends <= len(answered))
        ends_turn = np.flatnonzero(turn & is_special)
        if ends_turn.size:
            turn[ends_turn[-1] + 1 :] = False
        mask |= turn
    return mask


def split(examples: Sequence[Example], held_out: float) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and about a share `held_out` of them to evaluate on.

    The side depends on a hash of the example's prompt only: examples with the same prompt are on the
    same side, in every file and order.

    Raises:
      ValueError: the share is not in (0, 1), or a side would be empty.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be in (0, 1), got {held_out}")
    sides = [], []
    for example in examples:
        digest = hashlib.sha256(example.prompt.astype("<i4").tobytes()).digest()
        sides[int.from_bytes(digest[:8]) < held_out * 2**64].append(example)
    if not all(sides):
        raise ValueError(
            f"held_out={held_out} of {len(examples)} examples leaves a side empty: change it, or "
            "give more examples"
        )
    return sides


def train_batches(
    examples: Sequence[Example],
    *,
    batch_size: int,
    sequence_length: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.IterDataset:
    """Endless batches, shuffled anew in every epoch; a host reads its share of each.

    An iterator over it can be saved and restored by `get_state` and `set_state`.

    Args:
      examples: all of them, on every host.
      batch_size: B, rows of this host.
      sequence_length: T. Examples are packed whole, as many as fit a row.
      seed: of the shuffling.
      process_index, process_count: this host, as `jax.process_index()` and its fellow have it.

    Returns:
      dicts of `[B, T]` arrays: `tokens` int32; `loss_mask` bool; `positions` int32, from 0 in every
      example; `segments` int32, the example's number in its row from 1, and 0 where nothing is.

    Raises:
      ValueError: an example is longer than a row, or there are fewer examples than hosts.
    """
    if process_count > len(examples):
        raise ValueError(f"{process_count} hosts cannot share {len(examples)} examples")
    _check_sizes(examples, sequence_length, process_index, process_count)
    share = _shuffled_share(examples, seed, process_index, process_count)
    return _packed(share, batch_size, sequence_length).batch(batch_size)


def cached_batches(
    source: Any,
    unpack: Callable[[bytes], dict[str, np.ndarray]],
    *,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.IterDataset:
    """Endless batches of records, shuffled anew in every epoch; a host reads its share of each."""
    if process_count > len(source):
        raise ValueError(f"{process_count} hosts cannot share {len(source)} rows of features")
    share = _shuffled_share(source, seed, process_index, process_count)
    # Grain's own buffer of 500 rows would be gigabytes of features.
    ahead = grain.ReadOptions(num_threads=4, prefetch_buffer_size=max(4, 2 * batch_size))
    return share.map(unpack).to_iter_dataset(ahead).batch(batch_size)


def _shuffled_share(
    source: Any, seed: int, process_index: int, process_count: int
) -> grain.MapDataset:
    """Endless elements, shuffled anew in every epoch; a host's share of each."""
    shuffled = grain.MapDataset.source(source).seed(seed).shuffle()
    return shuffled[process_index::process_count].repeat()


def examples_hash(examples: Sequence[Example]) -> str:
    """16 hexadecimal digits that tell sets of examples apart."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.tokens.astype("<i4").tobytes() + example.loss_mask.tobytes() + b"|")
    return digest.hexdigest()[:16]


def token_counts(examples: Sequence[Example], vocab_size: int) -> np.ndarray:
    """`[V]`: how often the target says each token in the supervised text."""
    said = [example.tokens[example.loss_mask] for example in examples]
    return np.bincount(np.concatenate(said), minlength=vocab_size)


def evaluation_batches(
    examples: Sequence[Example],
    *,
    batch_size: int,
    sequence_length: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.IterDataset:
    """One pass over all examples in their order; the last batch is filled with empty rows.

    Arguments, results and errors are those of `train_batches`. Every host gets as many batches: its
    rows are a slice of batches of `process_count * batch_size` rows, the same on all hosts.
    """
    _check_sizes(examples, sequence_length, process_index, process_count)
    rows = batch_size * process_count
    fill = functools.partial(grain.experimental.batch_and_pad, batch_size=rows)
    batches = _packed(grain.MapDataset.source(examples), rows, sequence_length)
    mine = slice(process_index * batch_size, (process_index + 1) * batch_size)
    return batches.batch(rows, batch_fn=fill).map(
        lambda batch: {name: values[mine] for name, values in batch.items()}
    )


def _packed(examples: grain.MapDataset, num_rows: int, sequence_length: int) -> grain.IterDataset:
    """Rows of packed examples; up to `num_rows` are open at a time."""
    features = examples.map(lambda x: {"tokens": x.tokens, "loss_mask": x.loss_mask})
    packed = grain.experimental.FirstFitPackIterDataset(
        # In memory already: threads would only add overhead.
        features.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        length_struct={"tokens": sequence_length, "loss_mask": sequence_length},
        num_packing_bins=num_rows,
        shuffle_bins=False,
    )
    return packed.map(
        lambda row: {
            "tokens": row["tokens"],
            "loss_mask": row["loss_mask"],
            "positions": row["tokens_positions"],
            "segments": row["tokens_segment_ids"],
        }
    )


def _check_sizes(
    examples: Sequence[Example], sequence_length: int, process_index: int, process_count: int
) -> None:
    if not 0 <= process_index < process_count:
        raise ValueError(f"there is no host {process_index} of {process_count}")
    longest = max(len(example.tokens) for example in examples)
    if longest > sequence_length:
        raise ValueError(
            f"an example of {longest} tokens does not fit rows of sequence_length="
            f"{sequence_length}: raise it, or read with max_tokens={sequence_length}"
        )
