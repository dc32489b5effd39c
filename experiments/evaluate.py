r"""Measures drafters on prompt files, each against plain decoding of the same prompts.

  python -m experiments.evaluate --target=smollm2 --drafter=ngram --drafter=early_exit:20 \
    --prompts=gsm8k.jsonl --limit=10 --json=results.json

`--drafter=eagle3:FOLDER@6` and `--drafter=eagle3:FOLDER@dynamic,32,7,8` draft a chain of 6 and a tree,
whatever `--num_draft_tokens` and `--tree` say to the others. `--drafter=dspark:FOLDER@7+scheduler`
drafts 7 and lets the prefix scheduler decide in every cycle how many of them are verified, from what
cycles of every width take here; `+confidence:0.5` verifies those before the first that is less sure,
`+fixed:3` three.

A prompt file has one `{"turns": ["…"]}` a line; the first turn is used. With `--peer`, Hugging Face
`transformers` decodes the same prompts in turn, plainly, by prompt lookup (`ngram`) and assisted
(`draft_lm`), in a process that needs memory for a second copy of the models.
"""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from experiments import drafts, launch
from specjax.decoding.controllers import Optimal, PrefixScheduler
from specjax.drafters.draft_lm import DraftLM
from specjax.evaluation.identity import worst
from specjax.evaluation.peer import Peer, transformers_peer
from specjax.evaluation.prompts import read_prompts
from specjax.evaluation.runner import Evaluation, evaluate, peer_tokens_per_second
from specjax.models.target import Target
from specjax.types import drafter_and_params

_TARGET = launch.define_target()
_DRAFTERS = flags.DEFINE_multi_string(
    "drafter", ["ngram"], f"{drafts.CONTROLLED_SPECS}; may be repeated."
)
_PROMPTS = flags.DEFINE_multi_string("prompts", [], "A prompt file; may be repeated.")
_LIMIT = flags.DEFINE_integer("limit", None, "Prompts a file; all by default.", lower_bound=1)
_NUM_DRAFT_TOKENS = drafts.define_num_draft_tokens()
_TREE = drafts.define_tree()
_RULE = launch.define_rule()
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 128, "Longest answer, in tokens.")
_SAMPLING = launch.define_sampling()
_BATCH = flags.DEFINE_integer("batch", 1, "Prompts decoded together.", lower_bound=1)
_PEER = flags.DEFINE_bool(
    "peer", False, "Let `transformers` decode the same prompts in turn (needs the extra `parity`)."
)
_JSON = launch.define_json()


def main() -> None:
    """Loads everything, evaluates file after file, prints the table, writes."""
    launch.require(target=_TARGET.value, prompts=_PROMPTS.value)
    launch.check_writable(_JSON.value)
    files = {path: read_prompts(path, _LIMIT.value) for path in _PROMPTS.value}
    target = launch.load_target(_TARGET.value)
    drafters = {
        spec: drafts.load_drafter(
            spec, target, _NUM_DRAFT_TOKENS.value, _TREE.value, controlled=True
        )
        for spec in _DRAFTERS.value
    }
    if None in drafters.values():
        raise ValueError("--drafter=none: plain decoding is measured beside every drafter anyway")
    encoded = {
        path: launch.encode(target, path, "prompt", dict(enumerate(texts, start=1)))
        for path, texts in files.items()
    }
    sampling = launch.sampling_options(_SAMPLING)
    # The same for all files: every drafter is compiled once.
    size = max(
        launch.room_for(target, prompts, _MAX_NEW_TOKENS.value) for prompts in encoded.values()
    )
    controllers = {
        spec: drafts.load_controller(
            spec, target, drafter, _BATCH.value, size, _RULE.value, sampling
        )
        for spec, drafter in drafters.items()
    }
    rows = []
    with start_peer(target, drafters) as peer:
        for path, prompts in encoded.items():
            with launch.progress() as report:
                results = evaluate(
                    target, drafters, prompts, batch=_BATCH.value, controllers=controllers, peer=peer,
                    progress=report, max_len=size, max_new_tokens=_MAX_NEW_TOKENS.value,
                    rule=_RULE.value, **sampling,
                )  # fmt: skip
            for name, result in results.items():
                rows.append(figures(path, len(prompts), name, result))
    show(rows)
    settings = {
        "target": target.name,
        "dtype": target.dtype.name,
        "max_new_tokens": _MAX_NEW_TOKENS.value,
        "batch": _BATCH.value,
        "rule": _RULE.value,
        "tree": _TREE.value,
        "cycle_seconds": {
            spec: dict(zip(x.widths.tolist(), x.seconds.tolist(), strict=True))
            for spec, x in controllers.items()
            if isinstance(x, PrefixScheduler | Optimal)
        },
        **{name: flag.value for name, flag in _SAMPLING.items()},
        **launch.machine(),
    }
    launch.write_json(_JSON.value, {"settings": settings, "rows": rows})


