"""Loss masks worked by hand, what is refused, and batches that lose and repeat nothing."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from specjax.distillation import data
from specjax.models.tokenizer import set_template_options, tokenizer_from_gguf

TOKENS = ["<|start|>", "<|end|>", *"abcdefghijklmnopqrstuvwxyzĠĊ", "ĊĊ"]
TURN = "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n"
HEADER = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + HEADER
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|start|>assistant\n"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}\n"
    "{% else %}" + TURN + "{% endif %}{% endfor %}" + HEADER
)
FORGETFUL = (  # shows only the last answer, as templates do that strip thinking
    "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}"
    + TURN
    + "{% endif %}{% endfor %}"
    + HEADER
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "so it is"},
]


def tokenizer_with(template=PLAIN, tokens=TOKENS, merges=("Ċ Ċ",)):
    return tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
            "tokenizer.ggml.merges": list(merges),
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.chat_template": template,
        }
    )


def supervised(tokenizer, example):
    """The supervised spans as texts."""
    cuts = np.flatnonzero(np.diff(example.loss_mask.astype(int), prepend=0, append=0))
    return [tokenizer.decode(example.tokens[a:b]) for a, b in cuts.reshape(-1, 2)]


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path, tokenizer, max_tokens=100):
    return data.read_examples(path, tokenizer, vocab_size=len(TOKENS), max_tokens=max_tokens)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_answers_and_their_ends_are_supervised_and_nothing_else(template):
    tokenizer = tokenizer_with(template)
    example = data.encode_chat(tokenizer, CHAT)
    assert supervised(tokenizer, example) == ["yes<|end|>", "so it is<|end|>"]
    rendered = tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert example.tokens.tolist() == rendered
    assert tokenizer.decode(example.prompt) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


def test_without_a_special_token_a_turn_ends_with_what_the_template_adds():
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant {% endif %}"
    tokenizer = tokenizer_with(template)
    assert supervised(tokenizer, data.encode_chat(tokenizer, CHAT)) == ["yes\n", "so it is\n"]


def test_a_token_of_both_header_and_answer_is_not_supervised():
    tokenizer = tokenizer_with()
    chat = [CHAT[0], {"role": "assistant", "content": "\n\nyes"}]
    example = data.encode_chat(tokenizer, chat)
    assert TOKENS.index("ĊĊ") in example.tokens
    assert supervised(tokenizer, example) == ["\nyes<|end|>"]


@pytest.mark.slow
def test_smollm2_supervises_what_it_would_write(smollm2):
    chat = [CHAT[0], {"role": "assistant", "content": "Hello there!"}, *CHAT[2:]]
    example = data.encode_chat(smollm2.tokenizer, chat)
    spans = supervised(smollm2.tokenizer, example)
    assert spans == ["Hello there!<|im_end|>", "so it is<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            MARKED.replace("'assistant'", "'model'"),
            "marks no token as the assistant's in '<|start|>",
        ),
        (
            "{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}",
            "marks every token as the assistant's in 'hiyes",
        ),
        (FORGETFUL, "rewrites the turn of message 2 in a longer conversation: '\\nhi<|end|>"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "cannot be rendered: roles must alternate",
        ),
    ],
)
def test_what_is_wrong_with_a_template_is_named(template, message):
    tokenizer = tokenizer_with(template)
    with pytest.raises(ValueError) as error:
        data.encode_chat(tokenizer, CHAT)
    assert f"chat template {data.template_hash(tokenizer)}" in str(error.value)
    assert message in str(error.value)


def test_all_forms_of_a_line_give_the_same_example(tmp_path):
    tokenizer = tokenizer_with()
    whole = data.encode_chat(tokenizer, CHAT[:2])
    ids = whole.tokens.tolist()
    cut = len(whole.prompt)
    path = write(
        tmp_path / "x.jsonl",
        {"messages": CHAT[:2]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"prompt": "hi", "response": "yes"},
        {"prompt": "x", "response": "", "prompt_tokens": ids[:cut], "response_tokens": ids[cut:-1]},
    )
    examples, stats = read(path, tokenizer)
    for example in examples[:3]:
        np.testing.assert_array_equal(example.tokens, whole.tokens)
        np.testing.assert_array_equal(example.loss_mask, whole.loss_mask)
    # Decoding stops at the end of the turn: the line break after it was never written.
    np.testing.assert_array_equal(examples[3].tokens, whole.tokens[:-1])
    np.testing.assert_array_equal(examples[3].loss_mask, whole.loss_mask[:-1])
    assert stats == data.ReadStats(4, 4, 0, 4 * len(ids) - 1, 4 * len("yes."))


def test_options_reach_the_template(tmp_path):
    path = write(tmp_path / "x.jsonl", {"prompt": "hi", "response": "yes"})
    lengths = []
    for brief in (False, True):
        tokenizer = tokenizer_with("{% if brief %}<|start|>{% endif %}" + PLAIN)
        set_template_options(tokenizer, {"brief": brief})
        lengths.append(len(read(path, tokenizer)[0][0].tokens))
    assert lengths[1] == lengths[0] + 1


def test_long_examples_are_left_out_and_counted(tmp_path):
    lines = [{"prompt_tokens": [2] * n, "response_tokens": [3, 1]} for n in (1, 8, 9, 3)]
    path = write(tmp_path / "x.jsonl", *lines)
    examples, stats = read(path, None, max_tokens=10)
    assert [len(example.tokens) for example in examples] == [3, 10, 5]
    assert stats == data.ReadStats(read=4, kept=3, too_long=1, tokens=18, supervised_tokens=6)
    with pytest.raises(ValueError, match="4 examples, none of up to max_tokens=2 tokens"):
        read(path, None, max_tokens=2)


GOOD = {"prompt_tokens": [2, 3], "response_tokens": [4, 1]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (GOOD | {"response_tokens": []}, "response_tokens is missing or empty"),
        ({"prompt": "hi", "response": " \n"}, "message 2, the assistant's, is empty"),
        ({"messages": CHAT[1:]}, "message 1, the assistant's, answers no prompt"),
        ({"messages": CHAT[:1]}, "the assistant says nothing"),
        ({"messages": [{"from": "human"}]}, "message 1: expected"),
        ({"messages": [{"role": "user", "content": [1]}]}, "message 1: its content is no text"),
        ({"text": "hi"}, "expected messages, prompt and response, .* got text"),
        (GOOD | {"prompt_tokens": ["a"]}, "prompt_tokens: expected a list of token ids"),
        (GOOD | {"response_tokens": [31]}, "token id 31 is outside .* another model?"),
        (GOOD | {"prompt_tokens": [-1]}, "token id -1 is outside"),
        (GOOD | {"tokenizer_hash": "0123"}, "made with tokenizer_hash 0123, the target has"),
        ([], "expected a JSON object"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, record, message):
    path = write(tmp_path / "x.jsonl", GOOD, record)
    with pytest.raises(ValueError, match=f"x.jsonl, line 2: .*{message}"):
        read(path, tokenizer_with())


def test_tokens_of_another_tokenizer_or_template_are_refused(tmp_path):
    tokenizer = tokenizer_with()
    path = write(tmp_path / "x.jsonl", GOOD)
    manifest = tmp_path / "x.jsonl.json"
    for maker, name in (
        (tokenizer_with(tokens=TOKENS[:-1], merges=()), "tokenizer_hash"),
        (tokenizer_with(template=MARKED), "template_hash"),
    ):
        manifest.write_text(json.dumps(data.fingerprint(maker)))
        with pytest.raises(ValueError, match=f"line 1: its token ids were made with {name}"):
            read(path, tokenizer)
    manifest.write_text(json.dumps(data.fingerprint(tokenizer_with())))
    assert read(path, tokenizer)[1].kept == 1


def numbered(count, seed=0):
    """Examples of 2 to 9 tokens; example n holds only the token n."""
    lengths = np.random.default_rng(seed).integers(2, 10, count)
    return [
        data.Example(np.full(n, index, np.int32), np.arange(n) >= 1)
        for index, n in enumerate(lengths, start=1)
    ]


def found(batches):
    """The example number of every segment; checks that each is whole."""
    numbers = []
    for batch in batches:
        for tokens, mask, positions, segments in zip(
            *(batch[k] for k in ("tokens", "loss_mask", "positions", "segments")), strict=True
        ):
            assert not tokens[segments == 0].any() and not mask[segments == 0].any()
            for segment in range(1, segments.max() + 1):
                here = segments == segment
                (number,) = set(tokens[here].tolist())
                assert positions[here].tolist() == list(range(here.sum()))
                assert mask[here].tolist() == [False] + [True] * (here.sum() - 1)
                numbers.append(number)
    return numbers


def equal(batch, other):
    return all(np.array_equal(batch[name], other[name]) for name in batch.keys() | other.keys())


SIZES = {"batch_size": 2, "sequence_length": 16}


def test_rows_worked_by_hand():
    examples = [
        data.Example(np.arange(10, 10 + n, dtype=np.int32), np.arange(n) == n - 1)
        for n in (3, 2, 4)
    ]
    (batch,) = data.evaluation_batches(examples, batch_size=3, sequence_length=6)
    assert batch["tokens"].tolist() == [[10, 11, 12, 10, 11, 0], [10, 11, 12, 13, 0, 0], [0] * 6]
    assert batch["segments"].tolist() == [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0], [0] * 6]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0], [0] * 6]
    assert np.argwhere(batch["loss_mask"]).tolist() == [[0, 2], [0, 4], [1, 3]]
    kinds = {name: values.dtype.name for name, values in batch.items()}
    assert kinds == {"tokens": "int32", "loss_mask": "bool"} | dict.fromkeys(
        ("positions", "segments"), "int32"
    )


def epochs(hosts, count=40, length=8):
    """What each host meets in two epochs: examples of half a row, so batches end where epochs do."""
    examples = [
        data.Example(np.full(length, n, np.int32), np.arange(length) >= 1)
        for n in range(1, count + 1)
    ]
    for host in range(hosts):
        batches = iter(
            data.train_batches(examples, seed=1, process_index=host, process_count=hosts, **SIZES)
        )
        numbers = found(itertools.islice(batches, count // hosts // 2))
        yield numbers[: count // hosts], numbers[count // hosts :]


def test_every_epoch_has_all_examples_in_another_order():
    ((first, second),) = epochs(hosts=1)
    assert sorted(first) == sorted(second) == list(range(1, 41))
    assert first != second and first != sorted(first) and second != sorted(second)


def test_hosts_share_every_epoch():
    (first, second), (other_first, other_second) = epochs(hosts=2)
    assert sorted(first + other_first) == sorted(second + other_second) == list(range(1, 41))
    assert set(first) != set(second)


def test_batches_depend_on_the_seed_only():
    def first(seed):
        return next(iter(data.train_batches(numbered(40), seed=seed, **SIZES)))

    assert equal(first(3), first(3)) and not equal(first(3), first(4))


@pytest.mark.parametrize("after", [1, 7, 30])
def test_a_restored_iterator_goes_on_with_the_same_batches(after):
    def batches():
        return iter(data.train_batches(numbered(40), seed=1, **SIZES))

    source = batches()
    for _ in range(after):
        next(source)
    state = json.loads(json.dumps(source.get_state()))
    expected = [next(source) for _ in range(40)]
    restored = batches()
    next(restored)
    restored.set_state(state)
    assert all(equal(next(restored), batch) for batch in expected)


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_evaluation_meets_every_example_once_and_hosts_stay_in_step(hosts):
    examples = numbered(41)
    runs = [
        list(data.evaluation_batches(examples, process_index=i, process_count=hosts, **SIZES))
        for i in range(hosts)
    ]
    assert len({len(run) for run in runs}) == 1
    assert all(batch["tokens"].shape == (2, 16) for run in runs for batch in run)
    numbers = [number for run in runs for number in found(run)]
    assert sorted(numbers) == list(range(1, 42))
    again = data.evaluation_batches(examples, process_count=hosts, **SIZES)
    assert all(equal(batch, other) for batch, other in zip(runs[0], again, strict=True))


def test_batches_that_cannot_be_made_are_refused():
    with pytest.raises(ValueError, match="an example of 9 tokens does not fit rows of sequence_l"):
        data.train_batches(numbered(40), batch_size=2, sequence_length=8, seed=0)
    with pytest.raises(ValueError, match="3 hosts cannot share 2 examples"):
        data.train_batches(numbered(2), seed=0, process_index=1, process_count=3, **SIZES)
    with pytest.raises(ValueError, match="there is no host 3 of 3"):
        data.evaluation_batches(numbered(2), process_index=3, process_count=3, **SIZES)
    assert len(list(data.evaluation_batches(numbered(2), process_count=3, **SIZES))) == 1


def test_equal_prompts_are_on_the_same_side():
    def example(prompt, answer):
        return data.Example(np.array([*prompt, answer], np.int32), np.arange(3) == 2)

    examples = [example((n % 50, 7), n) for n in range(200)]
    train, held_out = data.split(examples, 0.2)
    assert len(train) + len(held_out) == 200
    sides = [{tuple(x.prompt.tolist()) for x in side} for side in (train, held_out)]
    assert not sides[0] & sides[1]
    assert 4 <= len(sides[1]) <= 18  # 10 of 50 are expected, with a deviation of 2.8
    backwards = data.split(examples[::-1], 0.2)[1]
    assert backwards[::-1] == held_out
    with pytest.raises(ValueError, match="leaves a side empty"):
        data.split(examples[:1], 0.2)
    with pytest.raises(ValueError, match="must be in"):
        data.split(examples, 1.0)
