r"""Measures drafters on prompt files, each against plain decoding of the same prompts.

  python -m experiments.evaluate --target=smollm2 --drafter=ngram --drafter=early_exit:20 \
    --prompts=gsm8k.jsonl --limit=10 --json=results.json --markdown=results.md --plot=results.png

`--target`, `--drafter`, `--prompts`, `--temperature`, `--batch` and `--num_draft_tokens` may be
repeated: every combination is measured. `--drafter=eagle3:FOLDER@6` and
`--drafter=eagle3:FOLDER@dynamic,32,7,8` draft a chain of 6 and a tree, whatever
`--num_draft_tokens` and `--tree` say to the others. `--drafter=dspark:FOLDER@7+scheduler` drafts 7 and
lets the prefix scheduler decide in every cycle how many of them are verified, from what cycles of every
width take here; `+confidence:0.5` verifies those before the first that is less sure, `+fixed:3` three.

A prompt file has one `{"turns": ["…"]}` a line; with `--turns=2` a second turn follows plain
decoding's answer to the first. With `--parts` a plain step, a draft and a verification are timed too,
and say which speed-up they predict. With `--json` the same command again goes on behind what the file
holds. With `--peer`, Hugging Face `transformers` decodes the same prompts in turn, plainly, by prompt
lookup (`ngram`) and assisted (`draft_lm`), in a process that needs memory for a second copy of the
models.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console

from experiments import drafts, launch
from specjax.decoding.controllers import Optimal, PrefixScheduler
from specjax.drafters.draft_lm import DraftLM
from specjax.evaluation import kinds, plots, tables
from specjax.evaluation.benchmark import costs
from specjax.evaluation.identity import worst
from specjax.evaluation.peer import Peer, transformers_peer
from specjax.evaluation.prompts import read_conversations
from specjax.evaluation.runner import (
    Evaluation,
    evaluate_turns,
    peer_tokens_per_second,
    turns_room,
)
from specjax.evaluation.speedup import Costs
from specjax.models.target import Target, target_hash, weights_hash
from specjax.models.tokenizer import fingerprint
from specjax.types import Controller, Drafter, LoadedDrafter, drafter_and_params
from specjax.verification import RULES, greedy

_TARGETS = flags.DEFINE_multi_string("target", [], f"{launch.TARGETS} May be repeated.")
_DRAFTERS = flags.DEFINE_multi_string(
    "drafter", ["ngram"], f"{drafts.CONTROLLED_SPECS}; may be repeated."
)
_PROMPTS = flags.DEFINE_multi_string("prompts", [], "A prompt file; may be repeated.")
_LIMIT = flags.DEFINE_integer("limit", None, "Prompts a file; all by default.", lower_bound=1)
_TURNS = flags.DEFINE_integer("turns", 1, "Turns of a conversation, at most.", lower_bound=1)
_MAX_PROMPT_TOKENS = flags.DEFINE_integer(
    "max_prompt_tokens", None, "Leave longer prompts out.", lower_bound=1
)
_NUM_DRAFT_TOKENS = flags.DEFINE_multi_integer(
    "num_draft_tokens", [], f"{drafts.NUM_DRAFT_TOKENS} May be repeated."
)
_TREE = drafts.define_tree()
_RULE = launch.define_rule()
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Longest answer, in tokens.")
_SAMPLING = launch.define_sampling(several_temperatures=True)
_BATCH = flags.DEFINE_multi_integer(
    "batch", [1], "Prompts decoded together; may be repeated.", lower_bound=1
)
_PARTS = flags.DEFINE_bool("parts", False, "Time the parts of a cycle, and predict from them.")
_PEER = flags.DEFINE_bool(
    "peer", False, "Let `transformers` decode the same prompts in turn (needs the extra `parity`)."
)
_JSON = launch.define_json()
_MARKDOWN = flags.DEFINE_string("markdown", None, "File to write the table to.")
_PLOT = launch.define_plot()
_ACCEPTANCE_PLOT = launch.define_plot(
    "acceptance_plot", "PNG file of acceptance by position and by kind of token."
)

Drafters = dict[str, Drafter | LoadedDrafter | None]


def main() -> None:
    """Evaluates target after target, prints and writes what is there after every file of prompts."""
    launch.require(target=_TARGETS.value, prompts=_PROMPTS.value)
    for path in (_JSON.value, _MARKDOWN.value, _PLOT.value, _ACCEPTANCE_PLOT.value):
        launch.check_writable(path)
    files = {path: read_conversations(path, _LIMIT.value) for path in _PROMPTS.value}
    for what, names in (
        ("prompt files", [pathlib.Path(path).name for path in _PROMPTS.value]),
        ("targets", [pathlib.Path(path).name for path in _TARGETS.value]),
    ):
        if len(set(names)) < len(names):
            raise ValueError(f"the {what} {', '.join(names)} cannot be told apart by their names")
    results = Results(_JSON.value, settings(files))
    for source in _TARGETS.value:
        evaluate_target(source, files, results)
    headings, lines = tables.cells(results.rows)
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a file has room for the whole table
    console.print(tables.rich_table(headings, lines))
    if _MARKDOWN.value:
        text = tables.markdown(headings, lines) + f"\n`{launch.command()}`\n"
        pathlib.Path(_MARKDOWN.value).write_text(text, "utf-8")
    if _PLOT.value:
        plots.evaluation(_PLOT.value, results.rows)
    if _ACCEPTANCE_PLOT.value:
        plots.acceptance(_ACCEPTANCE_PLOT.value, by_position_and_kind(results.rows))


class Results:
    """The rows so far, and the file that keeps them."""

    def __init__(self, path: str | None, settings: dict[str, Any]):
        self._path, self._settings, self.rows = path, settings, []
        if not path or not pathlib.Path(path).stat().st_size:
            return
        try:
            then = json.loads(pathlib.Path(path).read_text("utf-8"))
            before, self.rows = then["settings"], then["rows"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} holds no results of this program; name another") from None
        self._compare(before)

    def _compare(self, before: Mapping[str, Any]) -> None:
        other = [
            name
            for name in before.keys() | self._settings.keys()
            if before.get(name) != self._settings.get(name)
        ]
        if other:
            differ = ", ".join(
                f"{name} {before.get(name)} (now {self._settings.get(name)})"
                for name in sorted(other)
            )
            raise ValueError(
                f"{self._path} holds results with {differ}: give these again, or another --json"
            )

    def identify(self, name: str, identity: dict[str, Any]) -> None:
        """Tells what a target is, and refuses rows that were of another of that name."""
        known = [row["identity"] for row in self.rows if row["target"] == name]
        for then in known:
            for key, value in identity.items():
                if then.get(key) not in (None, value):
                    raise ValueError(
                        f"{self._path} holds results of {name} with {key} {then[key]}, now it is "
                        f"{value}: give another --json"
                    )

    def has(self, **cell: Any) -> bool:
        """Whether there are rows of a target, batch, temperature and file."""
        return any(all(row[key] == value for key, value in cell.items()) for row in self.rows)

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Adds the rows of a file of prompts, and writes."""
        self.rows += rows
        launch.write_json(self._path, {"settings": self._settings, "rows": self.rows})


