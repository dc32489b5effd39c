"""Training: it overfits, resumes bitwise, and is the same however the batch is cut."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.distillation import data, features, steps
from specjax.distillation.optimizers import make_optimizer, schedule
from specjax.distillation.state import Checkpoints
from specjax.distillation.trainer import set_up, train
from specjax.drafters.draft_lm import draft_lm, from_layers
from specjax.models.sharding import AXES, batch_sharding, make_mesh
from specjax.types import Trace
from tests.conftest import QUICK
from tests.trainees import TRAINEES

CONFIG = {
    "seed": 0, "total_steps": 8, "accumulate": 1, "remat": True, "loss": {"forward_kl": 1.0},
    "average_decay": 0.0, "mesh": {"data": 1, "fsdp": 1, "tensor": 1},
    "log_every": 1, "alpha_every": 4, "save_every": 2,
    "optimizer": {
        "name": "adamw", "learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": 2,
        "clip": 1.0, "weight_decay": 0.0, "b1": 0.9, "b2": 0.95,
    },
}  # fmt: skip
TIMES = {"seconds", "tokens_per_second"}
ROWS = {"batch_size": 4, "sequence_length": 64}


@pytest.fixture(scope="module")
def examples(tiny):
    """The tiny target's own greedy text."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, 5).tolist() for _ in range(12)]
    result = specjax.decode(tiny, None, prompts, max_new_tokens=27)
    return [
        data.Example(np.array([*prompt, *row], np.int32), np.arange(32) >= 5)
        for prompt, row in zip(prompts, result.tokens, strict=True)
    ]


def trained(*fast, slow=()):
    """Drafters by name; some only among the slow tests."""
    late = [pytest.param(name, marks=pytest.mark.slow) for name in slow]
    return pytest.mark.parametrize("name", [*fast, *late])


def run(tiny, examples, workdir, *, name="draft_lm", evaluators=(), **changes):
    config = CONFIG | changes
    return train(
        config, tiny, TRAINEES[name](tiny, 4),
        data.train_batches(examples, seed=0, **ROWS),
        lambda: iter(data.evaluation_batches(examples, **ROWS)), str(workdir),
        evaluators=evaluators,
    )  # fmt: skip


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
@trained("draft_lm", "eagle3", "dspark")
def test_one_text_is_learnt_by_heart(tiny, examples, tmp_path, name):
    """Then its drafts are accepted whole, sampled, too, where top-k 1 keeps to that text.

    All but one at most: how near to 0 a few hundred steps come depends on how a machine rounds.
    """
    one = examples[:1]
    trained = run(
        tiny, one, tmp_path, name=name, save_every=1000, alpha_every=0, log_every=1000,
        total_steps=200 if name == "draft_lm" else 400,
    ).drafter  # fmt: skip
    fresh = TRAINEES[name](tiny, 4)
    for sampling in ({}, {"temperature": 1.0, "top_k": 1, "key": jax.random.key(0)}):
        before, after = (
            specjax.decode(tiny, drafter, one[0].prompt.tolist(), max_new_tokens=26, **sampling)
            for drafter in (fresh, trained)
        )
        assert before.tau < 2
        assert (after.accepted[0] < after.drafted[0]).sum() <= 1 and after.tau > 4


@pytest.mark.slow
def test_alpha_rises_and_the_best_is_kept(tiny, examples, tmp_path):
    outcome = run(tiny, examples, tmp_path, total_steps=40, alpha_every=10)
    held_out = [x["held_out/alpha_1"] for x in lines(tmp_path) if "held_out/alpha_1" in x]
    assert len(held_out) == 5 and held_out[-1] > held_out[0] + 0.1
    with Checkpoints(str(tmp_path), read_only=True) as checkpoints:
        params, step = checkpoints.restore_best(outcome.drafter.params)
    assert step == 10 * int(np.argmax(held_out))
    assert jax.tree.structure(params) == jax.tree.structure(outcome.drafter.params)


