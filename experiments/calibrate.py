r"""Makes the confidence of a DSpark drafter true, and writes it with the temperatures that do.

  python -m experiments.calibrate --target=smollm2 --drafter=runs/smollm2_dspark/drafter \
    --prompts=other_prompts.jsonl --temperature=1 --out=runs/smollm2_dspark/calibrated

The prompts are decoded, the cycles of every other one fitted, and the table is about the rest, which
were not: how far predicted survival is from what survives (expected calibration error), before
and after. `--plot=FILE.png` draws the bins of that error, a reliability diagram for each draft. Take
prompts that are in no evaluation.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

import specjax
from experiments import drafts, launch
from specjax.drafters import export, manifest
from specjax.drafters.dspark import DSpark, calibration
from specjax.drafters.dspark.calibration import Reliability
from specjax.evaluation import plots, tables
from specjax.evaluation.prompts import read_prompts
from specjax.types import DecodeResult, LoadedDrafter

_TARGET = launch.define_target()
_TEMPLATE_OPTIONS = launch.define_template_options()
_DRAFTER = flags.DEFINE_string("drafter", None, "Folder of a DSpark drafter.")
_PROMPTS = flags.DEFINE_string("prompts", None, "A prompt file.")
_LIMIT = flags.DEFINE_integer("limit", None, "Prompts; all by default.", lower_bound=2)
_OUT = flags.DEFINE_string("out", None, "Folder that the calibrated drafter is written to.")
_RULE = launch.define_rule()
_SAMPLING = launch.define_sampling()
_MAX_NEW_TOKENS = launch.define_max_new_tokens()
_BATCH = flags.DEFINE_integer("batch", 8, "Prompts decoded together.", lower_bound=1)
_JSON = launch.define_json()
_PLOT = launch.define_plot()


def main() -> None:
    """Decodes, fits, prints the table, writes, draws."""
    launch.require(
        target=_TARGET.value, drafter=_DRAFTER.value, prompts=_PROMPTS.value, out=_OUT.value
    )
    launch.check_writable(_JSON.value)
    launch.check_writable(_PLOT.value)
    target = launch.load_target(_TARGET.value, _TEMPLATE_OPTIONS.value)
    loaded = drafts.load_drafter(_DRAFTER.value, target, None, [])
    if not isinstance(loaded, LoadedDrafter) or not isinstance(loaded.drafter, DSpark):
        raise ValueError(
            f"--drafter={_DRAFTER.value} is no DSpark drafter; only those have a confidence"
        )
    if not loaded.drafter.confident:
        raise ValueError(f"--drafter={_DRAFTER.value} has no confidence head to calibrate")
    prompts = dict(enumerate(read_prompts(_PROMPTS.value, _LIMIT.value), start=1))
    ids = launch.encode(target, _PROMPTS.value, prompts)
    if len(ids) < 2:
        raise ValueError(f"{_PROMPTS.value}: one prompt cannot be fitted and held out")
    raw = dataclasses.replace(loaded.drafter, confidence_temperatures=())
    loaded = dataclasses.replace(loaded, drafter=raw)
    options = {
        "max_new_tokens": _MAX_NEW_TOKENS.value,
        "max_len": launch.room_for(target, ids, _MAX_NEW_TOKENS.value),
        "rule": _RULE.value,
    }
    options |= launch.sampling_options(_SAMPLING)
    key = options["key"]
    with launch.progress() as report:
        results = []
        for start in range(0, len(ids), _BATCH.value):
            if report:
                report("decoding", start, len(ids))
            options["key"] = jax.random.fold_in(key, start)
            batch = ids[start : start + _BATCH.value]
            results.append(specjax.decode(target, loaded, batch, **options))
    result = DecodeResult.pooled(results)
    fitted = calibration.fit_temperatures(*cycles(result, slice(0, None, 2)))
    diagrams = diagrams_of(fitted, *cycles(result, slice(1, None, 2)))
    rows = table(fitted, diagrams)
    show(rows)
    drafter = dataclasses.replace(raw, confidence_temperatures=tuple(fitted.tolist()))
    out = pathlib.Path(_OUT.value)
    export(dataclasses.replace(loaded, drafter=drafter), target, out)
    manifest.carry_over(drafts.folder_of(_DRAFTER.value), out)
    settings = {
        "target": target.name,
        "drafter": _DRAFTER.value,
        "prompts": len(ids),
        "rule": _RULE.value,
        "max_new_tokens": _MAX_NEW_TOKENS.value,
        **{name: flag.value for name, flag in _SAMPLING.items()},
        **launch.machine(),
    }
    launch.write_json(_JSON.value, {"settings": settings, "rows": rows})
    if _PLOT.value:
        plots.reliability(_PLOT.value, diagrams)


def cycles(result: DecodeResult, prompts: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidence, accepted and drafted of all cycles of some prompts."""
    columns = result.confidence, result.accepted, result.drafted
    return tuple(np.concatenate(column[prompts]) for column in columns)


def diagrams_of(
    temperatures: np.ndarray, confidence: np.ndarray, accepted: np.ndarray, drafted: np.ndarray
) -> list[tuple[Reliability, Reliability]]:
    """Predicted against counted survival, before and after, draft by draft."""
    before, after = (
        calibration.predicted_survival(confidence, scale)
        for scale in (np.ones_like(temperatures), temperatures)
    )
    diagrams = []
    for slot in range(len(temperatures)):
        tried = drafted > slot
        survived = accepted[tried] > slot
        diagrams.append(
            tuple(calibration.reliability(x[tried, slot], survived) for x in (before, after))
        )
    return diagrams


def table(
    temperatures: np.ndarray, diagrams: list[tuple[Reliability, Reliability]]
) -> list[dict[str, Any]]:
    """The diagrams in figures, of cycles that were not fitted."""
    rows = []
    slots = zip(temperatures.tolist(), diagrams, strict=True)
    for draft, (temperature, (before, after)) in enumerate(slots, start=1):
        figures = {
            "survived": before.mean_happened,
            "predicted_before": before.mean_predicted,
            "error_before": before.error,
            "predicted_after": after.mean_predicted,
            "error_after": after.error,
        }
        rows.append(
            {
                "draft": draft,
                "cycles": int(before.count.sum()),
                "temperature": temperature,
                **dict(zip(figures, tables.listed(figures.values()), strict=True)),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    shown = Table()
    headings = ["draft", "cycles", "survived", "predicted before", "after", "error before", "after"]
    for heading in [*headings, "T"]:
        shown.add_column(heading)
    for row in rows:
        names = "survived", "predicted_before", "predicted_after", "error_before", "error_after"
        figures = ["–" if row[name] is None else f"{row[name]:.3f}" for name in names]
        shown.add_row(str(row["draft"]), str(row["cycles"]), *figures, f"{row['temperature']:.2f}")
    Console().print(shown)


if __name__ == "__main__":
    launch.run(main)
