"""The training loop: mesh, parameters, data, step, log, evaluate, save. Read it from top to bottom."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from specjax import metrics
from specjax.distillation.features import Batch
from specjax.distillation.optimizers import make_optimizer
from specjax.distillation.report import Report
from specjax.distillation.state import Checkpoints
from specjax.distillation.steps import (
    Recipe,
    agreement_step,
    compute_params,
    evaluation_step,
    new_state,
    train_step,
)
from specjax.losses import Losses
from specjax.models.sharding import batch_sharding, make_mesh, param_shardings
from specjax.models.target import Target
from specjax.types import LoadedDrafter, PyTree

Evaluator = Callable[[PyTree], dict[str, float]]  # params → figures


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      drafter: with the params of the best held-out acceptance; as it was given, where preempted.
      exported_step: the step they are of.
      step: updates done.
      preempted: it was told to stop before the last step; the same command goes on.
    """

    drafter: LoadedDrafter
    exported_step: int
    step: int
    preempted: bool


def train(
    config: Mapping[str, Any],
    target: Target,
    loaded: LoadedDrafter,
    batches: grain.IterDataset,
    held_out: Callable[[], Iterable[Batch]],
    workdir: str,
    *,
    evaluators: Sequence[tuple[int, Evaluator]] = (),
    tensorboard: bool = False,
) -> Outcome:
    """Trains a drafter, from the newest checkpoint of the work directory if there is one.

    Args:
      config: `seed`, `total_steps`, `accumulate`, `remat`, `loss` {name: coefficient}, `optimizer`,
        `average_decay`, `mesh`, and the periods `log_every`, `alpha_every`, `save_every`.
      target: frozen.
      loaded: the drafter with its first params.
      batches: of this host's rows `[accumulate · B, T]`.
      held_out: makes one pass over the text that is evaluated on, rows `[B, T]`.
      workdir: folder or bucket.
      evaluators: (period in steps, figures of the params) each, beside `alpha`; period 0 is the last
        step only.
      tensorboard: also write event files.

    Raises:
      FloatingPointError: the loss was not finite. The params before it are saved, with the data behind
        that batch, so that the same call again goes on there.
      ValueError: config and work directory, or mesh and batch, do not fit.
    """
    mesh, recipe, rate = set_up(config, target, loaded)
    target_params = jax.device_put(target.params, param_shardings(target.params, mesh))
    state = new_state(recipe, loaded.params, config["seed"], mesh)

    def alpha(params: PyTree) -> dict[str, float]:
        """Teacher-forced means over the held-out text, and its cycles replayed."""
        sums: dict[str, np.ndarray] = {}
        cycles = []
        for host_batch in held_out():
            batch = place(mesh, host_batch)
            terms = evaluation_step(
                recipe, params, target_params, batch, jax.random.key(config["seed"])
            )
            for name, pair in terms.items():
                sums[name] = sums.get(name, 0) + np.array([float(x) for x in pair])
            arrays = agreement_step(recipe, params, target_params, batch)
            agreement, supervised, tokens = fetched((*arrays, batch["tokens"]))
            for row in zip(agreement, supervised, tokens, strict=True):
                cycles += replayed(*row, target.stop_tokens)
        figures = {f"held_out/{name}": float(s / w) for name, (s, w) in sums.items()}
        accepted, drafted, committed = map(np.concatenate, zip(*cycles, strict=True))
        alphas = metrics.alpha(accepted, drafted, committed, recipe.drafter.draft_depth)
        figures |= {f"replayed/alpha_{k}": float(x) for k, x in enumerate(alphas, start=1)}
        return figures | {"replayed/tau": metrics.tau(committed)}

    periods = [(config["alpha_every"], alpha), *evaluators]
    last_step, described = config["total_steps"], json.dumps(_lasting(config))
    data = iter(batches)
    with Checkpoints(workdir) as checkpoints, _Stop() as stop:
        state = checkpoints.restore(state, data, described)
        step = int(state.step)

        def evaluate() -> None:
            """Asks every evaluator whose turn it is; the last step is everyone's."""
            figures = {}
            for period, evaluator in periods:
                if step == last_step or (period and step % period == 0):
                    figures |= evaluator(state.best_params)
            if figures:
                report.write(step, figures)
            if "held_out/alpha_1" in figures:
                checkpoints.save_best(state, score(figures, recipe.drafter.draft_depth))

        with Report(workdir, step, last_step, tensorboard=tensorboard) as report:
            evaluate()  # a run that goes on may have ended between its save and this
            stopped = compiled = False
            while step < last_step and not stopped:
                started = time.perf_counter()
                batch = next(data)
                state, means = train_step(
                    recipe, state, target_params, place(mesh, batch, config["accumulate"])
                )
                step += 1
                figures = {name: float(value) for name, value in means.items()}
                if not np.isfinite([figures["loss"], figures["grad_norm"]]).all():
                    checkpoints.save(state, data, described)  # behind that batch
                    raise FloatingPointError(
                        f"step {step}: loss {figures['loss']}, gradient {figures['grad_norm']}; the "
                        f"batch begins with tokens {batch['tokens'][0, :12].tolist()}; the weights "
                        "before it are saved, and the same command goes on behind it"
                    )
                tokens = int((np.asarray(batch["segments"]) > 0).sum()) * jax.process_count()
                if compiled:
                    report.count(tokens, time.perf_counter() - started)
                else:
                    report.count(0, 0.0)
                compiled, stopped = True, bool(stop)
                ends = stopped or step == last_step
                if ends or step % config["log_every"] == 0:
                    report.step(step, figures | {"learning_rate": float(rate(step - 1))})
                if ends or step % config["save_every"] == 0:
                    checkpoints.save(state, data, described)
                if not stopped or step == last_step:
                    evaluate()
        if step < last_step:
            return Outcome(loaded, 0, step, preempted=True)
        params, best_step = checkpoints.restore_best(state.best_params) or (state.best_params, step)
    trained = dataclasses.replace(loaded, params=compute_params(fetched(params), target.dtype))
    return Outcome(trained, best_step, step, preempted=False)