def test_trained_logits_are_decoded_logits(tiny, examples):
    """What the objective computes on a text is what the loop's drafter drafts from it."""
    loaded = draft_lm(from_layers(tiny, 2), tiny, 4)
    batch = next(iter(data.evaluation_batches(examples, **ROWS)))
    terms = steps.Recipe(
        tiny.graphdef, loaded.drafter, None, (("forward_kl", 1.0),), jnp.float32
    ).row_terms(loaded.params, tiny.params, batch, jax.random.split(jax.random.key(0), 4))
    # Replayed: Σ min(p, q) after each token of each text, by decoding models without any packing.
    from tests.fakes import all_logits

    small = from_layers(tiny, 2)
    total = count = 0
    for example in examples[: int(batch["segments"].max(-1).sum())]:
        p, q = (jax.nn.softmax(all_logits(model, example.tokens)[:-1]) for model in (tiny, small))
        wanted = example.loss_mask[1:]
        total += float(jnp.minimum(p, q).sum(-1)[wanted].sum())
        count += wanted.sum()
    value, weight = terms["alpha_1"]
    assert float(weight) == count
    np.testing.assert_allclose(float(value), total, rtol=1e-5)


def step_recipe(tiny, recipe_changes=(), name="draft_lm"):
    drafter = TRAINEES[name](tiny, 3).drafter
    optimizer, _ = make_optimizer(CONFIG["optimizer"], 10)
    losses = (("forward_kl", 1.0), ("cross_entropy", 0.1))
    recipe = steps.Recipe(tiny.graphdef, drafter, optimizer, losses, jnp.float32)
    return dataclasses.replace(recipe, **dict(recipe_changes))


def step_of(tiny, batch, recipe_changes=(), mesh=None, key=0, name="draft_lm"):
    loaded = TRAINEES[name](tiny, 3)
    recipe = step_recipe(tiny, recipe_changes, name)
    state = steps.new_state(recipe, loaded.params, key, mesh or make_mesh(1, 1, 1))
    return steps.train_step(recipe, state, tiny.params, batch)


@trained("draft_lm", slow=("eagle3", "dflash", "dspark"))
def test_micro_batches_change_nothing(tiny, examples, name):
    """Also where their supervised tokens differ in number: sums are divided once."""
    batch = next(iter(data.train_batches(examples, seed=0, **ROWS)))
    batch["loss_mask"][0, 10:] = False
    whole, metrics = step_of(tiny, {k: x[None] for k, x in batch.items()}, name=name)
    pieces = {k: x.reshape(4, 1, -1) for k, x in batch.items()}
    cut, cut_metrics = step_of(tiny, pieces, {"remat": False}.items(), name=name)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], cut_metrics[name], rtol=2e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), whole.params, cut.params)


@trained("draft_lm", slow=("eagle3", "dspark"))
def test_muon_takes_a_step(tiny, examples, name):
    """Matrices by Muon, the rest by Adam; every moment lies where its param does."""
    batch = next(iter(data.train_batches(examples, seed=0, **ROWS)))
    muon, _ = make_optimizer(CONFIG["optimizer"] | {"name": "muon"}, 10)
    one = {k: x[None] for k, x in batch.items()}
    state, metrics = step_of(tiny, one, {"optimizer": muon}.items(), name=name)
    before = TRAINEES[name](tiny, 3).params

    def learnt(params):  # all but what is measured once
        fuse = {k: x for k, x in params.get("fuse", {}).items() if k != "feature_scale"}
        return params | {"fuse": fuse}

    changed = jax.tree.map(lambda x, y: bool((x != y).any()), state.params, before)
    assert np.isfinite(metrics["loss"]) and not any(jax.tree.leaves(changed))  # rate 0 at step 0
    state, _ = steps.train_step(
        step_recipe(tiny, {"optimizer": muon}.items(), name), state, tiny.params, one
    )
    assert all(
        jax.tree.leaves(
            jax.tree.map(lambda x, y: bool((x != y).any()), learnt(state.params), learnt(before))
        )
    )
    if "fuse" in before:
        same = state.params["fuse"]["feature_scale"] == before["fuse"]["feature_scale"]
        assert same.all()


