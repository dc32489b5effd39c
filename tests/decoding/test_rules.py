"""Rules and trees in the real loop: exact counts from an oracle, exact laws of the first tokens."""

from __future__ import annotations

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import StopReason, drafters, trees
from specjax.decoding import decode as decoding
from specjax.decoding.speculative import Counts, SpeculativeState, speculative_loop
from specjax.drafters import NGram
from specjax.drafters.draft_lm import DraftLM
from specjax.drafters.stateless import Stateless
from specjax.models.cache import KVCache
from specjax.models.config import ModelConfig
from specjax.models.target import random_target
from specjax.noise import Noise, Role
from specjax.sampling import Sampling, log_probs
from specjax.trees import Tree
from specjax.types import Draft, LoadedDrafter
from specjax.verification import RULES, greedy
from specjax.verification.block import block_law
from specjax.verification.law import rule_of
from tests.fakes import PROMPTS, all_logits, reference_text

TREE = Tree.of_widths((2, 2, 1))
SHAPES = [  # of 10 nodes as TREE, and as deep or less
    TREE,
    Tree.of_widths((1, 3, 2)),
    Tree((0, 0, 0, 0, 0, 0, 0, 0, 0, 0)),
    Tree((0, 0, 0, 1, 3, 3, 4, 6, 6, 6)),
]
MAX_LEN = 48


@dataclasses.dataclass(frozen=True)
class TreeOracle(Stateless):
    """Drafts the true text on the way to one node, and something wrong beside that way.

    Behind what is wrong the text goes on truly. The params hold the texts, prompt included, and
    tables over which the cycles take turns, by the length of the text: shapes, nodes, valid counts.
    Tokens, and where the shape is traced parents, are absurd where they are not valid.
    """

    traced: bool = False
    num_draft_tokens: int = 10
    draft_depth: int = 3
    taps: tuple[int, ...] = ()

    def propose(self, params, target_params, state, context, noise):
        turn = context.length % len(params["nodes"])
        parents = params["parents"][turn] if self.traced else jnp.array(TREE.parents)
        seen = trees.reach(parents, 3)
        row = jnp.argmax(params["texts"][:, 0] == context.tokens[0])
        truth = params["texts"][row, context.length - 2 + seen.sum(-1)][1:]
        way = seen[params["nodes"][turn]]
        astray = way[parents] & ~way[1:]
        slots = jnp.arange(10)
        tokens = jnp.where(astray, (truth + 1 + slots) % 61, truth)
        valid = params["valid"][turn]
        absurd = jnp.where(slots % 2 == 0, 2**31 - 1, -(2**31))
        tokens = jnp.where(slots < valid, tokens, absurd)
        if self.traced:
            # Nothing but the count says that these are no children of the anchor.
            parents = jnp.where(slots < valid, parents, jnp.where(slots % 2 == 0, 0, absurd))
            return Draft(tokens, None, valid, 3, parents), state
        return Draft(tokens, None, valid, TREE), state


def oracle(texts, shapes, nodes, valid, traced=False):
    """An oracle; `nodes` and `valid` are as long as `shapes`."""
    table = np.zeros((len(texts), MAX_LEN + 8), np.int32)
    for row, prompt, text in zip(table, PROMPTS, texts, strict=True):
        whole = [*prompt, *text][: len(row)]
        row[: len(whole)] = whole
    parents = [shape.parents for shape in shapes]
    arrays = {"texts": table, "parents": parents, "nodes": nodes, "valid": valid}
    params = {name: jnp.asarray(np.asarray(x, np.int32)) for name, x in arrays.items()}
    return LoadedDrafter(TreeOracle(traced), params, "oracle")


def expected_counts(prompt, text, shapes, nodes, valid, end):
    """(accepted, drafted, committed) of every cycle of a row that ends after `end` tokens.

    `text` is what the row commits; it is shorter than `end` where a stop token ends it.
    """
    done, counts = 0, []
    while done < len(text):
        turn = (len(prompt) + done) % len(nodes)
        depths = shapes[turn].depths
        room = end - done - 1
        count = sum(depth <= room for depth in depths[1 : valid[turn] + 1])

        def way(node, parents=shapes[turn].parents):
            return [*way(parents[node - 1]), node] if node else [0]

        kept = [node for node in way(nodes[turn]) if node <= count]
        accepted = len(kept) - 1
        drafted = max(depths[node] for node in range(count + 1) if kept[-1] in way(node))
        committed = min(accepted + 1, len(text) - done)
        if committed <= accepted:
            accepted = drafted = committed
        counts.append((accepted, drafted, committed))
        done += committed
    return counts


