"""The training loop: mesh, parameters, data, step, log, evaluate, save. Read it from top to bottom."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterable, Mapping
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
from specjax.models.sharding import batch_sharding, make_mesh, param_shardings
from specjax.models.target import Target
from specjax.types import LoadedDrafter, PyTree

Evaluator = Callable[[PyTree], dict[str, float]]  # params → figures


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      drafter: with the best params by `alpha`, or the last where that was never evaluated.
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
    evaluators: Mapping[str, tuple[int, Evaluator]] | None = None,
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
      evaluators: name → (period in steps, figures of the params), beside `alpha`.
      tensorboard: also write event files.

    Raises:
      FloatingPointError: the loss was not finite; the params are those before it, and saved.
      ValueError: config and work directory, or mesh and batch, do not fit.
    """
    mesh, recipe, rate = set_up(config, target, loaded)
    target_params = jax.device_put(target.params, param_shardings(target.params, mesh))
    state = new_state(recipe, loaded.params, config["seed"], mesh)

    data = iter(batches)
    checkpoints = Checkpoints(workdir)
    described = json.dumps(_lasting(config))
    state = checkpoints.restore(state, data, described)
    step = int(state.step)
    report = Report(workdir, step, config["total_steps"], tensorboard=tensorboard)
    stop = _Stop()

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

    periods = {"alpha": (config["alpha_every"], alpha), **(evaluators or {})}

    def evaluate(step: int) -> None:
        """All evaluators whose turn it is; the first and the last step are everyone's."""
        figures = {}
        for period, evaluator in periods.values():
            if period and (step % period == 0 or step == config["total_steps"]):
                figures |= evaluator(state.best_params)
        if figures:
            report.write(step, figures)
        if "held_out/alpha_1" in figures:
            checkpoints.save_best(state, _score(figures))

    with report:
        if step == 0:
            evaluate(0)
        while step < config["total_steps"] and not stop:
            batch = next(data)
            started = time.perf_counter()
            state, means = train_step(
                recipe, state, target_params, place(mesh, batch, config["accumulate"])
            )
            step += 1
            loss = float(means["loss"])
            if not np.isfinite(loss) or not np.isfinite(float(means["grad_norm"])):
                checkpoints.close()
                first = np.asarray(batch["tokens"])[0, :12].tolist()
                raise FloatingPointError(
                    f"step {step}: loss {loss}, gradient {float(means['grad_norm'])}; the batch "
                    f"begins with tokens {first}; the checkpoints before are kept"
                )
            tokens = int((np.asarray(batch["segments"]) > 0).sum()) * jax.process_count()
            report.count(tokens, time.perf_counter() - started)
            if step % config["log_every"] == 0 or step == config["total_steps"]:
                figures = {name: float(value) for name, value in means.items()}
                report.step(step, figures | {"learning_rate": float(rate(step - 1))})
            evaluate(step)
            if step % config["save_every"] == 0 or step == config["total_steps"] or stop:
                checkpoints.save(state, data, described)
    params, exported_step = checkpoints.restore_best(state.best_params) or (state.best_params, step)
    checkpoints.close()
    trained = dataclasses.replace(loaded, params=compute_params(fetched(params), target.dtype))
    return Outcome(trained, exported_step, step, preempted=step < config["total_steps"])


def set_up(
    config: Mapping[str, Any], target: Target, loaded: LoadedDrafter
) -> tuple[Mesh, Recipe, optax.Schedule]:
    """The mesh, what a step does, and its learning rate, as a config for `train` has them."""
    optimizer, rate = make_optimizer(config["optimizer"], config["total_steps"])
    recipe = Recipe(
        target.graphdef, loaded.drafter, optimizer, tuple(dict(config["loss"]).items()),
        jnp.dtype(target.dtype), config["average_decay"], config["remat"],
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
        rows = x.shape[bool(groups)] * jax.process_count()
        sharding = batch_sharding(mesh, rows, leading=int(bool(groups)))
        return jax.make_array_from_process_local_data(sharding, x)

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


def _score(figures: Mapping[str, float]) -> float:
    """The expected number of accepted tokens, if positions are accepted independently."""
    total, reached, k = 0.0, 1.0, 1
    while f"held_out/alpha_{k}" in figures:
        reached *= figures[f"held_out/alpha_{k}"]
        total, k = total + reached, k + 1
    return total


def _lasting(config: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same when a run goes on: all but how often it tells and saves."""
    loose = ("log_every", "alpha_every", "save_every", "tau_every", "tensorboard")
    return {key: value for key, value in config.items() if key not in loose}


class _Stop:
    """True once the process has been asked to end by SIGTERM, on any host."""

    def __init__(self):
        self._asked = False

        def ask(*_: Any) -> None:
            self._asked = True

        signal.signal(signal.SIGTERM, ask)

    def __bool__(self) -> bool:
        if jax.process_count() == 1:
            return self._asked
        return bool(multihost_utils.process_allgather(np.array(self._asked)).any())