@pytest.mark.slow
def test_steps_that_are_not_finite_change_no_params(tiny, examples, tmp_path):
    batch = next(iter(data.train_batches(examples, seed=0, **ROWS)))
    batch = {k: x[None] for k, x in batch.items()}
    states = np.full((1, *batch["tokens"].shape[1:], 32), np.nan, np.float32)
    batch |= {"hidden": states, "features": np.zeros((*states.shape[:3], 0, 32), np.float32)}
    loaded = draft_lm(from_layers(tiny, 2), tiny, 4)
    state, metrics = step_of(tiny, batch)
    assert not np.isfinite(metrics["loss"]) and int(state.step) == 1
    assert_equal(state.params, loaded.params)

    first = batch["tokens"][0]

    def spoilt(batch):
        return (
            batch | {k: batch_0[k] for k in ("hidden", "features")}
            if (batch["tokens"] == first).all()
            else batch
        )

    batch_0 = {k: x[0] for k, x in batch.items()}
    batches = data.train_batches(examples, seed=0, **ROWS).map(spoilt)
    arguments = (
        batches, lambda: iter(data.evaluation_batches(examples, **ROWS)), str(tmp_path),
    )  # fmt: skip
    config = CONFIG | {"alpha_every": 1000}
    with pytest.raises(FloatingPointError, match=r"step 1: loss nan.*begins with tokens \["):
        train(config, tiny, loaded, *arguments)
    train(config, tiny, loaded, *arguments)  # goes on behind that batch
    assert [x["step"] for x in lines(tmp_path) if "loss" in x] == list(range(2, 9))


