r"""Measures drafters on prompt files, each against plain decoding of the same prompts.

  python -m experiments.evaluate --target=smollm2 --drafter=ngram --drafter=early_exit:20 \
    --prompts=gsm8k.jsonl --limit=10 --json=results.json --markdown=results.md --plot=results.png

`--target`, `--drafter`, `--prompts`, `--temperature`, `--batch` and `--num_draft_tokens` may be
repeated: every combination is measured. `--drafter=eagle3:FOLDER@6` and
`--drafter=eagle3:FOLDER@dynamic,32,7,8` draft a chain of 6 and a tree, whatever
`--num_draft_tokens` and `--tree` say to the others. `--drafter=dspark:FOLDER@7+scheduler` drafts 7 and
lets the prefix scheduler decide in every cycle how many of them are verified, from what cycles of every
width take here; `+confidence:0.5` verifies those before the first that is less sure, `+fixed:3` three.

A prompt file has one `{"turns": ["…"]}` or `{"prompt": "…"}` a line; with `--turns=2` a second turn
follows plain decoding's answer to the first. With `--parts` a plain step, a draft and a verification
are timed too, and say which speed-up they predict; a cycle's pass is a verification or, without a
draft, a plain step.
With `--json` the same command again goes on behind what the file holds. With `--peer`, Hugging Face
`transformers` decodes the same prompts in turn, plainly, by prompt lookup (`ngram`) and assisted
(`draft_lm`), in a process that needs memory for a second copy of the models.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console

from experiments import drafts, launch
from experiments.results import Results
from specjax.decoding.controllers import Optimal, PrefixScheduler
from specjax.drafters.draft_lm import DraftLM
from specjax.evaluation import plots, tables
from specjax.evaluation.benchmark import costs
from specjax.evaluation.peer import Peer, transformers_peer
from specjax.evaluation.prompts import read_conversations
from specjax.evaluation.runner import evaluate_turns, turns_room
from specjax.evaluation.speedup import Costs
from specjax.evaluation.tables import figures
from specjax.models.target import Target, target_hash, weights_hash
from specjax.models.tokenizer import fingerprint
from specjax.types import Controller, Drafter, LoadedDrafter, drafter_and_params
from specjax.verification import RULES, greedy

_TARGETS = flags.DEFINE_multi_string("target", [], f"{launch.TARGETS} May be repeated.")
_TEMPLATE_OPTIONS = launch.define_template_options()
_DRAFTERS = flags.DEFINE_multi_string(
    "drafter", ["ngram"], f"{drafts.CONTROLLED_SPECS}; may be repeated."
)
_PROMPTS = launch.define_prompts()
_LIMIT = launch.define_limit()
_TURNS = flags.DEFINE_integer("turns", 1, "Turns of a conversation, at most.", lower_bound=1)
_MAX_PROMPT_TOKENS = flags.DEFINE_integer(
    "max_prompt_tokens", None, "Leave longer prompts out.", lower_bound=1
)
_NUM_DRAFT_TOKENS = flags.DEFINE_multi_integer(
    "num_draft_tokens", [], f"{drafts.NUM_DRAFT_TOKENS} May be repeated."
)
_TREE = drafts.define_tree()
_RULE = launch.define_rule()
_MAX_NEW_TOKENS = launch.define_max_new_tokens()
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

Files = Mapping[str, Mapping[int, list[str]]]  # conversations by number, by file


def main() -> None:
    """Evaluates target after target, writing figures after every file; then prints and draws."""
    launch.require(target=_TARGETS.value, prompts=_PROMPTS.value)
    for path in (_JSON.value, _MARKDOWN.value, _PLOT.value, _ACCEPTANCE_PLOT.value):
        launch.check_writable(path)
    if _TREE.value and _NUM_DRAFT_TOKENS.value:
        raise ValueError("give either --num_draft_tokens or --tree")
    launch.require_names("targets", _TARGETS.value, [".gguf"])
    names = launch.require_names("prompt files", _PROMPTS.value, [".jsonl"])
    files = {
        name: dict(enumerate(read_conversations(path, _LIMIT.value), start=1))
        for name, path in zip(names, _PROMPTS.value, strict=True)
    }
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
        plots.acceptance(_ACCEPTANCE_PLOT.value, tables.by_position_and_kind(results.rows))


def settings(files: Files) -> dict[str, Any]:
    """What figures depend on, up to what targets and drafters turn out to be."""
    return {
        "prompts": {
            name: hashlib.sha256(json.dumps(read).encode()).hexdigest()[:16]
            for name, read in files.items()
        },
        "template_options": _TEMPLATE_OPTIONS.value,
        "turns": _TURNS.value,
        "max_prompt_tokens": _MAX_PROMPT_TOKENS.value,
        "max_new_tokens": _MAX_NEW_TOKENS.value,
        "rule": _RULE.value,
        "tree": _TREE.value,
        "drafters": drafts.with_lengths(_DRAFTERS.value, _NUM_DRAFT_TOKENS.value),
        "parts": _PARTS.value,
        "peer": _PEER.value,
        **{name: flag.value for name, flag in _SAMPLING.items() if name != "temperature"},
        **launch.machine(),
    }


def evaluate_target(source: str, files: Files, results: Results) -> None:
    """Everything that is asked of one target and not there yet."""
    target = launch.load_target(source, _TEMPLATE_OPTIONS.value)
    files = {name: fitting(target, name, read) for name, read in files.items()}
    length = _NUM_DRAFT_TOKENS.value[0] if len(_NUM_DRAFT_TOKENS.value) == 1 else None
    drafters = {
        spec: drafts.load_drafter(spec, target, length, _TREE.value, controlled=True)
        for spec in drafts.with_lengths(_DRAFTERS.value, _NUM_DRAFT_TOKENS.value)
    }
    if None in drafters.values():
        raise ValueError("--drafter=none: plain decoding is measured beside every drafter anyway")
    identity = {"target_hash": target_hash(target), "dtype": target.dtype.name}
    identity |= fingerprint(target.tokenizer)
    for spec, loaded in drafters.items():
        drafter, params = drafter_and_params(loaded)
        identity[f"hash of {spec}"] = weights_hash(repr(drafter), params)
    results.check_identity(target.name, identity)
    # The same for all files: every drafter is compiled once.
    size = max(room(target, name, read) for name, read in files.items())
    cells = itertools.product(_BATCH.value, _SAMPLING["temperature"].value)
    with contextlib.ExitStack() as stack:
        peer = None
        for batch, temperature in cells:
            cell = {"target": target.name, "batch": batch, "temperature": temperature}
            left = [name for name in files if not results.has(**cell, prompts=name)]
            if not left:
                continue
            if peer is None:
                peer = stack.enter_context(start_peer(target, drafters))
            sampling = launch.sampling_options(_SAMPLING) | {"temperature": temperature}
            controllers_of = functools.cache(
                functools.partial(load_controllers, target, drafters, size, sampling)
            )
            timed = functools.cache(functools.partial(costs_of, target, size, sampling))
            for name in left:
                conversations = list(files[name].values())
                controllers = controllers_of(min(batch, len(conversations)))
                with launch.progress() as report:
                    measured = evaluate_turns(
                        target, drafters, conversations, turns=_TURNS.value, batch=batch,
                        controllers=controllers, peer=peer, progress=report, max_len=size,
                        max_new_tokens=_MAX_NEW_TOKENS.value, rule=_RULE.value, **sampling,
                    )  # fmt: skip
                told = cell | {"prompts": name, "num_prompts": len(conversations)}
                rows = []
                for spec, result in measured.items():
                    rows_a_batch = result.rows_a_batch
                    known = _PARTS.value and controllers[spec] is None and rows_a_batch
                    parts = timed(drafters[spec], rows_a_batch) if known else None
                    row = told | {"drafter": spec} | figures(result, parts)
                    row["controller_cycle_seconds"] = told_costs(controllers[spec])
                    rows.append(row | {"identity": identity})
                if _PARTS.value and not all(x.rows_a_batch for x in measured.values()):
                    print(f"{name}: batches of several sizes: their parts are not timed")
                results.add(rows)


def load_controllers(
    target: Target,
    drafters: Mapping[str, Drafter | LoadedDrafter],
    max_len: int,
    sampling: Mapping[str, Any],
    batch: int,
) -> dict[str, Controller | None]:
    """The controllers that drafters are named with, for batches of this size."""
    return {
        spec: drafts.load_controller(spec, target, drafter, batch, max_len, _RULE.value, sampling)
        for spec, drafter in drafters.items()
    }


def room(target: Target, name: str, read: Mapping[int, Sequence[str]]) -> int:
    """Rows of a cache for a file of conversations; an error begins with the file's name."""
    try:
        return turns_room(target, read, _TURNS.value, _MAX_NEW_TOKENS.value)
    except ValueError as error:
        raise ValueError(f"{name}, {error}") from None


