"""The doctor: healthy drafters are healthy, and every planted fault is named, alone."""

from __future__ import annotations

import dataclasses
import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import specjax
from specjax import drafters
from specjax.distillation import data, features
from specjax.distillation.doctor import CHECKS, Case, Status, diagnose, rises
from specjax.distillation.trainer import train
from specjax.drafters import NGram, dflash, dspark, eagle3, early_exit
from specjax.drafters.dflash import DFlash
from specjax.drafters.draft_lm import DraftLM, draft_lm, from_layers
from specjax.drafters.vocabulary import DraftVocabulary
from specjax.types import Committed
from tests.distillation.test_data import tokenizer_with
from tests.distillation.test_trainer import CONFIG

K = 3
PROMPTS = [np.array(prompt) for prompt in ([5, 9, 2], [7, 1], [3, 1, 4, 1, 5], [20, 21, 22])]
HALVES = np.arange(8).reshape(2, 4).T.ravel()  # of halves, as neighbouring pairs


def diagnosed(target, loaded, folder=None, prompts=PROMPTS, **options):
    """Findings by their check."""
    options = {"max_new_tokens": 30} | options
    findings, _ = diagnose(target, loaded, prompts, folder=folder, **options)
    assert [finding.check for finding in findings] == list(CHECKS)
    return {finding.check: finding for finding in findings}


def named(findings):
    """The checks that are wrong; each says what to do."""
    wrong = [finding for finding in findings.values() if finding.status is Status.WRONG]
    assert all(finding.advice for finding in wrong)
    return [finding.check for finding in wrong]


def changed(loaded, params=None, **fields):
    """A drafter with other params, or other fields."""
    return dataclasses.replace(
        loaded,
        drafter=dataclasses.replace(loaded.drafter, **fields),
        params=loaded.params | (params or {}),
    )


def of_kind(loaded, kind):
    """The same drafter as an object of a subclass."""
    fields = {x.name: getattr(loaded.drafter, x.name) for x in dataclasses.fields(loaded.drafter)}
    return dataclasses.replace(loaded, drafter=kind(**fields))


def reordered(params, order):
    """Queries and keys of all layers with their dimensions in another order."""

    def one(path, x):
        if path[-1].key == "qkv":
            return jnp.concatenate([x[:, :, :-1, order], x[:, :, -1:]], axis=2)
        norm = path[-2].key in ("query_norm", "key_norm") if len(path) > 1 else False
        return x[order] if norm else x

    return jax.tree_util.tree_map_with_path(one, params)


def spoilt(norm):
    """Another scale in every dimension."""
    scale = jnp.exp(2 * jax.random.normal(jax.random.key(0), norm["scale"].shape))
    return {"scale": norm["scale"] * scale}


# --- a perfect drafter: all of the target's own layers ---------------------------------------------


@pytest.fixture(scope="module")
def small(tiny):
    """One layer of it: compiled three times as fast."""
    return from_layers(tiny, 1)


@pytest.fixture(scope="module")
def perfect(small):
    return draft_lm(small, small, K)


def test_a_perfect_drafter_is_healthy(small, perfect):
    findings = diagnosed(small, perfect)
    assert {x.status for x in findings.values()} == {Status.OK, Status.NOT_APPLICABLE}
    assert "1.00 teacher-forced, 1.00 counted" in findings["counted α"].seen
    for check in ("taps", "mask token", "target", "tokenizer", "chat template"):
        assert findings[check].status is Status.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("check", "fault", "told"),
    [
        ("final norm", lambda x: {"final_norm": spoilt(x["final_norm"])}, "the target's norm"),
        ("rotation", lambda x: reordered(x, HALVES), "neighbouring pairs"),
        (
            "rotation",
            lambda x: reordered(x, np.argsort(HALVES)),
            "split into halves once too often",
        ),
        ("output", lambda x: jax.tree.map(lambda y: y * np.nan, x), "NaN"),
    ],
)
def test_a_fault_in_its_weights_is_named(small, perfect, check, fault, told):
    findings = diagnosed(small, changed(perfect, fault(perfect.params)))
    assert named(findings) == [check]
    assert told in findings[check].advice