KILLED = """
import os, resource, signal, sys
import numpy as np
import jax
from specjax.distillation import data, trainer
from tests.conftest import TINY, random_with_large_weights
from tests.distillation import test_trainer as tests

target = random_with_large_weights(TINY)
rng = np.random.default_rng(3)
examples = [
    data.Example(rng.integers(0, 61, 32).astype(np.int32), np.arange(32) >= 5) for _ in range(12)
]
workdir, kill_at, kind, name = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
original = trainer.train_step
def step(recipe, state, *rest):
    state, metrics = original(recipe, state, *rest)
    if int(state.step) == kill_at and kind:
        os.kill(os.getpid(), kind)
    elif int(state.step) == kill_at:  # files no longer grow, as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    return state, metrics
trainer.train_step = step
outcome = tests.run(target, examples, workdir, name=name)
leaves = jax.tree.leaves(outcome.drafter.params)
total = sum(float(np.abs(np.asarray(x, np.float64)).sum()) for x in leaves)
print(outcome.step, outcome.preempted, repr(total))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (signal.SIGTERM, "draft_lm"), ("full disk", "draft_lm"), (signal.SIGKILL, "eagle3"),
    ],
)  # fmt: skip
def test_resuming_is_bitwise(tmp_path, kind, name):
    """Killed at step 5 of 8, saved at 4 (or at 5, when it is asked to end): the same in the end."""
    number = 0 if kind == "full disk" else int(kind)

    def output(workdir, kill_at):
        command = [sys.executable, "-c", KILLED, str(workdir), str(kill_at), str(number), name]
        env = os.environ | QUICK
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    whole = output(tmp_path / "whole", -1)
    assert whole.returncode == 0, whole.stderr[-2000:]
    killed = output(tmp_path / "cut", 5)
    if kind == signal.SIGTERM:
        assert killed.returncode == 0 and killed.stdout.split("\n")[-2].startswith("5 True")
    elif kind == signal.SIGKILL:
        assert killed.returncode == -signal.SIGKILL
    else:  # the save of step 6 fails
        assert killed.returncode == 1 and "File too large" in killed.stderr, killed.stderr[-2000:]
    resumed = output(tmp_path / "cut", -1)
    assert resumed.stdout.split("\n")[-2] == whole.stdout.split("\n")[-2]
    both = "cut", "whole"
    told, expected = ([x["step"] for x in lines(tmp_path / folder)] for folder in both)
    assert told == expected
    same = [
        [{k: v for k, v in x.items() if k not in TIMES} for x in lines(tmp_path / folder)]
        for folder in both
    ]
    assert same[0] == same[1]


@pytest.mark.slow
def test_a_run_told_to_stop_in_its_last_step_is_whole(tiny, examples, tmp_path):
    """Its last weights are evaluated, too, since nobody will do it later."""

    steps_seen = iter(range(5))

    def stop_at_step_3(params):
        if next(steps_seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"own": 1.0}

    outcome = run(
        tiny, examples, tmp_path, total_steps=4, alpha_every=0, evaluators=[(1, stop_at_step_3)]
    )
    assert list(steps_seen) == [] and not outcome.preempted and outcome.step == 4
    assert [x["step"] for x in lines(tmp_path) if "held_out/alpha_1" in x] == [4]


@pytest.mark.slow
def test_an_evaluation_that_was_cut_off_is_made_up_for(tiny, examples, tmp_path):
    """The state was saved before it."""
    steps_seen = iter(range(9))

    def end_at_step_2(params):
        if next(steps_seen) == 2:
            raise KeyboardInterrupt
        return {"own": 1.0}

    options = {"total_steps": 4, "alpha_every": 2}
    with pytest.raises(KeyboardInterrupt):
        run(tiny, examples, tmp_path / "a", **options, evaluators=[(1, end_at_step_2)])
    assert [x["step"] for x in lines(tmp_path / "a") if "loss" in x] == [1, 2]
    cut_off = run(tiny, examples, tmp_path / "a", **options, evaluators=[(1, end_at_step_2)])
    whole = run(tiny, examples, tmp_path / "b", **options, evaluators=[(1, lambda _: {"own": 1.0})])
    assert_equal(cut_off.drafter.params, whole.drafter.params)
    kept = [[(x["step"], "loss" in x) for x in lines(tmp_path / folder)] for folder in "ab"]
    assert kept[0] == kept[1] and len(kept[0]) == 9


def test_the_best_is_known_while_it_is_still_being_written(tmp_path):
    with Checkpoints(str(tmp_path)) as checkpoints:
        for step, score in enumerate([0.1, 0.3, 0.2, float("nan"), 0.25]):
            params = {"x": jnp.full((256, 256), step, jnp.float32)}
            key = jax.random.key(0)
            checkpoints.save_best(steps.TrainState(jnp.int32(step), params, (), None, key), score)
        best, step = checkpoints.restore_best(params)
    assert step == 1 and np.all(best["x"] == 1)


@pytest.mark.slow
def test_the_best_of_a_run_that_never_saved_is_not_the_next_ones(tiny, examples, tmp_path):
    run(tiny, examples, tmp_path, total_steps=4, alpha_every=1)
    shutil.rmtree(tmp_path / "checkpoints/last")
    optimizer = CONFIG["optimizer"] | {"learning_rate": 0.0, "warmup_steps": 0}
    outcome = run(tiny, examples, tmp_path, total_steps=1, alpha_every=0, optimizer=optimizer)
    assert outcome.exported_step == 1


@pytest.mark.slow
def test_another_config_is_refused(tiny, examples, tmp_path):
    run(tiny, examples, tmp_path, total_steps=4)
    with pytest.raises(ValueError, match=r"optimizer.learning_rate was 0.003, is 0.1"):
        optimizer = CONFIG["optimizer"] | {"learning_rate": 0.1}
        run(tiny, examples, tmp_path, total_steps=4, optimizer=optimizer)
    run(tiny, examples, tmp_path, total_steps=4, log_every=2)  # how often it tells may change


@pytest.mark.slow
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tiny, examples, tmp_path, caplog):
    first = run(tiny, examples, tmp_path, total_steps=8)
    newest = tmp_path / "checkpoints/last/8"
    for path in newest.rglob("*"):
        if path.is_file() and path.stat().st_size:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    again = run(tiny, examples, tmp_path, total_steps=8)
    assert "checkpoint 8 is damaged, the one before is taken" in caplog.text
    assert_equal(first.drafter.params, again.drafter.params)
    told = [x["step"] for x in lines(tmp_path) if "loss" in x]
    assert told == list(range(1, 9))


@pytest.mark.slow
def test_checkpoints_that_cannot_be_read_are_not_thrown_away(tiny, examples, tmp_path):
    run(tiny, examples, tmp_path, total_steps=4)
    for path in (tmp_path / "checkpoints/last").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(OSError, match=r"none of checkpoints \[4, 2\] can be read"):
        run(tiny, examples, tmp_path, total_steps=4)
    assert (tmp_path / "checkpoints/last/4").exists()


@pytest.mark.slow
def test_a_run_killed_before_its_first_save_tells_step_0_once(tiny, examples, tmp_path):
    for _ in range(2):
        run(tiny, examples, tmp_path, total_steps=3, alpha_every=3)
        shutil.rmtree(tmp_path / "checkpoints")
    assert [x["step"] for x in lines(tmp_path)] == [0, 1, 2, 3, 3]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # taken only while it trained


def test_schedules():
    cosine = schedule("cosine", 1.0, 10, 2)
    assert [float(cosine(i)) for i in (0, 1, 2, 6, 10)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    wsd = schedule("wsd", 1.0, 10, 2, 4)
    assert [float(wsd(i)) for i in (2, 5, 6, 8, 10)] == pytest.approx([1, 1, 1, 0.5, 0])
    with pytest.raises(ValueError, match="unknown schedule 'linear'"):
        schedule("linear", 1.0, 10, 2)
    with pytest.raises(ValueError, match="unknown optimizer 'sgd'; known: adamw, muon"):
        make_optimizer(CONFIG["optimizer"] | {"name": "sgd"}, 10)


def test_a_type_that_a_cpu_cannot_train_in_is_refused(tiny):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, tiny.params)
    narrow = dataclasses.replace(tiny, params=params)
    with pytest.raises(ValueError, match="in bfloat16 on a CPU: load the target as float32"):
        set_up(CONFIG, narrow, TRAINEES["draft_lm"](tiny, 4))


@pytest.mark.slow
def test_muon_orthogonalises_matrices_only(tiny):
    """A step of a matrix has singular values near each other; norms move as with Adam."""
    optimizer, _ = make_optimizer(
        CONFIG["optimizer"] | {"name": "muon", "clip": 0, "schedule": "constant"}, 10
    )
    gradient = jax.tree.map(
        lambda x: jnp.asarray(np.random.default_rng(0).normal(size=x.shape), jnp.float32),
        tiny.params,
    )
    state = optimizer.init(tiny.params)
    for _ in range(3):
        updates, state = optimizer.update(gradient, state, tiny.params)
    block = updates["blocks"][0]
    for matrix in (
        *(block["qkv"][:, :, slot].reshape(32, -1) for slot in range(4)),
        block["attention_out"].reshape(-1, 32),
        block["gate_up"][:, 0],
        block["gate_up"][:, 1],
        block["down"],
    ):
        values = np.linalg.svd(matrix, compute_uv=False)
        assert values.min() > 0.5 * values.max()
    np.testing.assert_allclose(np.abs(block["mlp_norm"]["scale"]), 3e-3, rtol=0.1)


def test_cached_features_are_the_online_ones(tiny, examples, tmp_path):
    identity = {"data": data.examples_hash(examples)}
    batches = list(data.evaluation_batches(examples, **ROWS))
    written = features.write_cache(
        tmp_path, tiny, (0, 2), batches, identity, sequence_length=64, dtype="float32"
    )
    assert written == sum(int(batch["segments"].any(-1).sum()) for batch in batches)
    source, unpack = features.open_cache(tmp_path, tiny, (0, 2), identity)
    cached = next(iter(data.cached_batches(source, unpack, batch_size=written, seed=0)))

    def fields(batch) -> Trace:
        return features.traces(tiny.graphdef, tiny.params, (0, 2), batch)

    text = {name: cached[name] for name in features.TEXT}
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), fields(cached), fields(text)
    )
    source, unpack = features.open_cache(tmp_path, tiny, (2,), identity)
    fewer = next(iter(data.cached_batches(source, unpack, batch_size=written, seed=0)))
    np.testing.assert_array_equal(fewer["features"], cached["features"][:, :, 1:])
    assert sorted(map(bytes, cached["tokens"])) == sorted(
        bytes(row) for batch in batches for row in batch["tokens"] if row.any()
    )
    for wanted, message in (
        ({"data": "other"}, "the cached features are of data"),
        ({}, None),
    ):
        if message:
            with pytest.raises(ValueError, match=message):
                features.open_cache(tmp_path, tiny, (0, 2), wanted)
    with pytest.raises(ValueError, match=r"of taps \[0, 2\], \[1\] are missing"):
        features.open_cache(tmp_path, tiny, (1,), identity)
    other = dataclasses.replace(tiny, params=jax.tree.map(lambda x: x * 2, tiny.params))
    with pytest.raises(ValueError, match="the cached features are of target"):
        features.open_cache(tmp_path, other, (0, 2), identity)
    (tmp_path / features.MANIFEST).unlink()
    with pytest.raises(FileNotFoundError, match="no complete cache"):
        features.open_cache(tmp_path, tiny, (0, 2), identity)


def test_disk_that_is_too_small_is_told_before(tiny, tmp_path):
    layout = features.layout_of(tiny.config, (0,), 64, "bfloat16")
    assert layout.row_bytes == 64 * (4 + 1 + 4 + 4 + 2 * 2 * 32)
    with pytest.raises(OSError, match="cached features need .* GiB, the disk has"):
        features.check_disk(tmp_path, layout, 10**12)


def test_an_interrupted_cache_makes_room_for_the_next(tiny, tmp_path, monkeypatch):
    layout = features.layout_of(tiny.config, (0,), 64, "bfloat16")
    free = shutil.disk_usage(tmp_path)._replace(free=3 * layout.row_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(OSError, match="cached features need"):
        features.check_disk(tmp_path, layout, 4)
    (tmp_path / features.SHARD.format(0)).write_bytes(bytes(layout.row_bytes))
    features.check_disk(tmp_path, layout, 4)


SHARDED = """
import dataclasses, sys
import jax, jax.numpy as jnp, numpy as np
from specjax.distillation import steps
from specjax.distillation.optimizers import make_optimizer
from specjax.models.sharding import batch_sharding, make_mesh, param_shardings
import specjax
from tests.conftest import TINY, random_with_large_weights
from tests.distillation.test_trainer import CONFIG
from tests.trainees import TRAINEES