def assert_counts(result, texts, shapes, nodes, valid, budgets, stops=()):
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        end = min(budgets[row], MAX_LEN - len(prompt))
        stop = min((text.index(stop) + 1 for stop in stops if stop in text), default=99)
        said = text[: min(end, stop)]
        assert result.tokens[row].tolist() == said
        full = StopReason.LENGTH if end == budgets[row] else StopReason.CACHE_FULL
        assert result.stop_reason[row] == (StopReason.EOS if stop <= end else full)
        columns = result.accepted[row], result.drafted[row], result.committed[row]
        found = list(zip(*(column.tolist() for column in columns), strict=True))
        assert found == expected_counts(prompt, said, shapes, nodes, valid, end)
    committed = np.concatenate(result.committed)
    assert result.tau == committed.sum() / len(committed)
    accepted = np.concatenate(result.accepted)
    assert result.survival.tolist() == [(accepted >= k).mean() for k in (1, 2, 3)]
    assert len(result.alpha) == result.draft_depth == 3


@pytest.fixture(scope="module")
def texts(tiny):
    """Plain greedy texts; longer than the row of the longest prompt has room for."""
    return [reference_text(tiny, prompt, 40) for prompt in PROMPTS]


BUDGETS = [9, 30, 30, 30, 2]  # the third row, of 30 tokens, ends where the cache is full


@pytest.mark.parametrize("node", range(11))
def test_an_oracle_is_accepted_up_to_the_node_where_it_goes_astray(tiny, texts, node):
    for valid in ([10], [10, 0, 3, 7, 1, 2]):
        shapes, nodes = [TREE] * len(valid), [node] * len(valid)
        drafter = oracle(texts, shapes, nodes, valid)
        result = specjax.decode(
            tiny, drafter, PROMPTS, max_new_tokens=BUDGETS, max_len=MAX_LEN, stop_tokens=[]
        )
        assert_counts(result, texts, shapes, nodes, valid, BUDGETS)
    assert result.stop_reason[2] == StopReason.CACHE_FULL


def test_eos_at_every_place_of_the_path_and_every_budget(tiny, texts):
    """With 4 tokens a cycle the stop token is each of the drafts, and the target's own."""
    shapes, nodes, valid = [TREE], [10], [10]
    drafter, places = oracle(texts, shapes, nodes, valid), set()
    for at in range(9):
        for budget in (at, at + 1, at + 2, 30):
            stops, budgets = [texts[3][at]], [max(budget, 1)] * 5
            result = specjax.decode(
                tiny, drafter, PROMPTS, max_new_tokens=budgets, max_len=MAX_LEN, stop_tokens=stops
            )
            assert_counts(result, texts, shapes, nodes, valid, budgets, stops)
            if result.stop_reason[3] == StopReason.EOS:
                places.add((result.accepted[3][-1], result.committed[3][-1]))
    assert places >= {(1, 1), (2, 2), (3, 3), (3, 4)}


NODES, VALID = [9, 7, 3, 10, 6, 2, 10], [10, 9, 10, 10, 0, 5, 4]


