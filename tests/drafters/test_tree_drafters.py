"""Trees from `draft_lm` and `early_exit`: the text, what is drafted, and what the caches hold."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import drafters
from specjax.checkpoints.load import load_target
from specjax.decoding import decode as decoding
from specjax.decoding.prefill import prefill
from specjax.decoding.speculative import Counts, SpeculativeState, speculative_loop
from specjax.drafters import NGram
from specjax.models.cache import KVCache
from specjax.models.target import random_target
from specjax.models.transformer import causal_mask
from specjax.trees import Tree, best_first
from specjax.verification import greedy
from tests.conftest import TINY
from tests.fakes import PROMPTS, all_logits, reference_text

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
FAMILIES = ("llama_tied", "llama_untied", "llama3_scaled", "qwen2", "qwen3", "gemma3")
TREES = {
    "2-2": Tree.of_widths((2, 2)),
    "3-1-1": Tree.of_widths((3, 1, 1)),
    "1-2": Tree.of_widths((1, 2)),
    "best": best_first((0.6, 0.2, 0.1), 6),
}
PAIRS = [(name, tree) for name in ("draft_lm", "early_exit") for tree in TREES]
SIZE, BUDGET = 128, 40


def some(chosen, everything):
    """Parameters: the chosen ones always, the others among the slow tests."""
    return [x if x in chosen else pytest.param(*x, marks=pytest.mark.slow) for x in everything]


def noisy(target, scale, seed=1):
    """A drafting model that is right sometimes: the target with noise on its weights."""
    rng = np.random.default_rng(seed)

    def add(x):
        return x + jnp.asarray(rng.normal(0, scale, x.shape), x.dtype) if x.ndim > 1 else x

    return dataclasses.replace(target, params=jax.tree.map(add, target.params), name="noisy")


def first_layers(target, count):
    """The target cut behind some of its layers."""
    config = dataclasses.replace(
        target.config, num_layers=count, sliding_layers=target.config.sliding_layers[:count]
    )
    blocks = {i: target.params["blocks"][i] for i in range(count)}
    return dataclasses.replace(target, config=config, params=target.params | {"blocks": blocks})


def drafter_and_model(name, target, small, tree):
    """A drafter, and the model whose fresh passes say what it must draft."""
    if name == "draft_lm":
        return drafters.draft_lm(small, target, tree=TREES[tree]), small
    return drafters.early_exit(target, 2, tree=TREES[tree]), first_layers(target, 2)


@pytest.fixture(scope="module")
def small(tiny):
    noise = random_target(TINY, seed=5).params
    params = jax.tree.map(lambda x, n: x + (0.6 * n if x.ndim > 1 else 0), tiny.params, noise)
    return dataclasses.replace(tiny, params=params, name="small")


@pytest.fixture(scope="module")
def texts(tiny):
    return [reference_text(tiny, prompt, BUDGET) for prompt in PROMPTS]


def fresh_tree(model, tokens, tree, depth):
    """Greedy tokens of the first levels of a tree, every path by a pass without a cache."""
    paths, drafted = {0: []}, []
    for node, children in enumerate(tree.children):
        if children and tree.depths[node] < depth:
            text = list(tokens) + paths[node]
            padded = np.zeros(SIZE, np.int32)
            padded[: len(text)] = text
            logits = all_logits(model, padded)[len(text) - 1]
            for child, token in zip(children, np.argsort(-logits, kind="stable"), strict=False):
                paths[child] = [*paths[node], int(token)]
                drafted.append(int(token))
    return drafted


def deepest_below(tree, node):
    """The level of the deepest node that continues a node, its own if there is none."""
    return max(
        [deepest_below(tree, child) for child in tree.children[node]], default=tree.depths[node]
    )


def counts_of_fresh_trees(model, tree, prompt, text):
    """(accepted, drafted, committed) of every cycle, where trees are what fresh passes draft."""
    done, expected = 0, []
    while done < len(text):
        depth = min(tree.depth, len(text) - done - 1)
        drafted = fresh_tree(model, prompt + text[:done], tree, depth)
        node = kept = 0
        while kept < depth:
            children = [c for c in tree.children[node] if drafted[c - 1] == text[done + kept]]
            if not children:
                break
            node, kept = children[0], kept + 1
        in_play = min(deepest_below(tree, node), depth)
        expected.append((kept, in_play, kept + 1))
        done += kept + 1
    return expected


def counts_of(result, row):
    columns = result.accepted[row], result.drafted[row], result.committed[row]
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize(
    ("name", "tree"),
    some([("draft_lm", "2-2"), ("early_exit", "3-1-1")], PAIRS),
)
def test_greedy_text_and_every_count(tiny, small, texts, name, tree):
    drafter, model = drafter_and_model(name, tiny, small, tree)
    result = specjax.decode(tiny, drafter, PROMPTS, max_new_tokens=BUDGET)
    assert [row.tolist() for row in result.tokens] == texts
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        expected = counts_of_fresh_trees(model, TREES[tree], prompt, text)
        assert counts_of(result, row) == expected
    assert 0.1 < result.alpha[0] < 1 and len(result.survival) == TREES[tree].depth


@pytest.mark.parametrize(("name", "tree"), some([("early_exit", "best")], PAIRS))
def test_greedy_text_of_one_prompt(tiny, small, texts, name, tree):
    drafter, _ = drafter_and_model(name, tiny, small, tree)
    for row in (1, 2):
        result = specjax.decode(tiny, drafter, PROMPTS[row], max_new_tokens=BUDGET)
        assert result.tokens[0].tolist() == texts[row]


@functools.lru_cache
def family_case(family):
    """A golden model, prompts shorter and longer than its window of 7, and its plain text."""
    target = load_target(GOLDEN / family, dtype=jnp.float32)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 67, size).tolist() for size in (1, 9, 40)]
    return target, prompts, [reference_text(target, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize(
    ("family", "name", "tree"),
    some(
        [("gemma3", "early_exit", "1-2")],
        [
            (family, *pair)
            for family in FAMILIES
            for pair in (
                PAIRS if family == "gemma3" else [("draft_lm", "best"), ("early_exit", "2-2")]
            )
        ],
    ),
)
def test_every_family(family, name, tree):
    """Behind the window, slots and positions of a tree's nodes see different rows."""
    target, prompts, texts = family_case(family)
    drafter, model = drafter_and_model(name, target, noisy(target, 0.05), tree)
    result = specjax.decode(target, drafter, prompts, max_new_tokens=24, stop_tokens=[])
    assert [row.tolist() for row in result.tokens] == texts
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        assert counts_of(result, row) == counts_of_fresh_trees(model, TREES[tree], prompt, text)