@pytest.mark.slow
@pytest.mark.parametrize("table", ["embedding", "head_weight"])
def test_another_table_is_named(small, perfect, table):
    """As if the rows were of another vocabulary of the same size."""
    fault = {table: jnp.roll(small.params[table], 1, axis=0)}
    findings = diagnosed(small, changed(perfect, fault))
    assert named(findings) == ["embedding and head"]


@pytest.mark.slow
def test_another_base_of_the_rotation_is_named(small):
    config = dataclasses.replace(small.config, rope_theta=100.0)
    model = dataclasses.replace(small, config=config)
    findings = diagnosed(small, draft_lm(model, small, K))
    assert named(findings) == ["rotation"]
    assert "the target's θ 10000" in findings["rotation"].advice


@pytest.mark.slow
def test_types(small, perfect):
    """Two types in one pair are named; one narrow type is compared with float32."""

    def narrow(params):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, params)

    mixed = dataclasses.replace(perfect, params=narrow(perfect.params))
    findings = diagnosed(small, mixed)
    assert (
        named(findings) == ["dtype"] and "load the drafter as float32" in findings["dtype"].advice
    )
    target = dataclasses.replace(small, params=narrow(small.params))
    findings = diagnosed(target, draft_lm(target, target, K))
    assert named(findings) == [] and "float32: " in findings["dtype"].seen


# --- what its folder says --------------------------------------------------------------------------


@pytest.fixture
def folder(small, perfect, tmp_path):
    """A target with a tokenizer, and its drafter's folder."""
    target = dataclasses.replace(small, tokenizer=tokenizer_with())
    drafters.export(perfect, target, tmp_path)
    return target, tmp_path


@pytest.mark.parametrize(
    ("file", "change", "check"),
    [
        ("specjax.json", {}, None),
        ("specjax.json", {"target_hash": "0123456789abcdef"}, "target"),
        ("specjax.json", {"tokenizer_hash": "0123456789abcdef"}, "tokenizer"),
        ("specjax.json", {"template_hash": "0123456789abcdef"}, "chat template"),
        ("config.json", {"rope_theta": 500.0}, "rotation"),
        ("config.json", {"rope_theta": 10000.0, "rope_scaling": {"factor": 4.0}}, "rotation"),
    ],
)
def test_a_folder_of_something_else_is_named(folder, perfect, file, change, check):
    target, path = folder
    told = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps(told | change))
    findings = diagnosed(target, perfect, path)
    assert named(findings) == ([check] if check else [])
    if not check:
        hashes = [findings[name].status for name in ("target", "tokenizer", "chat template")]
        assert hashes == [Status.OK] * 3


def test_a_folder_that_does_not_say_is_no_fault(folder, perfect):
    """As other engines write them."""
    target, path = folder
    (path / "specjax.json").write_text('{"drafter": "draft_lm"}')
    findings = diagnosed(target, perfect, path)
    assert named(findings) == []
    assert findings["chat template"].status is Status.UNSURE
    assert "make sure" in findings["chat template"].advice


def test_too_little_text_is_told(small, perfect):
    with pytest.raises(ValueError, match="answers have 8 tokens in all, too few"):
        diagnosed(small, perfect, max_new_tokens=2)


# --- decoding that is not what was trained ---------------------------------------------------------


class Forgetful(DraftLM):
    """Keeps no row of what was committed."""

    def observe(self, params, target_params, state, committed):
        return state


class KeepsOne(DraftLM):
    """Keeps the rows of no more than one token a cycle."""

    def observe(self, params, target_params, state, committed):
        fields = {x.name: getattr(committed, x.name) for x in dataclasses.fields(committed)}
        one = Committed(**fields | {"count": jnp.minimum(committed.count, 1)})
        return super().observe(params, target_params, state, one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "checks"),
    [(Forgetful, ["trained = decoded", "counted α"]), (KeepsOne, ["counted α"])],
)
def test_decoding_otherwise_than_trained_is_named(small, perfect, kind, checks):
    """What is wrong only after a longer cycle shows only in the cycles that were counted."""
    findings = diagnosed(small, of_kind(perfect, kind))
    assert named(findings) == checks


