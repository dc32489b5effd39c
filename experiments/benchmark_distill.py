r"""Times training steps: on cached target features, online, and of a plain torch loop beside them.

  python -m experiments.benchmark_distill --config=configs/smollm2_draft_lm.py \
    --workdir=runs/benchmark --config.data.path=responses.jsonl --peer --json=distill.json

Every side runs in a process of its own, waits for its turn, and takes the same batches. The cache is
written to the work directory first, if it is not there. `--peer` trains the same drafter in torch
(extra `parity`) with AdamW on the cached hidden states.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from experiments import distill, launch
from specjax.checkpoints.export import export_folder
from specjax.distillation import data, features
from specjax.distillation.optimizers import make_optimizer
from specjax.distillation.steps import new_state, train_step
from specjax.distillation.trainer import place, set_up
from specjax.drafters.draft_lm import from_layers
from specjax.models.target import Target
from specjax.types import LoadedDrafter

_STEPS = flags.DEFINE_integer("steps", 5, "Timed steps of each side.", lower_bound=1)
_PEER = flags.DEFINE_bool("peer", False, "Also time a torch loop (extra `parity`).")
_JSON = launch.define_json()
_SIDE = flags.DEFINE_enum("side", None, ["cached", "online"], "What a child process does.")
TORCH = pathlib.Path(__file__).with_name("torch_distill.py")


def main() -> None:
    """Starts the sides, lets them take turns, prints the table, writes."""
    launch.require(config=distill.CONFIG.value, workdir=distill.WORKDIR.value)
    launch.require(**{"config.data.path": distill.CONFIG.value.data.path})
    config = distill.CONFIG.value.copy_and_resolve_references()
    config.features.path = str(pathlib.Path(distill.WORKDIR.value) / "features")
    if _SIDE.value:
        serve(config)
        return
    launch.check_writable(_JSON.value)
    if jax.default_backend() != "cpu":
        raise ValueError("the sides share one machine: a CPU's only")
    target = launch.load_target(config.target, config.data.template_options.to_dict())
    examples, _ = distill.read(config, target)
    loaded = distill.first_drafter(config, target, examples)
    started = time.perf_counter()
    made_now = not (pathlib.Path(config.features.path) / features.MANIFEST).exists()
    batches = cached_batches(config, target, loaded, examples)
    written = time.perf_counter() - started
    folder = pathlib.Path(config.features.path)
    manifest = json.loads((folder / features.MANIFEST).read_text("utf-8"))
    size = sum(path.stat().st_size for path in folder.iterdir())
    tokens = [int((batch["segments"] > 0).sum()) for batch in batches[1:]]
    seconds: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    losses: dict[int, dict[str, float]] = {}
    with contextlib.ExitStack() as stack:
        sides = {name: stack.enter_context(child(name)) for name in ("cached", "online")}
        if _PEER.value:
            sides["torch, cached"] = stack.enter_context(torch_child(config, target, batches))
        for step in range(1 + _STEPS.value):  # the first compiles
            for name, side in sides.items():
                answer = ask(side, "step")
                losses.setdefault(step, {})[name] = answer["loss"]
                if step:
                    seconds.setdefault(name, []).append(answer["seconds"])
                memory[name] = answer["peak_bytes"]
    for told in losses.values():  # the cache is rounded to its type, so online differs a little
        if not np.allclose(list(told.values()), next(iter(told.values())), rtol=0.02):
            raise ValueError(f"the sides do not do the same: their losses are {told}")
    rows = [
        {
            "side": name,
            "seconds_a_step": statistics.median(taken),
            "tokens_a_second": statistics.median(n / s for n, s in zip(tokens, taken, strict=True)),
            "peak_bytes": memory[name],
        }
        for name, taken in seconds.items()
    ]
    show(rows, size, manifest["rows"] * manifest["sequence_length"])
    cache = {"bytes": size, "rows": manifest["rows"], "seconds": written if made_now else None}
    settings = {"config": config.to_dict(), "steps": _STEPS.value, **launch.machine()}
    launch.write_json(_JSON.value, {"settings": settings, "cache": cache, "rows": rows})


def cached_batches(
    config: ConfigDict, target: Target, loaded: LoadedDrafter, examples: list[data.Example]
) -> list[features.Batch]:
    """The batches that all sides take; writes the cache if there is none."""
    batches = iter(distill.batches(config, target, loaded, examples))
    return [next(batches) for _ in range(1 + _STEPS.value)]


def serve(config: ConfigDict) -> None:
    """Takes a training step for every line on stdin."""
    output, sys.stdout = sys.stdout, sys.stderr
    target = launch.load_target(config.target, config.data.template_options.to_dict())
    examples, _ = distill.read(config, target)
    loaded = distill.first_drafter(config, target, examples)
    batches = iter(cached_batches(config, target, loaded, examples))
    mesh, recipe, _ = set_up(config.to_dict(), target, loaded)
    state = new_state(recipe, loaded.params, config.seed, mesh)
    print("{}", file=output, flush=True)
    for _ in sys.stdin:
        batch = next(batches)
        if _SIDE.value == "online":
            batch = {name: batch[name] for name in features.TEXT}
        started = time.perf_counter()
        state, means = train_step(
            recipe, state, target.params, place(mesh, batch, config.accumulate)
        )
        loss = float(means["loss"])
        taken = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answer = {"seconds": taken, "loss": loss, "peak_bytes": peak}
        print(json.dumps(answer), file=output, flush=True)


@contextlib.contextmanager
def process(*command: str) -> Iterator[subprocess.Popen]:
    """A child that has said that it is ready."""
    with subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            ask(running, None)
            yield running
        finally:
            running.kill()


def child(side: str) -> contextlib.AbstractContextManager[subprocess.Popen]:
    """This program again, as one side."""
    return process("-m", "experiments.benchmark_distill", *sys.argv[1:], f"--side={side}")


@contextlib.contextmanager
def torch_child(
    config: ConfigDict, target: Target, batches: list[features.Batch]
) -> Iterator[subprocess.Popen]:
    """The torch loop, with the same first weights and batches."""
    plain = {"name": "draft_lm", "num_layers": 0, "num_draft_tokens": 0}
    loss = {name: factor for name, factor in config.loss.items() if factor}
    if set(config.drafter) - set(plain) or config.drafter.name != "draft_lm":
        raise ValueError("--peer trains a draft_lm of the target's layers only")
    if loss != {"forward_kl": 1.0} or config.optimizer.name != "adamw" or config.average_decay:
        raise ValueError("--peer trains with forward_kl and adamw, without an average, only")
    small = from_layers(target, config.drafter.num_layers)
    with tempfile.TemporaryDirectory() as root:
        export_folder(small, root)
        head = target.params.get("head_weight", target.params["embedding"])
        arrays = {"head": np.asarray(head, np.float32)}
        for number, batch in enumerate(batches):
            arrays |= {f"{name}_{number}": np.asarray(batch[name]) for name in features.TEXT}
            arrays[f"hidden_{number}"] = np.asarray(batch["hidden"], np.float32)
            weights = jax.vmap(features.prediction_weights)(batch)
            arrays[f"weights_{number}"] = np.asarray(weights)
        np.savez(pathlib.Path(root) / "batches.npz", **arrays)
        _, rate = make_optimizer(config.optimizer.to_dict(), config.total_steps)
        rates = [float(rate(step)) for step in range(len(batches))]
        options = {"accumulate": config.accumulate, "learning_rates": rates}
        options |= config.optimizer.to_dict()
        with process(str(TORCH), root, json.dumps(options)) as running:
            yield running


def ask(running: subprocess.Popen, request: str | None) -> dict[str, Any]:
    """Sends a line, waits for the answer."""
    if request is not None:
        running.stdin.write(request + "\n")
        running.stdin.flush()
    line = running.stdout.readline()
    if not line:
        raise ValueError("a side ended early; its message is above")
    return json.loads(line)


def show(rows: list[dict[str, Any]], cache_bytes: int, cache_tokens: int) -> None:
    """Prints the table."""
    table = Table("side", "s a step", "tokens/s", "peak memory")
    for row in rows:
        table.add_row(
            row["side"],
            f"{row['seconds_a_step']:.2f}",
            f"{row['tokens_a_second']:.0f}",
            f"{row['peak_bytes'] / 2**30:.2f} GiB",
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"the cache holds {cache_tokens} tokens in {cache_bytes / 2**30:.2f} GiB, "
        f"{cache_bytes / cache_tokens:.0f} bytes each, padding included"
    )


if __name__ == "__main__":
    launch.run(main)