def start(target, loaded, prompts, budget):
    """A batch after prefill, as `specjax.decode` makes it."""
    ids = [np.asarray(prompt, np.int32) for prompt in prompts]
    rows = decoding._rows(ids, np.full(len(ids), budget), SIZE, SIZE)
    empty = KVCache.zeros(target.config, SIZE, target.dtype)
    cache, state = decoding._broadcast((empty, loaded.drafter.init_state(SIZE)), len(ids))
    rows, cache, state = prefill(
        target.graphdef, target.params, loaded.drafter, loaded.params, rows, cache, state,
        longest=max(map(len, ids)),
    )  # fmt: skip
    return SpeculativeState(
        rows, cache, state, Counts.zeros(len(ids), SIZE, loaded.drafter), jnp.int32(0)
    )


def stale(length, tree, behind):
    """Huge finite values in all rows of a batch of caches that are not committed."""
    slots = jnp.arange(SIZE)
    sign = jnp.where(slots % 2 == 0, 1e30, -1e30)[:, None]
    hidden = slots >= length[:, None] - behind
    return jax.tree.map(lambda x: jnp.where(hidden[:, None, :, None], sign, x), tree)


def poisoned(state):
    """The same in both caches and the last draft's rows; absurd ids in all unused slots."""
    rows, own = state.rows, state.drafter_state
    slots = jnp.arange(SIZE)
    ids = jnp.where(slots % 2 == 0, 2**31 - 1, -(2**31)).astype(jnp.int32)
    tokens = jnp.where(slots >= rows.length[:, None], ids, rows.tokens)
    if own != ():
        last = jax.tree.map(lambda x: jnp.full_like(x, 1e30), own.rows)
        own = dataclasses.replace(own, cache=stale(rows.length, own.cache, 2), rows=last)
    return SpeculativeState(
        dataclasses.replace(rows, tokens=tokens), stale(rows.length, state.cache, 1), own,
        state.counts, state.cycle,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames="graphdef")