config = dataclasses.replace(TINY, num_kv_heads=4, num_heads=8, vocab_size=64)
target = random_with_large_weights(config)
rng = np.random.default_rng(0)
batch = {
    "tokens": rng.integers(0, 64, (1, 8, 32)), "loss_mask": rng.random((1, 8, 32)) < 0.7,
    "positions": np.tile(np.arange(32), (1, 8, 1)), "segments": np.ones((1, 8, 32), int),
}
optimizer, _ = make_optimizer(CONFIG["optimizer"], 10)
for sizes in ((8, 1, 1), (2, 4, 1), (2, 2, 2)):
    mesh = make_mesh(*sizes)
    loaded = TRAINEES[sys.argv[1]](target, 2)
    recipe = steps.Recipe(
        target.graphdef, loaded.drafter, optimizer, (("forward_kl", 1.0),), jnp.float32
    )
    state = steps.new_state(recipe, loaded.params, 0, mesh)
    params = jax.device_put(target.params, param_shardings(target.params, mesh))
    placed = {k: jax.device_put(x, batch_sharding(mesh, 8, leading=1)) for k, x in batch.items()}
    for _ in range(2):
        state, metrics = steps.train_step(recipe, state, params, placed)
    sharded = dataclasses.replace(target, params=params)
    drafter = dataclasses.replace(loaded, params=state.params)
    result = specjax.decode(sharded, drafter, [[1, 2, 3], [4]], max_new_tokens=12)
    split = sum(len(x.sharding.device_set) > 1 and not x.sharding.is_fully_replicated
                for x in jax.tree.leaves(state.params))
    print(float(metrics["loss"]), float(metrics["grad_norm"]), split,
          [row.tolist() for row in result.tokens], sep="|")