def settings(files: Mapping[str, list[list[str]]]) -> dict[str, Any]:
    """What figures depend on, up to what targets and drafters turn out to be."""
    return {
        "prompts": {
            pathlib.Path(path).name: hashlib.sha256(json.dumps(read).encode()).hexdigest()[:16]
            for path, read in files.items()
        },
        "turns": _TURNS.value,
        "max_prompt_tokens": _MAX_PROMPT_TOKENS.value,
        "max_new_tokens": _MAX_NEW_TOKENS.value,
        "rule": _RULE.value,
        "tree": _TREE.value,
        "drafters": drafts.with_lengths(_DRAFTERS.value, _NUM_DRAFT_TOKENS.value),
        **{name: flag.value for name, flag in _SAMPLING.items() if name != "temperature"},
        **launch.machine(),
    }


def evaluate_target(source: str, files: Mapping[str, list[list[str]]], results: Results) -> None:
    """Everything that is asked of one target and not there yet."""
    target = launch.load_target(source)
    files = {path: fitting(target, path, read) for path, read in files.items()}
    specs = drafts.with_lengths(_DRAFTERS.value, _NUM_DRAFT_TOKENS.value)
    lengths = _NUM_DRAFT_TOKENS.value if len(_NUM_DRAFT_TOKENS.value) == 1 else [None]
    drafters: Drafters = {
        spec: drafts.load_drafter(spec, target, lengths[0], _TREE.value, controlled=True)
        for spec in specs
    }
    if None in drafters.values():
        raise ValueError("--drafter=none: plain decoding is measured beside every drafter anyway")
    identity = {"target_hash": target_hash(target), "dtype": target.dtype.name}
    if target.tokenizer:
        identity |= fingerprint(target.tokenizer)
    identity |= {
        f"hash of {spec}": weights_hash(repr(drafter), params)
        for spec, (drafter, params) in (
            (spec, drafter_and_params(loaded)) for spec, loaded in drafters.items()
        )
    }
    results.identify(target.name, identity)
    # The same for all files: every drafter is compiled once.
    size = max(
        named(path, turns_room, target, read, _TURNS.value, _MAX_NEW_TOKENS.value)
        for path, read in files.items()
    )
    with start_peer(target, drafters) as peer:
        for batch in _BATCH.value:
            for temperature in _SAMPLING["temperature"].value:
                cell = {"target": target.name, "batch": batch, "temperature": temperature}
                left = {
                    path: read
                    for path, read in files.items()
                    if not results.has(**cell, prompts=pathlib.Path(path).name)
                }
                if not left:
                    continue
                sampling = launch.sampling_options(_SAMPLING) | {"temperature": temperature}
                controllers = {
                    spec: drafts.load_controller(
                        spec, target, drafter, batch, size, _RULE.value, sampling
                    )
                    for spec, drafter in drafters.items()
                }
                parts = {
                    spec: parts_of(target, drafter, controllers[spec], batch, sampling)
                    for spec, drafter in drafters.items()
                }
                for path, read in left.items():
                    with launch.progress() as report:
                        measured = evaluate_turns(
                            target, drafters, read, turns=_TURNS.value, batch=batch,
                            controllers=controllers, peer=peer, progress=report, max_len=size,
                            max_new_tokens=_MAX_NEW_TOKENS.value, rule=_RULE.value, **sampling,
                        )  # fmt: skip
                    told = cell | {"prompts": pathlib.Path(path).name, "num_prompts": len(read)}
                    results.add(
                        [
                            told
                            | {"drafter": spec}
                            | figures(result, parts[spec], controllers[spec])
                            | {"identity": identity}
                            for spec, result in measured.items()
                        ]
                    )