# --- drafters of features, trained on the text -----------------------------------------------------


@pytest.fixture(scope="module")
def text(tiny):
    """The target's answers, as examples."""
    result = specjax.decode(tiny, None, PROMPTS, max_new_tokens=30)
    rows = zip(PROMPTS, result.tokens, strict=True)
    texts = [(len(prompt), np.append(prompt, row).astype(np.int32)) for prompt, row in rows]
    return [data.Example(tokens, np.arange(len(tokens)) >= start) for start, tokens in texts]


def learnt(tiny, text, loaded, workdir, change: Any = lambda batch: batch):
    """The drafter, once it knows the text by heart."""
    config = CONFIG | {"total_steps": 300, "alpha_every": 0, "log_every": 1000, "save_every": 1000}
    rows = {"batch_size": 4, "sequence_length": 64}
    batches = data.train_batches(text, seed=0, **rows).map(change)
    held_out = lambda: iter([change(x) for x in data.evaluation_batches(text, **rows)])  # noqa: E731
    return train(config, tiny, loaded, batches, held_out, str(workdir)).drafter


def counts_of(tiny, text):
    return data.token_counts(text, tiny.config.vocab_size)


def eagle(tiny, text, taps):
    return eagle3.from_config(
        tiny, 0, counts_of(tiny, text), taps=taps, draft_vocab_size=50, ttt_steps=K,
        num_draft_tokens=K,
    )  # fmt: skip


def mask_of(tiny, text):
    """A token that the text has not, nor the one after it, which faults take for it."""
    free = counts_of(tiny, text) + np.bincount(np.concatenate(PROMPTS), minlength=61) == 0
    return int(np.flatnonzero(free[:-1] & free[1:])[0])


@pytest.fixture(scope="module")
def trained_eagle(tiny, text, tmp_path_factory):
    return learnt(tiny, text, eagle(tiny, text, (0, 1)), tmp_path_factory.mktemp("eagle3"))