def fitting(target: Target, name: str, read: Mapping[int, list[str]]) -> Mapping[int, list[str]]:
    """The conversations whose first turn is no longer than `--max_prompt_tokens`.

    Raises:
      ValueError: there is none, or one that cannot be used.
    """
    longest = _MAX_PROMPT_TOKENS.value
    texts = {number: turns[0] for number, turns in read.items()}
    ids = launch.encode(target, name, texts, fitting=longest is None)
    lengths = dict(zip(texts, map(len, ids), strict=True))
    kept = {
        number: turns
        for number, turns in read.items()
        if longest is None or lengths[number] <= longest
    }
    if not kept:
        raise ValueError(
            f"{name}: all {len(read)} prompts are longer than --max_prompt_tokens={longest}; the "
            f"shortest has {min(lengths.values())} tokens"
        )
    if len(kept) < len(read):
        print(f"{name}: {len(read) - len(kept)} of {len(read)} prompts are longer than {longest}")
    return kept


def costs_of(
    target: Target,
    max_len: int,
    sampling: Mapping[str, Any],
    loaded: Drafter | LoadedDrafter,
    batch: int,
) -> Costs:
    """What the parts of a cycle take."""
    rule = RULES[_RULE.value] if sampling["temperature"] else greedy
    filters = {name: sampling[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    pair = {"": drafter_and_params(loaded)}
    return costs(target, pair, rule, batch=batch, max_len=max_len, **filters)[""]


def told_costs(controller: Controller | None) -> dict[str, float] | None:
    """What a controller was told that cycles take, by width."""
    if not isinstance(controller, PrefixScheduler | Optimal):
        return None
    pairs = zip(controller.widths.tolist(), controller.seconds.tolist(), strict=True)
    return {f"{width:g}": seconds for width, seconds in pairs}


def start_peer(
    target: Target, drafters: Mapping[str, Drafter | LoadedDrafter | None]
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


if __name__ == "__main__":
    launch.run(main)