@pytest.mark.parametrize("budgets", [[30] * 5, [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
@pytest.mark.parametrize("rule", ["greedy", "gumbel"])
def test_a_shape_that_changes_every_cycle(tiny, texts, rule, budgets):
    """Traced parents; slots that are not valid claim to be children of the anchor."""
    options = {"max_len": MAX_LEN, "stop_tokens": []}
    if rule == "gumbel":
        options |= {"temperature": [1, 0.7, 1, 0.7, 1], "key": jax.random.key(3), "rule": rule}
        plain = specjax.decode(tiny, None, PROMPTS, max_new_tokens=MAX_LEN, **options)
        texts = [row.tolist() for row in plain.tokens]
    shapes = [SHAPES[turn % 4] for turn in range(7)]
    drafter = oracle(texts, shapes, NODES, VALID, traced=True)
    result = specjax.decode(tiny, drafter, PROMPTS, max_new_tokens=budgets, **options)
    assert_counts(result, texts, shapes, NODES, VALID, budgets)


@pytest.mark.parametrize(
    ("rule", "drafts", "message"),
    [
        ("token", "tree", "rule token verifies chains, this drafter drafts a tree of 10 tokens"),
        ("block", "traced", "rule block verifies chains, this drafter drafts a tree of 10 tokens"),
        ("tree_traversal", "traced", "rule tree_traversal .* needs the law q they were drawn from"),
        ("tree_without_replacement", "traced", "rule tree_without_replacement .* needs the law q"),
        ("tree_traversal", "chain", "rule tree_traversal .* needs the law q they were drawn from"),
    ],
)
def test_drafts_that_a_rule_cannot_verify(tiny, texts, rule, drafts, message):
    traced = oracle(texts, [TREE], [10], [10], traced=drafts == "traced")
    drafter = NGram(3) if drafts == "chain" else traced
    seen = []
    with pytest.raises(ValueError, match=message):
        specjax.decode(
            tiny, drafter, PROMPTS, temperature=1.0, key=jax.random.key(0), rule=rule,
            progress=lambda what, *_: seen.append(what),
        )  # fmt: skip
    assert set(seen) == {"prefill"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["early_exit", pytest.param("draft_lm", marks=pytest.mark.slow)])
def test_a_tree_around_a_chain_keeps_at_least_as_much(tiny, texts, name):
    """One cycle after each of 100 texts: the ranks 0 are the chain."""
    contexts = [p + text[:n] for p, text in zip(PROMPTS, texts, strict=True) for n in range(20)]
    noise = random_target(tiny.config, seed=5).params
    params = jax.tree.map(lambda x, n: x + (0.6 * n if x.ndim > 1 else 0), tiny.params, noise)
    small = dataclasses.replace(tiny, params=params)
    kept = []
    for tree in (Tree.chain(3), Tree.of_widths((2, 2, 1))):
        drafter = {
            "draft_lm": drafters.draft_lm(small, tiny, tree=tree),
            "early_exit": drafters.early_exit(tiny, 2, tree=tree),
        }[name]
        result = specjax.decode(tiny, drafter, contexts, max_new_tokens=4, stop_tokens=[])
        kept.append(np.array([accepted[0] for accepted in result.accepted]))
    chain, tree = kept
    assert (tree >= chain).all() and (tree > chain).sum() > 10
    assert len(set(chain.tolist())) == 4


def temporaries(kind, rule):
    """Bytes of temporary memory of a compiled loop, of the attention scores in one layer, and of
    one K or V of one layer."""
    batch, max_len, tree = 2, 4096, Tree.of_widths((2, 2))
    config = ModelConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2,
        num_kv_heads=2, head_dim=128, tie_embeddings=True, context_length=8192,
    )  # fmt: skip
    target = random_target(config)
    loaded = {
        "draft_lm": lambda: drafters.draft_lm(target, target, tree=tree),
        "early_exit": lambda: drafters.early_exit(target, 1, tree=tree),
        "traced": lambda: oracle([[]] * 5, [TREE], [10], [10], traced=True),
    }[kind]()
    width = loaded.drafter.num_draft_tokens + 1
    rows = decoding._rows([np.ones(3, np.int32)] * batch, np.full(batch, 64), max_len, max_len)
    empty = KVCache.zeros(config, max_len, jnp.float32)
    cache, state = decoding._broadcast((empty, loaded.drafter.init_state(max_len)), batch)
    sampling, keys = decoding.sampling_of(batch, 0.8, 0, 1.0, 0.0), None
    if rule is greedy:
        sampling = None
    else:
        keys = decoding._request_keys(jax.random.key(0), batch)
    carry = SpeculativeState(
        rows, cache, state, Counts.zeros(batch, 64, loaded.drafter), jnp.int32(0)
    )
    lowered = speculative_loop.lower(
        target.graphdef, target.params, loaded.drafter, loaded.params, rule, carry, sampling, keys,
        jnp.zeros(0, jnp.int32), jnp.int32(0), widths=(1, width),
    )  # fmt: skip
    scores = 4 * batch * config.num_heads * width * max_len
    memory = lowered.compile().memory_analysis().temp_size_in_bytes
    return memory, scores, 4 * batch * 2 * 128 * max_len


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        pytest.param("draft_lm", RULES["tree_traversal"], marks=pytest.mark.slow),
        pytest.param("early_exit", RULES["gumbel"], marks=pytest.mark.slow),
        pytest.param("traced", greedy, marks=pytest.mark.slow),
    ],
    ids=["draft_lm", "early_exit", "traced"],
)
def test_no_cache_is_ever_copied(kind, rule):
    memory, scores, one_array = temporaries(kind, rule)
    allowed = 3 * scores + 2**18  # scores, their exponentials, token slots, logits
    assert memory <= allowed < one_array


MICRO = ModelConfig(
    vocab_size=3, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, tie_embeddings=False, context_length=64,
)  # fmt: skip
START, TEMPERATURE, HORIZON = [1, 2, 0], 2.0, 4


@functools.lru_cache
def micro(seed):
    """Three tokens and one layer, with weights so large that every context matters."""
    target = random_target(MICRO, seed=seed)
    params = jax.tree.map(lambda x: 20 * x if x.ndim > 1 else x, target.params)
    return dataclasses.replace(target, params=params)