def fresh_rows(graphdef, params, tokens):
    """The rows of a batch `[B, S]` by one pass without a cache."""
    model = nnx.merge(graphdef, params)

    def one(tokens):
        empty = KVCache.zeros(model.config, 1, jnp.float32)
        return model(tokens, jnp.arange(SIZE), empty, jnp.int32(0), causal_mask(SIZE)).rows

    return jax.vmap(one)(tokens)


def assert_rows(model, cache, rows, behind):
    expected = fresh_rows(model.graphdef, model.params, rows.tokens)
    valid = jnp.arange(SIZE) < rows.length[:, None] - behind
    for cached, fresh in zip(jax.tree.leaves(cache), jax.tree.leaves(expected), strict=True):
        difference = jnp.where(valid[:, None, :, None], cached - fresh, 0)
        # Keys reach ±30; passes of different shapes differ by rounding only.
        assert jnp.abs(difference).max() <= 2e-4


def check_caches(target, loaded, own, prompts, texts):
    """Decodes cycle by cycle: rows of both caches (`own` fills the drafter's), and the text."""
    state, cycle = start(target, loaded, prompts, len(texts[0])), 0
    while True:
        assert_rows(target, state.cache, state.rows, 1)
        if own:
            assert_rows(own, state.drafter_state.cache, state.rows, 2)
        if not state.rows.running.any():
            break
        cycle += 1
        state = speculative_loop(
            target.graphdef, target.params, loaded.drafter, loaded.params, greedy, poisoned(state),
            None, None, jnp.full(8, -1, jnp.int32), jnp.int32(cycle),
            widths=(1, loaded.drafter.num_draft_tokens + 1),
        )  # fmt: skip
    tokens, lengths = np.asarray(state.rows.tokens), np.asarray(state.rows.length)
    for row, length, prompt, text in zip(tokens, lengths, prompts, texts, strict=True):
        assert row[len(prompt) : length].tolist() == text
    return cycle


@pytest.mark.parametrize(
    ("name", "tree"), some([("draft_lm", "2-2"), ("early_exit", "3-1-1")], PAIRS)
)
def test_caches_equal_a_fresh_prefill_and_stale_state_never_matters(tiny, small, texts, name, tree):
    loaded, _ = drafter_and_model(name, tiny, small, tree)
    own = small if name == "draft_lm" else None
    assert check_caches(tiny, loaded, own, PROMPTS, texts) >= 10


@pytest.mark.slow
def test_caches_behind_a_window_that_is_shorter_than_the_tree(tiny):
    """There a node no longer sees its own block's first tokens; the target keeps all it drafts."""
    config = dataclasses.replace(TINY, sliding_layers=(True, False, True), sliding_window=3)
    target = dataclasses.replace(tiny, config=config)
    texts = [reference_text(target, prompt, 24) for prompt in PROMPTS]
    assert min(len(set(text)) for text in texts) > 5
    loaded = drafters.draft_lm(target, target, tree=Tree.of_widths((2, 1, 1, 1, 1)))
    assert check_caches(target, loaded, target, PROMPTS, texts) == 4


SAMPLED = {
    "max_new_tokens": 40,
    "temperature": [1, 0.7, 1, 0.7, 1],
    "top_k": [0, 20, 0, 5, 0],
    "top_p": [1, 0.9, 1, 0.95, 1],
}


@pytest.fixture(scope="module")
def sampled(tiny):
    """Plain sampling's texts, by key."""
    return {
        seed: [
            row.tolist()
            for row in specjax.decode(
                tiny, None, PROMPTS, key=jax.random.key(seed), **SAMPLED
            ).tokens
        ]
        for seed in range(3)
    }


