r"""The fair fight: drafters trained on the same text for the same time, decoding the same prompts.

  python -m experiments.compare --train=configs/smollm2_draft_lm.py \
    --train=configs/smollm2_eagle3.py --train=configs/smollm2_dflash.py \
    --train=configs/smollm2_dspark.py --data=responses.jsonl --minutes=10 \
    --prompts=gsm8k.jsonl --prompts=mt-bench.jsonl --limit=4 --workdir=runs/compare

Every config names the same target, `data.sequence_length`, `data.held_out` and `features.dtype`; all
drafters read one cache of the target's features. How many steps a
drafter takes in the given time is measured first, and its learning rate is stretched to them;
compilation, caching and evaluation are not part of that time. Then `experiments.evaluate` decodes with
each drafter as long drafts as its config says, and with those of `--baseline`. `WORKDIR/report.md` and
`report.png` show what came out. The same command again goes on where it was interrupted. Every part
runs in a process of its own, one after the other, so that each has the accelerator to itself.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
import runpy
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

import specjax
from experiments import distill, drafts, launch
from specjax.distillation.steps import new_state, train_step
from specjax.distillation.trainer import place, score, set_up
from specjax.drafters import manifest
from specjax.evaluation import plots, tables
from specjax.evaluation.prompts import read_prompts
from specjax.models.target import Target

_CONFIGS = flags.DEFINE_multi_string("train", [], "A file of configs/; may be repeated.")
_DATA = flags.DEFINE_string("data", None, "Text of the target's, as for `experiments.distill`.")
_MINUTES = flags.DEFINE_float("minutes", 10.0, "Time of a drafter's steps.", lower_bound=0.01)
_BASELINES = flags.DEFINE_multi_string(
    "baseline", ["ngram"], f"A drafter beside them: {drafts.SPECS}."
)
_PROMPTS = launch.define_prompts()
_LIMIT = launch.define_limit()
_TEMPERATURES = flags.DEFINE_multi_float(
    "temperature", [0.0, 1.0], "May be repeated.", lower_bound=0.0
)
_RULE = launch.define_rule()
_MAX_NEW_TOKENS = launch.define_max_new_tokens()
_PREPARE = flags.DEFINE_bool("prepare", False, "What the first child process does.")

TIMED_STEPS = 8  # behind the one that compiles


def main() -> None:
    """Prepares, trains one after the other, evaluates, reports."""
    launch.require(
        train=_CONFIGS.value,
        data=_DATA.value,
        workdir=distill.WORKDIR.value,
        prompts=_PROMPTS.value,
    )
    if distill.CONFIG.value:
        raise ValueError("--train names the configs here, --config none")
    names = launch.require_names(
        "configs", [path.partition(":")[0] for path in _CONFIGS.value], [".py"]
    )
    launch.require_names("prompt files", _PROMPTS.value, [".jsonl"])
    if "@" in distill.WORKDIR.value:
        raise ValueError("--workdir must not have an @ in it: that ends the name of a drafter")
    workdir = pathlib.Path(distill.WORKDIR.value)
    if _PREPARE.value:
        prepare(workdir, names)
        return
    asked = identity(names)  # also reads what is in the files
    for path in _PROMPTS.value:
        read_prompts(path, _LIMIT.value)
    workdir.mkdir(parents=True, exist_ok=True)
    plan_file = workdir / "plan.json"
    if not plan_file.exists():
        child("compare", *sys.argv[1:], "--prepare")
    plan = json.loads(plan_file.read_text("utf-8"))
    check(plan, asked, plan_file)
    for path, name in zip(_CONFIGS.value, names, strict=True):
        if not manifest.name_of(workdir / name / "drafter"):
            figures = plan["drafters"][name]
            often = max(1, figures["steps"] // 20)
            child(
                "distill", f"--config={path}", f"--workdir={workdir / name}",
                *shared_options(workdir, plan["taps"]),
                f"--config.total_steps={figures['steps']}",
                f"--config.optimizer.warmup_steps={figures['warmup_steps']}",
                f"--config.optimizer.decay_steps={figures['decay_steps']}",
                f"--config.log_every={often}", f"--config.alpha_every={5 * often}",
                f"--config.save_every={5 * often}", "--config.tau_prompts=1",
            )  # fmt: skip
        if not manifest.name_of(workdir / name / "drafter"):
            raise ValueError(f"{name} was asked to end early; the same command goes on")
    folders = {
        f"{workdir / name / 'drafter'}@{plan['drafters'][name]['num_draft_tokens']}": name
        for name in names
    }
    child(
        "evaluate", f"--target={plan['target']}",
        f"--template_options={plan['template_options']}",
        *(f"--drafter={spec}" for spec in (*_BASELINES.value, *folders)),
        *(f"--prompts={path}" for path in _PROMPTS.value),
        *(f"--temperature={temperature}" for temperature in _TEMPERATURES.value),
        *([] if _LIMIT.value is None else [f"--limit={_LIMIT.value}"]),
        f"--rule={_RULE.value}", f"--max_new_tokens={_MAX_NEW_TOKENS.value}", "--parts",
        f"--json={workdir / 'evaluation.json'}",
    )  # fmt: skip
    evaluation = json.loads((workdir / "evaluation.json").read_text("utf-8"))
    rows = [
        row | {"drafter": folders.get(row["drafter"], row["drafter"])}
        for row in evaluation["rows"]
        if row["temperature"] in _TEMPERATURES.value  # an interrupted run may have had others
    ]
    curves = {name: curve(workdir / name / "metrics.jsonl") for name in names}
    report = written(plan, curves, rows, evaluation["settings"])
    (workdir / "report.md").write_text(report, "utf-8")
    plots.fight(workdir / "report.png", curves, rows)
    print(f"{report}\n{workdir / 'report.md'} and report.png")


def shared_options(workdir: pathlib.Path, taps: list[int]) -> list[str]:
    """What all configs are told: the same text, and one cache for all."""
    return [
        f"--config.data.path={_DATA.value}",
        f"--config.features.path={workdir / 'features'}",
        f"--config.features.taps={tuple(taps)}",
    ]


def child(program: str, *arguments: str) -> None:
    """Runs a program of this folder to its end; SIGTERM and Ctrl-C end it first.

    Raises:
      ValueError: it failed, its own message is on stderr, or there was a SIGTERM.
    """
    process = subprocess.Popen([sys.executable, "-m", f"experiments.{program}", *arguments])
    told = []

    def pass_on(number: int, _: Any) -> None:
        told.append(number)
        process.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if told:
        raise ValueError(f"experiments.{program} was asked to end early; the same command goes on")
    if status:
        raise ValueError(f"experiments.{program} ended with status {status}")


def read_configs(names: list[str]) -> dict[str, ConfigDict]:
    """The configs that `--train` names."""
    configs = {}
    for path, name in zip(_CONFIGS.value, names, strict=True):
        file, _, mode = path.partition(":")
        configs[name] = runpy.run_path(file)["get_config"](mode)
    return configs


def identity(names: list[str]) -> dict[str, Any]:
    """What a plan is made for: files with a hash of what is in them, and the time."""
    configs = read_configs(names)
    with pathlib.Path(_DATA.value).open("rb") as file:
        text = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "configs": {
            path: hashlib.sha256(configs[name].to_json(sort_keys=True).encode()).hexdigest()[:16]
            for path, name in zip(_CONFIGS.value, names, strict=True)
        },
        "data": {_DATA.value: text[:16]},
        "minutes": _MINUTES.value,
    }


def check(plan: dict[str, Any], asked: dict[str, Any], path: pathlib.Path) -> None:
    """Raises ValueError where a work directory holds a fight of another kind."""
    other = [name for name in asked if plan[name] != asked[name]]
    if other:
        differ = ", ".join(f"{name} {plan[name]} (now {asked[name]})" for name in other)
        raise ValueError(f"{path} is of {differ}: give these again, or another --workdir")


def prepare(workdir: pathlib.Path, names: list[str]) -> None:
    """Writes the features and the plan: how many steps of each drafter fill the time."""
    plan = identity(names)
    configs = read_configs(names)
    for config in configs.values():
        config.data.path = _DATA.value
        config.features.path = str(workdir / "features")
    targets = {
        (config.target, config.data.template_options.to_json(sort_keys=True))
        for config in configs.values()
    }
    if len(targets) > 1:
        told = "; ".join(" with template options ".join(pair) for pair in sorted(targets))
        raise ValueError(f"the configs are for several targets: {told}")
    texts = {
        (config.data.sequence_length, config.data.held_out, config.features.dtype)
        for config in configs.values()
    }
    if len(texts) > 1:
        raise ValueError(
            "one cache of features serves all configs, but their data.sequence_length, data.held_out "
            f"and features.dtype are {' and '.join(map(str, sorted(texts)))}"
        )
    name_of_target, template_options = targets.pop()
    target = launch.load_target(name_of_target, json.loads(template_options))
    baselines = [drafts.load_drafter(spec, target, None, []) for spec in _BASELINES.value]
    if None in baselines:
        raise ValueError("--baseline=none: plain decoding is measured in any case")
    examples = {name: distill.read(config, target)[0] for name, config in configs.items()}
    loaded = {
        name: distill.first_drafter(config, target, examples[name])
        for name, config in configs.items()
    }
    taps = sorted({tap for drafter in loaded.values() for tap in drafter.drafter.taps})
    rehearse(target, [*baselines, *loaded.values()])
    drafters = {}
    for name, config in configs.items():
        config.features.taps = tuple(taps)
        seconds = seconds_a_step(config, target, loaded[name], examples[name])
        sizes = jax.tree.map(np.size, loaded[name].params)
        steps = max(1, round(60 * _MINUTES.value / seconds))
        drafters[name] = {
            "parameters": int(sum(jax.tree.leaves(sizes))),
            "seconds_a_step": seconds,
            "steps": steps,
            "num_draft_tokens": loaded[name].drafter.num_draft_tokens,
            # The shares of the run that the config gives them; a decay of 0 would be one of all.
            "warmup_steps": config.optimizer.warmup_steps * steps // config.total_steps,
            "decay_steps": -(-config.optimizer.decay_steps * steps // config.total_steps),
        }
        print(f"{name}: {seconds:.2f} s a step, {drafters[name]['steps']} steps", flush=True)
    plan |= {
        "target": name_of_target,
        "template_options": template_options,
        "taps": taps,
        "drafters": drafters,
    }
    launch.write_json(str(workdir / "plan.json"), plan)


def rehearse(target: Target, drafters: list[Any]) -> None:
    """Raises before the training what the evaluation behind it would raise."""
    for path in _PROMPTS.value:
        prompts = dict(enumerate(read_prompts(path, _LIMIT.value), start=1))
        launch.room_for(target, launch.encode(target, path, prompts), _MAX_NEW_TOKENS.value)
    for drafter in drafters:
        specjax.decode(
            target, drafter, [[0, 0]], max_new_tokens=min(_MAX_NEW_TOKENS.value, 1),
            temperature=max(_TEMPERATURES.value), rule=_RULE.value, key=jax.random.key(0),
        )  # fmt: skip


def seconds_a_step(config: ConfigDict, target: Target, loaded: Any, examples: list[Any]) -> float:
    """The mean of a few training steps, the first of which is left out, since it compiles."""
    mesh, recipe, _ = set_up(config.to_dict(), target, loaded)
    state = new_state(recipe, loaded.params, config.seed, mesh)
    batches = iter(distill.batches(config, target, loaded, examples))
    for step, batch in enumerate(itertools.islice(batches, 1 + TIMED_STEPS)):
        if step == 1:
            started = time.perf_counter()
        placed = place(mesh, batch, config.accumulate)
        state, means = train_step(recipe, state, target.params, placed)
        float(means["loss"])
    return (time.perf_counter() - started) / TIMED_STEPS


def curve(path: pathlib.Path) -> list[dict[str, float]]:
    """Held-out figures of a run, with the minutes that its steps had taken."""
    points, seconds = [], 0.0
    for line in path.read_text("utf-8").splitlines():
        told = json.loads(line)
        seconds += told.get("seconds", 0.0)
        if "held_out/alpha_1" in told:
            points.append(told | {"minutes": seconds / 60})
    return points


def written(
    plan: dict[str, Any],
    curves: dict[str, list[dict[str, float]]],
    rows: list[dict[str, Any]],
    settings: dict[str, Any],
) -> str:
    """The report."""
    trained = []
    for name, figures in plan["drafters"].items():
        # The weights that are decoded with, as the trainer chose them.
        best = max(curves[name], key=lambda point: score(point, figures["num_draft_tokens"]))
        trained.append(
            [
                name,
                f"{figures['parameters'] / 1e6:.1f}",
                str(figures["steps"]),
                f"{curves[name][-1]['minutes']:.1f}",
                str(best["step"]),
                f"{best['replayed/alpha_1']:.3f}",
                f"{best['replayed/tau']:.2f}",
            ]
        )
    headings = [
        "drafter", "parameters, M", "steps", "minutes", "best step", "its replayed α_1", "replayed τ",
    ]  # fmt: skip
    return "\n".join(
        [
            f"# {len(trained)} drafters for {plan['target']}, {plan['minutes']:g} minutes each",
            "",
            f"`{launch.command()}`",
            "",
            tables.markdown(headings, trained),
            "Decoding, batch 1: τ and speed-up over plain decoding, with where they lie in 95 of 100 "
            "draws of as many prompts.",
            "",
            tables.markdown(*main_table(rows)),
            f"{settings['device']}, jax {settings['jax']}; rule above temperature 0: "
            f"`{settings['rule']}`. `evaluation.json` holds all figures.",
            "",
        ]
    )


def main_table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """A line for every drafter and temperature, with τ and speed-up on every set of prompts."""
    files = list(dict.fromkeys(row["prompts"] for row in rows))
    lines = []
    for temperature, drafter in itertools.product(
        dict.fromkeys(row["temperature"] for row in rows),
        dict.fromkeys(row["drafter"] for row in rows),
    ):
        own = {
            row["prompts"]: row
            for row in rows
            if (row["temperature"], row["drafter"]) == (temperature, drafter)
        }
        k = str(own[files[0]]["num_draft_tokens"])
        told = [
            tables.within(own[file], figure, unit)
            for file in files
            for figure, unit in (("tau", ""), ("speedup", "×"))
        ]
        answers = {own[file]["identical"] for file in files}
        lines.append(
            [f"{temperature:g}", drafter, k, *told, " / ".join(map(str, answers - {None}))]
        )
    headings = [f"{file}: {figure}" for file in files for figure in ("τ", "speed-up")]
    return ["T", "drafter", "K", *headings, "identical"], lines


if __name__ == "__main__":
    launch.run(main)