def block_drafter(tiny, text, family, **options):
    return family.from_config(
        tiny, 0, counts_of(tiny, text), mask_token=mask_of(tiny, text), taps=(0, 1), num_layers=1,
        num_anchors=64, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained_dflash(tiny, text, tmp_path_factory):
    loaded = block_drafter(tiny, text, dflash, block_size=K + 1)
    return learnt(tiny, text, loaded, tmp_path_factory.mktemp("dflash"))


@pytest.fixture(scope="module")
def trained_dspark(tiny, text, tmp_path_factory):
    loaded = block_drafter(tiny, text, dspark, block_size=K, markov_rank=8)
    return learnt(tiny, text, loaded, tmp_path_factory.mktemp("dspark"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trained_eagle", "trained_dflash", "trained_dspark"])
def test_trained_drafters_are_healthy(tiny, name, request):
    findings = diagnosed(tiny, request.getfixturevalue(name))
    assert {x.status for x in findings.values()} == {Status.OK, Status.NOT_APPLICABLE}
    assert "taps 0 1" in findings["taps"].seen


@pytest.mark.parametrize("readers", [[2, 3], [1, 2]])
def test_taps_for_other_engines_are_compared(readers):
    key = "eagle_aux_hidden_state_layer_ids"
    probe = types.SimpleNamespace(drafter=types.SimpleNamespace(taps=(1, 2)), taps=())
    config = {key: readers, "eagle_config": {key: [1, 2]}}
    status, *told = CHECKS["taps"](Case(probe, np.ones(64), None, {}, config))
    assert status is (Status.OK if readers == [2, 3] else Status.UNSURE)
    assert status is Status.OK or "[1, 2] in eagle_config, [1, 2] above" in told[0]


def with_vocabulary(loaded, rows, by=0):
    """Only some rows of the head, their ids shifted."""
    ids = loaded.drafter.vocabulary.array[rows] + by
    return changed(
        loaded, {"head_weight": loaded.params["head_weight"][rows]},
        vocabulary=DraftVocabulary(tuple(ids.tolist()), loaded.drafter.vocabulary.target_size),
        config=dataclasses.replace(loaded.drafter.config, vocab_size=len(ids)),
    )  # fmt: skip


EAGLE_FAULTS = {
    "taps": lambda x, tiny: changed(x, taps=(1, 2)),
    "vocabulary": lambda x, tiny: with_vocabulary(x, slice(1, None), by=-1),
    "final norm": lambda x, tiny: changed(x, {"final_norm": spoilt(x.params["final_norm"])}),
    "rotation": lambda x, tiny: changed(
        x, config=dataclasses.replace(x.drafter.config, rope_theta=2.0)
    ),
    "embedding and head": lambda x, tiny: changed(
        x, {"embedding": jnp.roll(tiny.params["embedding"], 1, axis=0)}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("check", EAGLE_FAULTS)
def test_a_fault_of_eagle3_is_named(tiny, trained_eagle, check):
    findings = diagnosed(tiny, EAGLE_FAULTS[check](trained_eagle, tiny))
    assert named(findings) == [check]


@pytest.mark.slow
def test_features_behind_a_norm_are_named(tiny, text, tmp_path):
    """Trained on features that went through the target's last norm."""
    loaded, seen = eagle(tiny, text, (0, 2)), {}
    model = nnx.merge(tiny.graphdef, tiny.params)
    run = jax.jit(features.traces, static_argnums=(0, 2))

    def normed(batch):
        key = batch["tokens"].tobytes()
        if key not in seen:
            trace = run(tiny.graphdef, tiny.params, (0, 2), batch)
            states = {"features": model.final_norm(trace.features), "hidden": trace.hidden}
            seen[key] = {name: np.asarray(x) for name, x in states.items()}
        return batch | seen[key]

    findings = diagnosed(tiny, learnt(tiny, text, loaded, tmp_path, normed))
    assert named(findings) == ["final norm"]
    assert "features behind the target's norm" in findings["final norm"].advice


class Early(DFlash):
    """Takes slot k − 1 for slot k."""

    first_slot = 0


BLOCK_FAULTS = {
    "taps": lambda x: changed(x, taps=(1, 2)),
    "mask token": lambda x: changed(x, mask_token=x.drafter.mask_token + 1),
    "rotation": lambda x: dataclasses.replace(x, params=reordered(x.params, HALVES)),
    "slot alignment": lambda x: of_kind(x, Early),
}


@pytest.mark.slow
@pytest.mark.parametrize("check", BLOCK_FAULTS)
def test_a_fault_of_dflash_is_named(tiny, trained_dflash, check):
    findings = diagnosed(tiny, BLOCK_FAULTS[check](trained_dflash))
    assert named(findings) == [check]
    if check == "slot alignment":
        assert "the token before" in findings[check].advice


@pytest.mark.slow
def test_a_draft_vocabulary_without_the_text_is_named(tiny, trained_eagle):
    """Also where every token that it has is right."""
    few = with_vocabulary(trained_eagle, slice(0, 12))
    findings = diagnosed(tiny, few)
    assert named(findings) == ["vocabulary"]
    assert "can be accepted" in findings["vocabulary"].advice


# --- drafters that know little ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda target: NGram(K),
        lambda target: early_exit(target, 2, K),
        lambda target: draft_lm(from_layers(target, 2), target, K),
        lambda target: eagle3.from_config(target, 0, np.ones(61), taps=(0, 1), num_draft_tokens=K),
    ],
    ids=["ngram", "early_exit", "draft_lm", "eagle3"],
)
def test_a_weak_drafter_has_no_fault(tiny, make):
    """Neither one that has nothing to train nor one that is not trained."""
    findings = diagnosed(tiny, make(tiny))
    assert named(findings) == []


def test_what_rises():
    """By half and beyond the noise of blocks of anchors that are alike."""
    before = np.array([0, 1] * 64)
    assert rises(before, before + 1)
    assert not rises(before, before)
    assert not rises(before + 9, before + 11)  # a fifth
    once = before.copy()
    once[:16] += 8  # one block of eight: by as much as all by one
    assert once.mean() == (before + 1).mean() and not rises(before, once)
