"""Controllers: what the paper computes, never ahead of what may be known, lossless in the loop."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters
from specjax.decoding.controllers import (
    ConfidenceThreshold,
    Fixed,
    Heuristic,
    Optimal,
    Planning,
    PrefixScheduler,
    Threshold,
)
from specjax.decoding.speculative import shortened, widths_for
from specjax.drafters import autoregressive
from specjax.sampling import Sampling
from specjax.trees import Tree
from specjax.types import Context, Draft
from specjax.verification import RULES, cases
from specjax.verification.enumeration import DraftLaw, exact, number
from specjax.verification.law import law_of_rule
from tests.drafters.test_transformer_drafters import joint_law_statistic
from tests.fakes import PROMPTS, count_draft_passes, reference_text


def drafts_of(confidence, num_valid=None):
    """A batch with confidences `[B, K]` and arbitrary tokens."""
    confidence = jnp.asarray(confidence, jnp.float32)
    batch, k = confidence.shape
    valid = jnp.full(batch, k) if num_valid is None else jnp.asarray(num_valid)
    tokens = jnp.zeros((batch, k), jnp.int32)
    return Draft(tokens, None, valid.astype(jnp.int32), confidence=confidence)


def algorithm_1(confidence, num_valid, running, seconds):
    """As the paper writes it, over lists; costs are those of the mean width."""
    survival = {}
    for row, values in enumerate(confidence):
        for j in range(num_valid[row] if running[row] else 0):
            survival[row, j + 1] = survival.get((row, j), 1.0) * values[j]
    rows = max(int(sum(running)), 1)
    verified, expected, best = rows, float(rows), rows / seconds(1)
    lengths = [0] * len(confidence)
    for row, j in sorted(survival, key=lambda slot: (-survival[slot], slot[1])):
        verified, expected = verified + 1, expected + survival[row, j]
        if expected / seconds(verified / rows) <= best:
            break
        best, lengths[row] = expected / seconds(verified / rows), j
    return lengths


# --- what they compute -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_scheduler_is_the_papers_algorithm(seed):
    rng = np.random.default_rng(seed)
    batch, k = rng.integers(1, 6), rng.integers(1, 8)
    confidence = rng.beta(4, 1, (batch, k)).astype(np.float32)
    num_valid = rng.integers(0, k + 1, batch)
    running = rng.random(batch) < 0.8
    widths, taken = np.array([1.0, 2.0, 4.0, 9.0]), np.sort(rng.uniform(1, 2, 4))
    scheduler = PrefixScheduler(jnp.asarray(widths), jnp.asarray(taken))
    lengths = scheduler((), drafts_of(confidence, num_valid), jnp.asarray(running))
    expected = algorithm_1(confidence, num_valid, running, lambda n: np.interp(n, widths, taken))
    assert lengths.tolist() == expected


def test_scheduler_verifies_all_where_it_is_free_and_nothing_where_it_is_dear():
    drafts, running = drafts_of(np.full((2, 3), 0.5)), jnp.ones(2, bool)
    free = PrefixScheduler.of({1: 1.0, 4: 1.0})
    dear = PrefixScheduler.of({1: 1.0, 4: 4.0})
    assert free((), drafts, running).tolist() == [3, 3]
    assert dear((), drafts, running).tolist() == [0, 0]
    # Tokens that are not valid, and rows that have ended, are never admitted.
    assert free((), drafts_of(np.ones((2, 3)), [1, 3]), jnp.array([True, False])).tolist() == [1, 0]


def test_scheduler_spends_on_the_surer_row():
    scheduler = PrefixScheduler.of({1: 1.0, 4: 2.2})  # 0.4 a token
    lengths = scheduler((), drafts_of([[0.9, 0.9, 0.9], [0.3, 0.9, 0.9]]), jnp.ones(2, bool))
    assert lengths[0] > lengths[1] == 0


def test_threshold_stops_at_the_first_that_is_unsure():
    drafts = drafts_of([[0.9, 0.4, 0.9], [0.3, 0.9, 0.9], [0.5, 0.5, 0.5], [1.0, 0.9, 0.1]])
    controller = ConfidenceThreshold(jnp.float32(0.5))
    assert controller((), drafts, jnp.ones(4, bool)).tolist() == [1, 0, 3, 2]
    assert ConfidenceThreshold(jnp.float32(0))((), drafts, jnp.ones(4, bool)).tolist() == [3] * 4


def test_heuristic_by_hand():
    """+2 after a whole draft, −1 otherwise, nothing without one; K is the most, 1 the fewest."""
    controller, drafts, running = (
        Heuristic(jnp.int32(3)),
        drafts_of(np.ones((3, 5))),
        jnp.ones(3, bool),
    )
    state = controller.init_state(3, 5)
    wanted = []
    for accepted, drafted in (
        ([3, 0, 3], [3, 3, 7]),
        ([5, 0, 0], [5, 3, 0]),
        ([2, 1, 0], [5, 3, 5]),
    ):
        wanted.append(controller(state, drafts, running).tolist())
        state = controller.observe(state, jnp.asarray(accepted), jnp.asarray(drafted))
    wanted.append(controller(state, drafts, running).tolist())
    assert wanted == [[3, 3, 3], [5, 2, 5], [5, 1, 5], [4, 3, 4]]


def test_threshold_keeps_the_token_that_it_stops_at():
    q = jnp.asarray([[0.9, 0.5, 0.9], [0.2, 0.9, 0.9], [0.9, 0.9, 0.2]])
    log_q = jnp.log(jnp.stack([q, 1 - q], -1))
    drafts = Draft(jnp.zeros((3, 3), jnp.int32), log_q, jnp.full(3, 3))
    assert Threshold(jnp.float32(0.6))((), drafts, jnp.ones(3, bool)).tolist() == [2, 1, 3]
    with pytest.raises(ValueError, match="threshold needs the probabilities"):
        Threshold(jnp.float32(0.6))((), drafts_of(q), jnp.ones(3, bool))


@pytest.mark.parametrize(
    ("alpha", "seconds", "width"),
    [
        (0.8, {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.5}, 8),
        (0.8, {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.2}, 4),
        (0.3, {1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4}, 2),
        (0.1, {1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4}, 1),
        (0.5, {1: 1.0, 2: 1.6, 4: 1.5, 8: 2.4}, 4),  # over a dip
    ],
)
def test_optimal_finds_the_best_width(alpha, seconds, width):
    """From its own counts only; what does not pay is tried again now and then, and left again."""
    controller, batch = Optimal.of(seconds), 2
    drafts, running = drafts_of(np.ones((batch, 7))), jnp.ones(batch, bool)
    rng, state = np.random.default_rng(0), controller.init_state(batch, 7)
    step = jax.jit(lambda state: controller(state, drafts, running))
    observe, chosen = jax.jit(controller.observe), []
    for _ in range(400):
        wanted = int(step(state)[0])
        kept = np.cumprod(rng.random((batch, wanted)) < alpha, axis=1).sum(1)
        state = observe(state, jnp.asarray(kept), jnp.full(batch, wanted))
        chosen.append(wanted + 1)
    assert np.mean(np.array(chosen[100:]) == width) > 0.7


@pytest.mark.parametrize(
    ("k", "widths"),
    [(1, (1, 2)), (2, (1, 2, 3)), (3, (1, 2, 4)), (7, (1, 2, 4, 8)), (15, (1, 2, 4, 8, 16))],
)
def test_compiled_widths(k, widths):
    assert widths_for(k, controlled=True) == widths
    assert widths_for(k, controlled=False) == (1, k + 1)


def test_what_the_pass_holds_anyway_is_verified():
    drafts = drafts_of(np.ones((3, 7)), [7, 2, 7])
    for wanted, verified in (
        ([0, 0, 0], [0, 0, 0]), ([1, 0, 0], [1, 1, 1]), ([0, 0, 2], [3, 2, 3]),
        ([0, 7, 0], [3, 2, 3]), ([4, 0, 0], [7, 2, 7]), ([99, -1, 0], [7, 2, 7]),
    ):  # fmt: skip
        found = shortened(drafts, jnp.asarray(wanted), (1, 2, 4, 8))
        assert found.num_valid.tolist() == verified


def test_wider_is_never_taken_for_cheaper():
    assert PrefixScheduler.of({4: 1.5, 1: 1.0, 2: 1.8}).seconds.tolist() == pytest.approx(
        [1.0, 1.8, 1.8]
    )


# --- never ahead -------------------------------------------------------------------------------------


def told_before(vocab, depth, seed):
    """A confidence for every context: that of a token is told by what stands before it."""
    return lambda path: np.random.default_rng([seed, vocab, depth, *path]).beta(2, 1)


def controlled(controller, confidence_of, row_beside):
    """For `enumeration.exact`: how much of a row is verified beside another one, as the loop has it."""
    widths = (1, 2, 4) if row_beside else (1, 2, 3, 4)

    @jax.jit
    def decide(batch):
        running = jnp.ones(len(batch.num_valid), bool)
        return shortened(batch, controller((), batch, running), widths).num_valid

    def num_valid(context, tokens):
        told = [confidence_of((*context, *tokens[:j])) for j in range(len(tokens))]
        return int(decide(drafts_of([told, row_beside] if row_beside else [told]))[0])

    return num_valid


def greatest(drafts, running, scheduler):
    """The scheduler with its stop removed: as many as have the greatest throughput of all."""
    survival = jnp.cumprod(drafts.confidence[0])
    expected = 1 + jnp.append(0.0, jnp.cumsum(survival))
    verified = 1.0 + jnp.arange(len(expected))
    seconds = jnp.interp(verified, scheduler.widths, scheduler.seconds)
    return jnp.argmax(expected / seconds)[None]


COSTS = {1: 1.0, 2: 1.25, 4: 1.5}


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    ("controller", "row_beside"),
    [
        (PrefixScheduler.of(COSTS), None),
        (PrefixScheduler.of({1: 1.0, 2: 1.6, 4: 2.6}), [0.8, 0.2, 0.9]),
        (ConfidenceThreshold(jnp.float32(0.6)), None),
    ],
    ids=["scheduler", "beside", "threshold"],
)
def test_exact_law(rule, row_beside, controller):
    vocab, tree, lengths = 3, Tree.chain(3), set()
    target, drafter = cases.tables("random", vocab, 4)
    decide = controlled(controller, told_before(vocab, 3, 0), row_beside)

    def watched(context, tokens):
        lengths.add(decide(context, tokens))
        return decide(context, tokens)

    law = law_of_rule(RULES[rule])
    result = exact(law, target, DraftLaw(drafter, tree), num_valid=watched)
    assert result.total_variation <= 1e-12
    assert len(lengths) > 1  # it depends on the draft


class Forced:
    """Noise under which the drawn tokens are the given ones, wherever they are possible."""

    coupled = False

    def __init__(self, tokens):
        self.tokens = tokens

    def draft_gumbel(self, node, depth, vocab_size):
        return jnp.where(jnp.arange(vocab_size) == self.tokens[node], 1e6, 0.0)


def cycle_of(controller, state, table, beside):
    """For `enumeration.exact`: what the loop drafts token by token of a row beside another one.

    The scratch of a drafter that is a table is the number of its context.

    Args:
      controller, state: before the cycle.
      table: `[contexts, V]`.
      beside: drafted tokens of the other row, whose text is empty; None where it has ended.

    Returns:
      A function of a row's context and its drafted tokens, to how many of them are verified.
    """
    depth, vocab = 3, table.shape[1]
    logits = jnp.log(jnp.asarray(table, jnp.float32))
    room = jnp.array([depth, 0 if beside is None else depth])

    def one(context, tokens, most):
        def forward(tokens, positions, context, mask, parents):
            context = context * vocab + 1 + tokens[0]
            return logits[context][None], context

        asked = Context(None, None, None, Sampling(jnp.float32(1)), most, controller.least_q)
        draft, _ = autoregressive.draft(
            lambda context: (logits[context], context), context, forward, jnp.int32(0),
            Tree.chain(depth), asked, Forced(tokens),
            first=1, vocab_size=vocab, masked_slots=jnp.zeros(depth, bool),
        )  # fmt: skip
        return draft

    @jax.jit
    def cycle(contexts, tokens):
        drafts = jax.vmap(one)(contexts, tokens, controller.plan(state, room))
        fitting = jnp.minimum(drafts.num_valid, room)
        drafts = dataclasses.replace(drafts, num_valid=fitting)
        return shortened(drafts, controller(state, drafts, room > 0), (1, 2, 4)), drafts

    def num_valid(context, tokens):
        contexts = jnp.array([number(context, vocab), 0])
        verified, drafts = cycle(contexts, jnp.array([tokens, beside or tokens]))
        count = int(drafts.num_valid[0])
        assert drafts.tokens[0, :count].tolist() == list(tokens[:count])
        return int(verified.num_valid[0])

    return num_valid


NOTHING = jnp.zeros(3), jnp.zeros(3)  # is what `Optimal` knows at first: α is ½


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    ("controller", "state", "beside", "lengths"),
    [
        (Fixed(jnp.int32(2)), (), None, {2}),
        (Heuristic(jnp.int32(1)), (jnp.array([1, 2]), jnp.int32(3)), None, {1}),
        (Heuristic(jnp.int32(1)), (jnp.array([1, 2]), jnp.int32(3)), (0, 0, 0), {2}),
        (Optimal.of({1: 1.0, 2: 1.2, 4: 2.0}), NOTHING, (0, 0, 0), {1}),
        (Threshold(jnp.float32(0.4)), (), None, {1, 2, 3}),
        (Threshold(jnp.float32(0.4)), (), (0, 1, 2), {2, 3}),
    ],
    ids=["fixed", "heuristic", "heuristic beside", "optimal", "threshold", "threshold beside"],
)
def test_exact_law_of_what_is_drafted_token_by_token(rule, controller, state, beside, lengths):
    target, drafter = cases.tables("random", 3, 4)
    verified = cycle_of(controller, state, drafter, beside)
    found = set()

    def watched(context, tokens):
        found.add(verified(context, tokens))
        return verified(context, tokens)

    drafts = DraftLaw(drafter, Tree.chain(3))
    result = exact(law_of_rule(RULES[rule]), target, drafts, num_valid=watched)
    assert result.total_variation <= 1e-12
    assert found == lengths


@pytest.mark.parametrize(("dropped", "low", "high"), [(False, 0, 1e-12), (True, 0.01, 1)])
def test_the_token_that_a_threshold_stops_at_must_stay(dropped, low, high):
    target, drafter = cases.tables("random", 3, 4)
    verified = cycle_of(Threshold(jnp.float32(0.4)), (), drafter, None)

    def num_valid(context, tokens):
        count = verified(context, tokens)
        last = drafter[number((*context, *tokens[: count - 1]), 3)][tokens[count - 1]]
        return count - (dropped and last < 0.4)

    law = law_of_rule(RULES["token"])
    result = exact(law, target, DraftLaw(drafter, Tree.chain(3)), num_valid=num_valid)
    assert low <= result.total_variation <= high


def test_without_the_stop_the_law_is_another():
    vocab, tree = 3, Tree.chain(3)
    target, drafter = cases.tables("random", vocab, 4)
    scheduler = PrefixScheduler.of({1: 1.0, 2: 2.2, 4: 2.4})
    confidence_of = told_before(vocab, 3, 0)

    def looking_ahead(state, drafts, running):
        return greatest(drafts, running, scheduler)

    law = law_of_rule(RULES["token"])
    for controller, low, high in ((looking_ahead, 1e-3, 1), (scheduler, 0, 1e-12)):
        num_valid = controlled(controller, confidence_of, None)
        result = exact(law, target, DraftLaw(drafter, tree), num_valid=num_valid)
        assert low <= result.total_variation <= high


def test_the_papers_counter_example():
    """SPS(1, 2, 3) = 1, ½, 0.45; p = (0.7, 0.3), q = (½, ½): looking past the dip gives 0.85, 0.15."""
    scheduler = PrefixScheduler.of({1: 1.0, 2: 2.0, 3: 1 / 0.45})
    target = np.tile([0.7, 0.3], (15, 1))
    drafts = DraftLaw(np.full((15, 2), 0.5), Tree.chain(2))
    told = {(): 0.8, (0,): 1.0, (1,): 0.0}  # of the first token, and of the second behind either

    def looking_ahead(state, batch, running):
        return greatest(batch, running, scheduler)

    law = law_of_rule(RULES["token"])
    for controller, first in ((looking_ahead, [0.85, 0.15]), (scheduler, [0.7, 0.3])):
        num_valid = controlled(controller, told.__getitem__, None)
        result = exact(law, target, drafts, num_valid=num_valid)
        # Contexts are numbered as a heap: those that begin with a token are its subtree's.
        names = [0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]
        got = np.bincount(names, result.output)
        np.testing.assert_allclose(got, first, atol=1e-12)


# --- in the loop -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafter(tiny):
    """At random, sure of some and not of others: its confidence is spread out."""
    loaded = specjax.drafters.dspark.from_config(
        tiny, 0, np.zeros(61, int), mask_token=60, num_layers=1, block_size=3, taps=(0, 1),
        markov_rank=8,
    )  # fmt: skip
    weight = jax.random.normal(jax.random.key(3), loaded.params["confidence"]["weight"].shape)
    params = loaded.params | {"confidence": {"weight": 0.5 * weight, "weight_bias": jnp.ones(1)}}
    return dataclasses.replace(loaded, params=params)


CONTROLLERS = {
    "fixed": Fixed(jnp.int32(1)),
    "threshold": ConfidenceThreshold(jnp.float32(0.6)),
    "scheduler": PrefixScheduler.of(COSTS),
    "heuristic": Heuristic(jnp.int32(1)),
    "optimal": Optimal.of(COSTS),
}


@pytest.mark.parametrize("name", list(CONTROLLERS))
def test_greedy_text_is_plain_text(tiny, drafter, name):
    result = specjax.decode(tiny, drafter, PROMPTS, max_new_tokens=24, controller=CONTROLLERS[name])
    assert [row.tolist() for row in result.tokens] == [
        reference_text(tiny, prompt, 24) for prompt in PROMPTS
    ]
    drafted = set(np.concatenate(result.drafted).tolist())
    assert drafted == {0, 1} if name == "fixed" else {0, 1} < drafted or {0, 3} < drafted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scheduler", "heuristic"])
def test_gumbel_text_is_plain_samplings_text(tiny, drafter, name):
    options = {"temperature": 0.8, "key": jax.random.key(0), "max_new_tokens": 24}
    plain = specjax.decode(tiny, None, PROMPTS, **options)
    result = specjax.decode(
        tiny, drafter, PROMPTS, rule="gumbel", controller=CONTROLLERS[name], **options
    )
    assert [x.tolist() for x in result.tokens] == [x.tolist() for x in plain.tokens]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["block"])
def test_joint_law_of_two_tokens_in_the_real_loop(tiny, drafter, rule):
    scheduler = PrefixScheduler.of(COSTS)
    statistic, limit = joint_law_statistic(tiny, drafter, rule=rule, controller=scheduler)
    assert statistic < limit


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class InTurn(Planning):
    """Given lengths, one after the other."""

    lengths: jax.Array

    def init_state(self, batch, num_draft_tokens):
        return jnp.int32(0)

    def plan(self, state, room):
        return jnp.minimum(self.lengths[state % len(self.lengths)], room)

    def observe(self, state, accepted, drafted):
        return state + 1


TOKEN_BY_TOKEN = {
    "fixed": Fixed(jnp.int32(2)),
    "heuristic": Heuristic(jnp.int32(1)),
    "optimal": Optimal.of(COSTS),
    "in turn": InTurn(jnp.array([0, 2, 1, 0, 0, 3])),
}


def token_by_token(target, name):
    return {
        "early_exit": lambda: drafters.early_exit(target, 2, 3),
        "draft_lm": lambda: drafters.draft_lm(target, target, 3),
        "eagle3": lambda: drafters.eagle3.from_config(
            target, 0, np.ones(61), taps=(0, 1), num_draft_tokens=3
        ),
    }[name]()


def assert_plain(target, drafter, name, **options):
    """Rows that end at different times, one of them at a stop token."""
    prompts, stop = PROMPTS[:3], reference_text(target, PROMPTS[2], 13)[-1]
    options |= {"max_new_tokens": [5, 30, 30], "stop_tokens": [stop]}
    plain = specjax.decode(target, None, prompts, **options)
    result = specjax.decode(target, drafter, prompts, controller=TOKEN_BY_TOKEN[name], **options)
    assert [x.tolist() for x in result.tokens] == [x.tolist() for x in plain.tokens]
    assert result.stop_reason == plain.stop_reason
    return result


FAST = [("early_exit", "heuristic"), ("draft_lm", "in turn")]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if (kind, name) in FAST else pytest.mark.slow)
        for kind in ("early_exit", "draft_lm", "eagle3")
        for name in TOKEN_BY_TOKEN
    ],
)
def test_greedy_text_of_short_drafts_is_plain_text(tiny, kind, name):
    result = assert_plain(tiny, token_by_token(tiny, kind), name)
    assert specjax.StopReason.EOS in result.stop_reason
    assert len(set(np.concatenate(result.drafted).tolist())) > 1
    if kind == "draft_lm":  # the target itself: its cache has no hole behind drafts of any length
        np.testing.assert_array_equal(*map(np.concatenate, (result.accepted, result.drafted)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in ("early_exit", "draft_lm", "eagle3") for name in TOKEN_BY_TOKEN],
)
def test_gumbel_text_of_short_drafts_is_plain_samplings_text(tiny, kind, name):
    options = {"temperature": 0.8, "key": jax.random.key(0), "rule": "gumbel"}
    assert_plain(tiny, token_by_token(tiny, kind), name, **options)


def test_a_pass_is_taken_for_every_drafted_token_and_no_other(tiny, monkeypatch):
    taken, traced = count_draft_passes(monkeypatch)
    loaded, sizes = drafters.early_exit(tiny, 1, 3), []
    options = {"max_new_tokens": [9, 20], "stop_tokens": [], "max_len": 90}
    for controller in (None, Fixed(jnp.int32(0)), Fixed(jnp.int32(2)), Fixed(jnp.int32(9))):
        result = specjax.decode(tiny, loaded, PROMPTS[2:4], controller=controller, **options)
        jax.effects_barrier()
        if controller is None:
            # A prefill chunk, the first pass and the step of the draft, two widths.
            assert sorted(traced) == [(1,), (1,), (1,), (4,), (32,)]
        cycles = max(map(len, result.drafted))
        drafted = [np.pad(row, (0, cycles - len(row))) for row in result.drafted]
        assert len(taken) == np.max(drafted, axis=0).sum()
        sizes.append((len(taken), cycles))
        del taken[:]
    whole, none, two, more = (passes / cycles for passes, cycles in sizes)
    assert none == 0 and 0 < two <= 2 < whole == more
    assert len(traced) == 5 + 2 + 3  # one program for all of `Fixed`: draft and three widths


def test_what_is_verified_is_what_confidence_asks_for(tiny, drafter):
    """The confidences of every cycle are kept beside its counts; a row alone: no other widens it."""
    whole = specjax.decode(tiny, drafter, PROMPTS[2], max_new_tokens=40)
    threshold = float(np.median(whole.confidence[0]))
    controller = ConfidenceThreshold(jnp.float32(threshold))
    result = specjax.decode(tiny, drafter, PROMPTS[2], max_new_tokens=40, controller=controller)
    told, drafted = result.confidence[0], result.drafted[0]
    assert told.shape == (len(drafted), 3)
    kept = np.cumprod(told >= np.float32(threshold), axis=1).sum(1)
    widened = np.array([0, 1, 3, 3])[kept]  # passes of 1, 2 and 4 tokens
    np.testing.assert_array_equal(drafted[:-3], widened[:-3])  # the last have no room
    assert len(set(widened[:-3])) > 1
    plain = specjax.decode(tiny, None, PROMPTS[:1], max_new_tokens=4)
    assert plain.confidence[0].shape == (4, 0)


def test_controllers_that_need_confidence_say_so(tiny, drafter):
    bare = dataclasses.replace(drafter.drafter, confidence=0.0)
    loaded = dataclasses.replace(drafter, drafter=bare)
    for controller in (CONTROLLERS["threshold"], CONTROLLERS["scheduler"]):
        for other in (loaded, specjax.drafters.NGram(2)):
            with pytest.raises(ValueError, match="confidence head"):
                specjax.decode(tiny, other, PROMPTS[:1], max_new_tokens=2, controller=controller)