"""


def test_a_mesh_must_divide_the_batch():
    mesh = jax.sharding.AbstractMesh((2, 4, 1), AXES)
    assert batch_sharding(mesh, 16).spec == jax.sharding.PartitionSpec(("data", "fsdp"))
    with pytest.raises(ValueError, match="12 rows does not divide by data × fsdp = 8"):
        batch_sharding(mesh, 12)
    with pytest.raises(ValueError, match=r"data=1 × fsdp=2 × tensor=1 does not make 1 devices"):
        make_mesh(1, 2, 1)


@pytest.mark.slow
@trained("draft_lm", "eagle3")
def test_a_mesh_changes_nothing(name):
    """Eight devices as 8×1×1, 2×4×1 and 2×2×2 against one: loss, gradient and decoded tokens."""

    def output(devices):
        count = f"--xla_force_host_platform_device_count={devices}"
        env = os.environ | QUICK | {"XLA_FLAGS": count}
        code = SHARDED
        if devices == 1:
            code = code.replace("((8, 1, 1), (2, 4, 1), (2, 2, 2))", "((1, 1, 1),)")
        done = subprocess.run(
            [sys.executable, "-c", code, name], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return [line.split("|") for line in done.stdout.splitlines()]

    ((loss, norm, split, tokens),) = output(1)
    assert split == "0"
    meshes = output(8)
    assert len(meshes) == 3 and [int(mesh[2]) > 0 for mesh in meshes] == [False, True, True]
    for mesh in meshes:
        assert float(mesh[0]) == pytest.approx(float(loss), rel=1e-5)
        assert float(mesh[1]) == pytest.approx(float(norm), rel=1e-5)
        assert mesh[3] == tokens