@functools.lru_cache
def exact_law(seed):
    """The law of the first tokens, by passes without a cache."""
    law = {(): 1.0}
    for _ in range(HORIZON):
        longer = {}
        for context, mass in law.items():
            tokens = [*START, *context]
            padded = np.zeros(8, np.int32)
            padded[: len(tokens)] = tokens
            logits = all_logits(micro(seed), padded)[len(tokens) - 1]
            row = log_probs(jnp.asarray(logits), Sampling(jnp.float32(TEMPERATURE)))
            for token, p in enumerate(np.exp(np.asarray(row, np.float64))):
                longer[*context, token] = mass * p
        law = longer
    return law


def g_statistic(counts, law):
    """G = 2 Σ O ln(O / E) over cells pooled to expected counts of at least 5.

    Returns:
      G, and the chi-square quantile at 1 − 1e-6 of its degrees (Wilson-Hilferty).
    """
    assert counts.keys() <= law.keys()
    cells = sorted(law, key=law.get)
    expected = sum(counts.values()) * np.array([law[cell] for cell in cells])
    observed = np.array([counts[cell] for cell in cells])
    rare = np.cumsum(expected) < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(observed[~rare], observed[rare].sum())
    some = observed > 0
    statistic = 2 * (observed[some] * np.log(observed[some] / expected[some])).sum()
    degrees = len(expected) - 1
    return statistic, degrees * (1 - 2 / (9 * degrees) + 4.75 * (2 / (9 * degrees)) ** 0.5) ** 3


def joint_law(rule, drafter):
    """G of the first four tokens of 12288 rows, and its limit: two cycles of two drafts or more."""
    target, counts = micro(8), collections.Counter()
    for seed in range(3):
        result = specjax.decode(
            target, drafter, [START] * 4096, max_new_tokens=6, temperature=TEMPERATURE,
            key=jax.random.key(seed), max_len=9, rule=rule, stop_tokens=[],
        )  # fmt: skip
        counts.update(tuple(row[:HORIZON].tolist()) for row in result.tokens)
    assert 1.3 < result.tau < 2.7
    return g_statistic(counts, exact_law(8))


def two_drafts(tree=None):
    """A chain of two, or a tree, from a model unlike the target."""
    return drafters.draft_lm(micro(4), micro(8), 2, tree)


@dataclasses.dataclass(frozen=True)
class Pruned(DraftLM):
    """A tree of widths (2, 2) of which the anchor's value decides what is kept."""

    def propose(self, params, target_params, state, context, noise):
        draft, state = super().propose(params, target_params, state, context, noise)
        nodes = jnp.array([[1, 2, 3, 5], [2, 5, 6, 9], [1, 2, 4, 9]])
        parents = jnp.array([[0, 0, 1, 2], [0, 1, 1, 9], [0, 0, 1, 9]])
        anchor = context.tokens[context.length - 1]
        tokens = jnp.append(draft.tokens, jnp.full(4, 2**31 - 1))[nodes[anchor] - 1]
        return Draft(tokens, None, jnp.array([4, 3, 3])[anchor], 2, parents[anchor]), state

    @property
    def num_draft_tokens(self):
        return 4


def pruned():
    loaded = two_drafts(Tree.of_widths((2, 2)))
    fields = {f.name: getattr(loaded.drafter, f.name) for f in dataclasses.fields(DraftLM)}
    return LoadedDrafter(Pruned(**fields), loaded.params, "pruned")


LAWS = {
    "token": two_drafts,
    "block": two_drafts,
    "tree_match": pruned,
    "tree_without_replacement": lambda: two_drafts(Tree.of_widths((2, 1))),
    "tree_traversal": lambda: two_drafts(Tree.of_widths((2, 1))),
}


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=[pytest.mark.slow] * (rule not in ("block", "tree_traversal")))
        for rule in LAWS
    ],
)
def test_joint_law_of_two_cycles(rule):
    statistic, limit = joint_law(rule, LAWS[rule]())
    assert statistic < limit


def test_draft_noise_of_token_positions_would_be_caught(monkeypatch):
    """What was rejected would be drafted with the same numbers again; `block` had looked at them."""

    def reused(self, node, depth, vocab_size):
        key = jax.random.fold_in(self.key, self.position + 1 + depth)
        key = jax.random.fold_in(jax.random.fold_in(key, Role.DRAFT), 0)
        return jax.random.gumbel(key, (vocab_size,), mode="high")

    monkeypatch.setattr(Noise, "draft_gumbel", reused)
    statistic, limit = joint_law(rule_of(block_law), two_drafts())
    assert statistic > 2 * limit


@pytest.mark.slow
def test_noise_shared_by_draft_and_correction_would_be_caught(monkeypatch):
    uniforms = Noise.uniforms

    def shared(self, role, count):
        return uniforms(self, Role.DRAFT if role == Role.RESIDUAL else role, count)

    monkeypatch.setattr(Noise, "uniforms", shared)
    statistic, limit = joint_law(rule_of(block_law), two_drafts())
    assert statistic > 2 * limit
