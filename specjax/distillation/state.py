"""Training state on disk: the last steps to go on from, and the best."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from typing import Any

import grain
import jax
import orbax.checkpoint as ocp
from etils import epath

from specjax.distillation.steps import TrainState

LAST, BEST = "last", "best"


class OtherConfig(ValueError):
    """A run cannot go on with another config."""


class Checkpoints:
    """Orbax checkpoints of a work directory, written in the background.

    `last/` holds the two newest, `best/` the one with the highest score.
    """

    def __init__(self, workdir: str):
        self._root = epath.Path(workdir) / "checkpoints"
        options = {
            LAST: {"max_to_keep": 2},
            BEST: {
                "max_to_keep": 1, "best_fn": lambda metrics: metrics["score"], "best_mode": "max",
            },
        }  # fmt: skip
        self._managers = {
            name: ocp.CheckpointManager(
                self._root / name,
                options=ocp.CheckpointManagerOptions(
                    # Both write at a time, and must not wait at each other's barriers.
                    multiprocessing_options=ocp.options.MultiprocessingOptions(
                        barrier_sync_key_prefix=name
                    ),
                    **option,
                ),
            )
            for name, option in options.items()
        }

    def save(self, state: TrainState, data: grain.DatasetIterator, config: str) -> None:
        """Saves where training can go on: state, position in the data, config."""
        self._managers[LAST].save(
            int(state.step),
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_plain(state)),
                data=grain.checkpoint.CheckpointSave(data),
                config=ocp.args.JsonSave(json.loads(config)),
                hosts=ocp.args.JsonSave({"count": jax.process_count()}),
            ),
            force=True,
        )

    def save_best(self, state: TrainState, score: float) -> None:
        """Saves what is exported, if its score is the best so far."""
        self._managers[BEST].save(
            int(state.step),
            args=ocp.args.Composite(params=ocp.args.StandardSave(state.best_params)),
            metrics={"score": score},
        )

    def restore(self, state: TrainState, data: grain.DatasetIterator, config: str) -> TrainState:
        """The newest state that can be read; `state` itself where there is none.

        A damaged checkpoint is named in the log and deleted, and the one before is taken. The data
        iterator is moved to where it was; where another number of hosts saved it, it cannot be, and the
        log says so.

        Args:
          state: of the same form, whose arrays lie where the restored ones shall.
          data: an iterator over the same data.
          config: JSON, which must be what it was.

        Raises:
          OtherConfig: the config differs; the message says where.
        """
        manager = self._managers[LAST]
        for step in sorted(manager.all_steps(), reverse=True):
            kept = {"config": ocp.args.JsonRestore(), "hosts": ocp.args.JsonRestore()}
            try:
                saved = manager.restore(step, args=ocp.args.Composite(**kept))
                check_same_config(saved["config"], json.loads(config))
                hosts = saved["hosts"]["count"]
                kept = {"state": ocp.args.StandardRestore(_plain(state))}
                if hosts == jax.process_count():
                    kept["data"] = grain.checkpoint.CheckpointRestore(data)
                else:
                    logging.getLogger(__name__).warning(
                        "checkpoint %d was saved by %d hosts, here are %d: the data begins anew",
                        step, hosts, jax.process_count(),
                    )  # fmt: skip
                saved = manager.restore(step, args=ocp.args.Composite(**kept))
            except OtherConfig:
                raise
            except Exception as error:  # whatever a damaged file makes the reader raise
                logging.getLogger(__name__).warning(
                    "checkpoint %d is damaged, the one before is taken: %s",
                    step, str(error).split("\n")[0],
                )  # fmt: skip
                shutil.rmtree(self._root / LAST / str(step), ignore_errors=True)
                manager.reload()
                continue
            return _typed(saved["state"])
        return state

    def restore_best(self, params: Any) -> tuple[Any, int] | None:
        """The params with the highest score, where `params` lie, and their step; None without any."""
        self._managers[BEST].wait_until_finished()
        step = self._managers[BEST].best_step()
        if step is None:
            return None
        args = ocp.args.Composite(params=ocp.args.StandardRestore(params))
        return self._managers[BEST].restore(step, args=args)["params"], step

    def close(self) -> None:
        """Waits until all is written."""
        for manager in self._managers.values():
            manager.wait_until_finished()
            manager.close()


def _plain(state: TrainState) -> dict[str, Any]:
    """The state without typed keys, which Orbax would not keep."""
    plain = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    if state.average is not None:
        plain["average"] = state.average
    return plain | {"key": jax.random.key_data(state.key)}


def _typed(plain: dict[str, Any]) -> TrainState:
    key = jax.random.wrap_key_data(plain["key"])
    return TrainState(plain["step"], plain["params"], plain["opt_state"], plain.get("average"), key)


def check_same_config(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises OtherConfig that names every key whose value differs."""
    differences = list(_differences(saved, wanted, ""))
    if differences:
        raise OtherConfig(
            "this work directory was begun with another config: "
            + "; ".join(differences)
            + "; use another directory, or the same config"
        )


def _differences(saved: Any, wanted: Any, name: str) -> Any:
    if isinstance(saved, Mapping) and isinstance(wanted, Mapping):
        for key in sorted(saved.keys() | wanted.keys()):
            yield from _differences(saved.get(key), wanted.get(key), f"{name}.{key}".strip("."))
    elif saved != wanted:
        yield f"{name} was {saved!r}, is {wanted!r}"