def start_peer(
    target: Target, drafters: dict[str, Any]
) -> contextlib.AbstractContextManager[Peer | None]:
    """The `transformers` process, where it is wanted."""
    if not _PEER.value:
        return contextlib.nullcontext()
    if _SAMPLING["temperature"].value:
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


def figures(path: str, num_prompts: int, name: str, result: Evaluation) -> dict[str, Any]:
    """One row of the table."""
    return {
        "prompts": pathlib.Path(path).name,
        "num_prompts": num_prompts,
        "drafter": name,
        "num_draft_tokens": result.num_draft_tokens,
        "tau": result.tau,
        "tau_interval": launch.listed(result.tau_interval),
        "alpha": launch.listed(result.alpha),
        "survival": launch.listed(result.survival),
        "plain_tokens_per_second": result.plain_tokens_per_second,
        "speculative_tokens_per_second": result.speculative_tokens_per_second,
        "speedup": result.speedup,
        "speedup_interval": launch.listed(result.speedup_interval),
        "identical": worst(result.identical) if result.identical else None,
        "peer_plain_tokens_per_second": peer_tokens_per_second(result.peer_plain),
        "times_peer_plain": result.times_peer_plain,
        "peer_speculative_tokens_per_second": peer_tokens_per_second(result.peer_speculative),
        "times_peer_speculative": result.times_peer_speculative,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table; the peer's columns are its tokens/s and how many times as fast ours are."""
    table = Table()
    headings = [
        "prompts", "drafter", "K", "τ", "α_k", "J_k", "plain tok/s", "spec. tok/s", "speed-up",
        "identical",
    ]  # fmt: skip
    if _PEER.value:
        headings += ["transformers plain", "spec."]
    for heading in headings:
        table.add_column(heading, overflow="fold")

    def short(values):
        return " ".join("–" if value is None else f"{value:.2f}" for value in values)

    def within(value, interval, unit=""):
        spread = "" if None in interval else " ({:.2f}–{:.2f})".format(*interval)
        return f"{value:.2f}{unit}{spread}"

    def peer(row, kind):
        if row[f"times_peer_{kind}"] is None:
            return "–"
        return f"{row[f'peer_{kind}_tokens_per_second']:.1f} ({row[f'times_peer_{kind}']:.2f}×)"

    for row in rows:
        table.add_row(
            f"{row['prompts']} ({row['num_prompts']})",
            row["drafter"],
            str(row["num_draft_tokens"]),
            within(row["tau"], row["tau_interval"]),
            short(row["alpha"]),
            short(row["survival"]),
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['speculative_tokens_per_second']:.1f}",
            within(row["speedup"], row["speedup_interval"], "×"),
            row["identical"] or "–",
            *([peer(row, "plain"), peer(row, "speculative")] if _PEER.value else []),
        )
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a file has room for the whole table
    console.print(table)


if __name__ == "__main__":
    launch.run(main)
