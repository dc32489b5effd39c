"""What a run tells: a bar and lines in the terminal, `metrics.jsonl`, and event files if wanted."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from types import TracebackType

import jax
from etils import epath
from rich import progress
from rich.console import Console


class Report:
    """Written by the first process only.

    `metrics.jsonl` has one object a report, with its step; where a run goes on from a checkpoint, what
    was written after that is dropped first, the evaluation of its own step included, so that nothing
    is there twice.
    """

    def __init__(self, workdir: str, step: int, total_steps: int, *, tensorboard: bool = False):
        self._first = jax.process_index() == 0
        self._path = epath.Path(workdir) / "metrics.jsonl"
        self._total, self._tokens, self._seconds = total_steps, 0, 0.0
        self._begun, self._begun_step, self._events = time.time(), step, None
        self._console = Console(highlight=False, soft_wrap=True, quiet=not self._first)
        self._bar = progress.Progress(
            progress.TextColumn("step"),
            progress.MofNCompleteColumn(),
            progress.BarColumn(),
            progress.TextColumn("{task.description}"),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", completed=step, total=total_steps)
        if not self._first:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = []
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                try:
                    told = json.loads(line)
                    if told["step"] < step or (told["step"] == step and "loss" in told):
                        self._lines.append(line)
                except (ValueError, KeyError):  # the last line of a process that was killed
                    continue
        self._flush()
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(self._path.parent), purge_step=step + 1)

    def __enter__(self) -> Report:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._bar.stop()
        if self._events:
            self._events.close()

    def count(self, tokens: int, seconds: float) -> None:
        """Adds a step's work to what the next report divides; moves the bar."""
        self._tokens += tokens
        self._seconds += seconds
        self._bar.advance(self._task)

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """Reports a training step: writes its figures, prints the main ones."""
        rate = self._tokens / self._seconds if self._seconds else math.nan
        taken = {"seconds": self._seconds, "tokens_per_second": rate}
        self._tokens, self._seconds = 0, 0.0
        self.write(step, {**figures, **taken}, show=False)
        done = step - self._begun_step
        left = (time.time() - self._begun) / max(done, 1) * (self._total - step)
        alphas = " ".join(f"{figures[name]:.3f}" for name in sorted(figures) if "alpha_" in name)
        told = (
            f"loss {figures['loss']:.4f}  α {alphas}  {rate:.0f} tokens/s  {left / 60:.1f} min left"
        )
        if self._console.is_terminal:
            self._bar.update(self._task, description=told)
        else:
            self._console.print(f"step {step}/{self._total}  {told}")

    def write(self, step: int, figures: Mapping[str, float], *, show: bool = True) -> None:
        """Writes figures of a step; prints them all."""
        if not self._first:
            return
        known = {name: value for name, value in figures.items() if math.isfinite(value)}
        self._lines.append(json.dumps({"step": step, **known}))
        self._flush()
        if self._events:
            for name, value in known.items():
                self._events.add_scalar(name, value, step)
        if show:
            told = "  ".join(f"{name} {value:.4f}" for name, value in known.items())
            self._console.print(f"step {step}/{self._total}  {told}")

    def _flush(self) -> None:
        """All lines at once, in a new file: buckets cannot append, and half a file is never seen."""
        whole = self._path.with_name(self._path.name + ".tmp")
        whole.write_text("".join(f"{line}\n" for line in self._lines))
        whole.replace(self._path)