def by_position_and_kind(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What `plots.acceptance` draws of rows."""
    told = {}
    for row in rows:
        name = f"{row['drafter']}, {pathlib.Path(row['prompts']).stem}"
        name += f" (T {row['temperature']:g}, B {row['batch']}, {row['target']})"
        counts = {
            kind: kinds.Acceptance(count["accepted"], count["tried"], count["committed"])
            for kind, count in (row["kinds"] or {}).items()
        }
        told[name] = np.array(row["alpha"], float), np.array(row["survival"], float), counts
    return told


def named(path: str, function: Any, *arguments: Any) -> Any:
    """What a function of a file's prompts returns; its errors begin with the file's name."""
    try:
        return function(*arguments)
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from None


def fitting(target: Target, path: str, read: list[list[str]]) -> list[list[str]]:
    """The conversations whose first turn is no longer than `--max_prompt_tokens`.

    Raises:
      ValueError: there is none, or one that cannot be used.
    """
    texts = {number: turns[0] for number, turns in enumerate(read, start=1)}
    ids = launch.encode(target, path, "prompt", texts)
    longest = _MAX_PROMPT_TOKENS.value
    kept = [
        turns
        for turns, row in zip(read, ids, strict=True)
        if longest is None or len(row) <= longest
    ]
    if not kept:
        raise ValueError(
            f"{path}: all {len(read)} prompts are longer than --max_prompt_tokens={longest}; the "
            f"shortest has {min(map(len, ids))} tokens"
        )
    if len(kept) < len(read):
        print(f"{path}: {len(read) - len(kept)} of {len(read)} prompts are longer than {longest}")
    return kept


def parts_of(
    target: Target,
    loaded: Drafter | LoadedDrafter,
    controller: Controller | None,
    batch: int,
    sampling: Mapping[str, Any],
) -> Costs | None:
    """What the parts of a cycle take, where that is asked and the same in every cycle."""
    if not _PARTS.value or controller is not None:
        return None
    drafter, params = drafter_and_params(loaded)
    rule = RULES[_RULE.value] if sampling["temperature"] else greedy
    filters = {name: sampling[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    steps = 12
    room = 64 + steps * (drafter.num_draft_tokens + 1)
    return costs(
        target, drafter, params, rule, batch=batch, max_len=room, steps=steps, repeats=3, **filters
    )


def start_peer(
    target: Target, drafters: Drafters
) -> contextlib.AbstractContextManager[Peer | None]:
    """The `transformers` process, where it is wanted."""
    if not _PEER.value:
        return contextlib.nullcontext()
    if any(_SAMPLING["temperature"].value):
        raise ValueError("--peer compares at temperature 0 only")
    if jax.default_backend() != "cpu" or target.dtype != np.float32:
        raise ValueError("--peer compares in float32 on a CPU only")
    pairs = [drafter_and_params(drafter) for drafter in drafters.values()]
    models = [
        Target("assistant", drafter.config, params)
        for drafter, params in pairs
        if isinstance(drafter, DraftLM)
    ]
    if len(models) > 1:
        raise ValueError("--peer takes one draft_lm at a time")
    return transformers_peer(target, *models)


def figures(
    result: Evaluation, parts: Costs | None, controller: Controller | None
) -> dict[str, Any]:
    """One row of the table."""
    predicted = None if parts is None else result.predicted_speedup(parts)
    spent = {"draft_ms": None, "verify_ms": None, "plain_ms": None, "overhead_ms": None}
    if parts is not None:
        drafting = result.drafting_share
        verify = drafting * parts.verify + (1 - drafting) * parts.plain
        overhead = result.cycle_seconds - parts.draft - verify
        seconds = (parts.draft, verify, parts.plain, overhead)
        spent = dict(zip(spent, (1e3 * x for x in seconds), strict=True))
    return {
        "num_draft_tokens": result.num_draft_tokens,
        "tau": result.tau,
        "tau_interval": launch.listed(result.tau_interval),
        "tau_of_prompts": result.tau_of_prompts,
        "tau_of_prompts_interval": launch.listed(result.tau_of_prompts_interval),
        "alpha": launch.listed(result.alpha),
        "survival": launch.listed(result.survival),
        "accepted_share": launch.listed([result.accepted_share])[0],
        "passes_per_token": result.passes_per_token,
        "plain_tokens_per_second": result.plain_tokens_per_second,
        "speculative_tokens_per_second": result.speculative_tokens_per_second,
        "speedup": result.speedup,
        "speedup_interval": launch.listed(result.speedup_interval),
        "predicted_speedup": predicted,
        "prediction_error": None if predicted is None else predicted / result.speedup - 1,
        "cycle_ms": 1e3 * result.cycle_seconds,
        **spent,
        "compile_seconds": result.compile_seconds,
        "identical": worst(result.identical) if result.identical else None,
        "peer_plain_tokens_per_second": peer_tokens_per_second(result.peer_plain),
        "times_peer_plain": result.times_peer_plain,
        "peer_speculative_tokens_per_second": peer_tokens_per_second(result.peer_speculative),
        "times_peer_speculative": result.times_peer_speculative,
        "controller_cycle_seconds": cycle_costs(controller),
        "kinds": kinds_of(result),
    }


def kinds_of(result: Evaluation) -> dict[str, Any] | None:
    """Acceptance by kind of token, where there is a tokenizer to tell it."""
    if result.speculative[0].tokenizer is None:
        return None
    return kinds.figures(kinds.acceptance(result.speculative))


def cycle_costs(controller: Controller | None) -> dict[str, float] | None:
    """What a controller was told that cycles cost, by width."""
    if not isinstance(controller, PrefixScheduler | Optimal):
        return None
    pairs: Sequence[tuple[float, float]] = list(
        zip(controller.widths.tolist(), controller.seconds.tolist(), strict=True)
    )
    return {f"{width:g}": seconds for width, seconds in pairs}


if __name__ == "__main__":
    launch.run(main)
