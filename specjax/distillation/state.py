"""Training state on disk: the last steps to go on from, and the best."""

from __future__ import annotations

import json
import logging
import math
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

    Args:
      workdir: folder or bucket.
      read_only: another run may be writing there.
    """

    def __init__(self, workdir: str, *, read_only: bool = False):
        # Orbax wants it absolute.
        self._root = epath.Path(workdir).resolve() / "checkpoints"
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
                    read_only=read_only,
                    create=not read_only,
                    cleanup_tmp_directories=not read_only,
                    # Both write at a time, and must not wait at each other's barriers.
                    multiprocessing_options=ocp.options.MultiprocessingOptions(
                        barrier_sync_key_prefix=name
                    ),
                    **option,
                ),
            )
            for name, option in options.items()
        }

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits until all is written."""
        for manager in self._managers.values():
            manager.wait_until_finished()
            manager.close()

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
        if not math.isfinite(score):
            return
        manager = self._managers[BEST]
        manager.wait_until_finished()  # a score can be read once it is on disk
        best = manager.best_step()
        if best is None or score > manager.metrics(best)["score"]:
            manager.save(
                int(state.step),
                args=ocp.args.Composite(params=ocp.args.StandardSave(state.best_params)),
                metrics={"score": score},
                force=True,
            )

    def restore(self, state: TrainState, data: grain.DatasetIterator, config: str) -> TrainState:
        """The newest state that can be read; `state` itself where none was saved.

        A damaged checkpoint is named in the log and, once an older one has been read, deleted. The data
        iterator is moved to where it was; where another number of hosts saved it, it cannot be, and
        the log says so.

        Args:
          state: of the same form, whose arrays lie where the restored ones shall.
          data: an iterator over the same data.
          config: JSON, which must be what it was.

        Raises:
          OtherConfig: the config differs; the message says where.
          OSError: there are checkpoints, and none can be read.
        """
        manager, log = self._managers[LAST], logging.getLogger(__name__)
        damaged = []
        for step in sorted(manager.all_steps(), reverse=True):
            try:
                restored = self._read(manager, step, state, data, config)
            except OtherConfig:
                raise
            except Exception as error:  # whatever a damaged file makes the reader raise
                log.warning(
                    "checkpoint %d is damaged, the one before is taken: %s",
                    step, str(error).split("\n")[0],
                )  # fmt: skip
                damaged.append(step)
                continue
            self._delete_behind(step)  # what a run saved that went on from a damaged checkpoint
            return restored
        if damaged:
            raise OSError(f"{self._root / LAST}: none of checkpoints {damaged} can be read")
        # The best of a run that ended before its first save, of whatever config.
        self._delete_behind(-1)
        return state

    def _delete_behind(self, step: int) -> None:
        for manager in self._managers.values():
            for later in manager.all_steps():
                if later > step:
                    manager.delete(later)

    def _read(
        self,
        manager: ocp.CheckpointManager,
        step: int,
        state: TrainState,
        data: grain.DatasetIterator,
        config: str,
    ) -> TrainState:
        """One checkpoint; also moves the data."""
        kept = {"config": ocp.args.JsonRestore(), "hosts": ocp.args.JsonRestore()}
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
        return _typed(manager.restore(step, args=ocp.args.Composite(**kept))["state"])

    def restore_best(self, params: Any) -> tuple[Any, int] | None:
        """The params with the highest score, and their step; None without any.

        Args:
          params: arrays, or their shapes and types, of the same form.
        """
        self._managers[BEST].wait_until_finished()
        step = self._managers[BEST].best_step()
        if step is None:
            return None
        args = ocp.args.Composite(params=ocp.args.StandardRestore(params))
        return self._managers[BEST].restore(step, args=args)["params"], step


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
