"""Two processes under `jax.distributed` train as one does, and write one checkpoint."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

import specjax
from specjax.checkpoints.load import load_target
from tests.checkpoints.test_load import GOLDEN, write_gguf
from tests.conftest import QUICK
from tests.distillation.test_trainer import TIMES

CODE = """
import sys
import jax
index, count, port, total, workdir = *map(int, sys.argv[1:5]), sys.argv[5]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
if count > 1:
    jax.distributed.initialize(f"localhost:{port}", count, index)
import numpy as np
from specjax.distillation import data
from specjax.distillation.trainer import train
from specjax.drafters.draft_lm import draft_lm, from_layers
from tests.conftest import TINY, random_with_large_weights
from tests.conftest import QUICK
from tests.distillation.test_trainer import CONFIG

target = random_with_large_weights(TINY)
rng = np.random.default_rng(3)
examples = [
    data.Example(rng.integers(0, 61, 16).astype(np.int32), np.arange(16) >= 3) for _ in range(8)
]

rows = {"batch_size": 4 // count, "sequence_length": 16}
outcome = train(
    CONFIG | {"total_steps": total, "mesh": {"data": -1, "fsdp": 1, "tensor": 1}},
    target, draft_lm(from_layers(target, 2), target, 4),
    data.train_batches(examples, seed=0, process_index=index, process_count=count, **rows),
    lambda: iter(data.evaluation_batches(
        examples, process_index=index, process_count=count, **rows)), workdir,
)
print(outcome.step, outcome.exported_step)
"""


def run(workdir, count, total):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = os.environ | QUICK
    arguments = [str(count), str(port), str(total), str(workdir)]
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(index), *arguments],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(count)
    ]  # fmt: skip
    told = [host.communicate(timeout=600) for host in hosts]
    for host, (_, errors) in zip(hosts, told, strict=True):
        assert host.returncode == 0, errors[-3000:]
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], {out.splitlines()[-1] for out, _ in told}


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    """The same curve, one checkpoint, and one process goes on from it as if it had made it."""
    alone, (printed,) = run(tmp_path / "alone", 1, 8)
    both, printed_by_both = run(tmp_path / "both", 2, 8)
    assert printed_by_both == {printed}
    assert [x["step"] for x in both] == [x["step"] for x in alone]
    for one, other in zip(alone, both, strict=True):
        for name in one.keys() - TIMES:
            assert other[name] == pytest.approx(one[name], rel=1e-4), name
    assert sorted(p.name for p in (tmp_path / "both/checkpoints/last").iterdir()) == ["6", "8"]
    # Eight steps are all there are: one process restores the checkpoint and finds nothing to do.
    restored, (printed_again,) = run(tmp_path / "both", 1, 8)
    assert printed_again == printed and restored == both


PROGRAM = """
import sys
import jax
index, port, workdir = int(sys.argv[1]), *sys.argv[2:4]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, index)
from experiments import distill, launch
sys.argv = ["distill", f"--workdir={workdir}", *sys.argv[4:]]
sys.argv += [f"--config.features.path={workdir}/features_{index}"]
launch.run(distill.main)
"""


@pytest.mark.slow
def test_two_processes_that_split_the_target_export_a_drafter(tmp_path):
    """No process holds the target's tables whole while it trains, or caches what the target made."""
    model = write_gguf(tmp_path / "tiny.gguf", GOLDEN / "llama_untied")
    text = [
        {"prompt_tokens": [n, n + 1, n], "response_tokens": [n + 1, n, n] * 4} for n in range(5, 13)
    ]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in text))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    arguments = [
        str(tmp_path / "run"), "--config=configs/smollm2_eagle3.py:runlocal",
        f"--config.target={model}", f"--config.data.path={tmp_path / 'text.jsonl'}",
        "--config.drafter.draft_vocab_size=40", "--config.drafter.taps=(0,1)",
        "--config.data.sequence_length=32", "--config.data.held_out=0.3", "--config.mesh.fsdp=2",
        "--config.total_steps=2", "--config.optimizer.warmup_steps=0", "--config.tau_prompts=1",
        "--config.drafter.ttt_steps=1", "--config.drafter.num_draft_tokens=1",
    ]  # fmt: skip
    env = os.environ | QUICK | {"SPECJAX_CACHE": str(tmp_path / "cache")}
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(index), port, *arguments],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    told = [host.communicate(timeout=600) for host in hosts]
    for host, (_, errors) in zip(hosts, told, strict=True):
        assert host.returncode == 0, errors[-3000:]
    target = load_target(model)
    loaded = specjax.load_drafter(str(tmp_path / "run/drafter"), target)
    assert len(loaded.drafter.vocabulary) == 40
    plain, drafted = (
        specjax.decode(target, drafter, [5, 6, 5], max_new_tokens=8) for drafter in (None, loaded)
    )
    assert plain.tokens[0].tolist() == drafted.tokens[0].tolist()