def set_up(
    config: Mapping[str, Any], target: Target, loaded: LoadedDrafter
) -> tuple[Mesh, Recipe, optax.Schedule]:
    """The mesh, what a step does, and its learning rate, as a config for `train` has them.

    Raises:
      ValueError: mesh, optimizer or losses are not possible, or the device cannot train in this type.
    """
    if target.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        raise ValueError(
            "XLA has no products for training in bfloat16 on a CPU: load the target as float32"
        )
    optimizer, rate = make_optimizer(config["optimizer"], config["total_steps"])
    losses = tuple((name, factor) for name, factor in config["loss"].items() if factor)
    if not losses:
        raise ValueError("every coefficient of `loss` is 0")
    Losses(tuple(name for name, _ in losses))  # unknown names, before any work
    recipe = Recipe(
        target.graphdef, loaded.drafter, optimizer, losses, jnp.dtype(target.dtype),
        config["average_decay"], config["remat"],
    )  # fmt: skip
    return make_mesh(**config["mesh"]), recipe, rate


def place(mesh: Mesh, batch: Batch, groups: int = 0) -> Batch:
    """This host's rows, `[rows, …]` each, as part of the batch of all hosts on the mesh.

    Args:
      mesh: where.
      batch: of numpy arrays.
      groups: A, for micro-batches `[A, rows / A, …]`; 0 leaves the rows as they are.
    """

    def one(x: np.ndarray) -> jax.Array:
        x = x.reshape(groups, len(x) // groups, *x.shape[1:]) if groups else x
        axis = 1 if groups else 0
        rows = x.shape[axis] * jax.process_count()
        sharding = batch_sharding(mesh, rows, leading=axis)
        shape = (*x.shape[:axis], rows, *x.shape[axis + 1 :])
        return jax.make_array_from_process_local_data(sharding, x, shape)

    return {name: one(np.asarray(x)) for name, x in batch.items()}


def fetched(arrays: PyTree) -> PyTree:
    """Arrays of all hosts on this one."""
    return jax.device_get(multihost_utils.process_allgather(arrays, tiled=True))


def replayed(
    agreement: np.ndarray, supervised: np.ndarray, tokens: np.ndarray, stop_tokens: tuple[int, ...]
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """`metrics.replay` of every answer in a row of texts: `[T, K]`, `[T]` bool, `[T]`."""
    edges = np.flatnonzero(np.diff(supervised, prepend=False, append=False)).reshape(-1, 2)
    return [
        metrics.replay(agreement[start:end], stopped=tokens[end] in stop_tokens)
        for start, end in edges
    ]


def score(figures: Mapping[str, float], depth: int) -> float:
    """By which the best weights are chosen: the drafts accepted, were positions independent."""
    total, reached = 0.0, 1.0
    for k in range(1, depth + 1):
        reached *= figures.get(f"held_out/alpha_{k}", 0.0)
        total += reached
    return total


def _lasting(config: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same when a run goes on: all but what changes no number of a step."""
    loose = (
        "log_every", "alpha_every", "save_every", "tau_every", "tensorboard", "mesh", "remat",
        "init_from",
    )  # fmt: skip
    return {key: value for key, value in config.items() if key not in loose}


class _Stop:
    """True once the process has been asked to end by SIGTERM, on any host.

    As a context it takes the signal, and gives it back.
    """

    def __enter__(self) -> _Stop:
        self._asked = False

        def ask(*_: Any) -> None:
            self._asked = True

        self._before = signal.signal(signal.SIGTERM, ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def __bool__(self) -> bool:
        if jax.process_count() == 1:
            return self._asked
        return bool(multihost_utils.process_allgather(np.array(self._asked)).any())