DRAFTS = {
    **{f"ngram:{k}": lambda target, small, k=k: NGram(k) for k in (1, 4, 8)},
    **{f"draft_lm:{k}": lambda t, small, k=k: drafters.draft_lm(small, t, k) for k in (1, 3, 8)},
    **{f"early_exit:{k}": lambda t, _, k=k: drafters.early_exit(t, 2, k) for k in (1, 2, 8)},
    **{
        f"{name} {tree}": lambda t, s, pair=(name, tree): drafter_and_model(pair[0], t, s, pair[1])[
            0
        ]
        for name, tree in PAIRS
    },
}


def in_batches(chosen):
    return some(chosen, [(drafts, batch) for drafts in DRAFTS for batch in (5, 1)])


@pytest.mark.parametrize(
    ("drafts", "batch"),
    in_batches([("draft_lm:3", 5), ("draft_lm 2-2", 5), ("early_exit 3-1-1", 1)]),
)
def test_gumbel_text_is_plain_samplings_text(tiny, small, sampled, drafts, batch):
    options = {
        name: value[:batch] if isinstance(value, list) else value for name, value in SAMPLED.items()
    }
    if batch == 1:  # filters that no row uses are left out of the program
        options = {"max_new_tokens": 40, "temperature": 1}
    drafter = DRAFTS[drafts](tiny, small)
    for seed, texts in sampled.items():
        result = specjax.decode(
            tiny, drafter, PROMPTS[:batch], key=jax.random.key(seed), rule="gumbel", **options
        )
        assert [row.tolist() for row in result.tokens] == texts[:batch]
    if "ngram" not in drafts:
        assert result.tau > 1.2


@pytest.mark.slow
def test_under_the_same_noise_the_target_as_its_own_drafter_is_always_accepted(tiny, sampled):
    drafter = drafters.draft_lm(tiny, tiny, tree=TREES["2-2"])
    for seed, texts in sampled.items():
        result = specjax.decode(
            tiny, drafter, PROMPTS, key=jax.random.key(seed), rule="gumbel", **SAMPLED
        )
        assert [row.tolist() for row in result.tokens] == texts
        for accepted, drafted in zip(result.accepted, result.drafted, strict=True):
            assert (accepted == drafted).all()


def test_a_draft_carries_the_law_of_sampling_without_replacement(tiny):
    """Each sibling's row is the law without its elders; tokens of a node always differ."""
    from specjax.drafters.autoregressive import _children
    from specjax.noise import Noise
    from specjax.sampling import Sampling, log_probs

    logits, sampling = jnp.array([0.3, 2.0, -1.0, 0.5, 1.0, -4.0]), Sampling(jnp.float32(1.5))
    keys = jax.random.split(jax.random.key(0), 20000)

    @jax.jit
    @jax.vmap
    def draw(key):
        return _children(sampling, Noise(key, jnp.int32(7)), None, logits, 0, 0, 3)

    tokens, log_q, finite = map(np.asarray, draw(keys))
    assert finite.all() and (np.diff(np.sort(tokens, axis=1), axis=1) > 0).all()
    q = np.exp(np.asarray(log_probs(logits, sampling), np.float64))
    for rank in range(3):
        for row in range(50):
            rest = q.copy()
            rest[tokens[row, :rank]] = 0
            np.testing.assert_allclose(np.exp(log_q[row, rank]), rest / rest.sum(), atol=2e-6)
        given = np.exp(log_q[:, rank].astype(np.float64))
        seen = np.bincount(tokens[:, rank], minlength=6)
        deviation = np.sqrt((given * (1 - given)).sum(0)) + 1e-9
        assert (np.abs(seen - given.sum(0)) < 5 * deviation).all()


def test_trees_whose_children_do_not_lie_in_the_order_of_their_parents():
    with pytest.raises(ValueError, match="children must lie in the order of their parents"):
        Tree((0, 0, 2, 1))
    with pytest.raises(ValueError, match="children must lie in the order of their parents"):
        Tree((0, 1, 0))
    assert Tree((0, 0, 1, 1, 2)).depths == (0, 1, 1, 2, 2, 2)
