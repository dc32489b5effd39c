r"""Speed-up over K, measured and as the law of its acceptance and costs predicts it.

  python -m experiments.sweep --target=smollm2 --drafter=runs/smollm2_eagle3/drafter \
    --drafter=ngram --lengths=1,2,4,8 --prompts=gsm8k.jsonl --limit=5 --json=sweep.json \
    --plot=sweep.png

Every K of a drafter decodes the same prompts, in turn with plain decoding. Costs are measured beside
it: a plain step, the draft of K tokens, their verification. The law is fitted to these costs and to
the acceptance of the longest drafts alone, so that for every other K it is a prediction. It knows of no
rows that end before the others: with `--batch` it promises too much where answers differ in length.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console

from experiments import drafts, launch
from specjax.evaluation import benchmark, plots, tables
from specjax.evaluation.prompts import read_prompts
from specjax.evaluation.runner import Evaluation, evaluate
from specjax.evaluation.speedup import Costs, Law, conditional, needed_alpha, needed_beta
from specjax.models.target import Target
from specjax.types import drafter_and_params
from specjax.verification import RULES, greedy

_TARGET = launch.define_target()
_TEMPLATE_OPTIONS = launch.define_template_options()
_DRAFTERS = flags.DEFINE_multi_string(
    "drafter", [], f"{drafts.SPECS}; it drafts chains. May be repeated."
)
_LENGTHS = flags.DEFINE_list("lengths", ["1", "2", "3", "4", "6", "8", "12", "16"], "K, several.")
_PROMPTS = launch.define_prompts()
_LIMIT = launch.define_limit()
_RULE = launch.define_rule()
_SAMPLING = launch.define_sampling()
_MAX_NEW_TOKENS = launch.define_max_new_tokens()
_BATCH = flags.DEFINE_integer("batch", 1, "Prompts decoded together.", lower_bound=1)
_WANTED = flags.DEFINE_float(
    "wanted", 3.0, "A speed-up: what α or β would it need?", lower_bound=1.0
)
_JSON = launch.define_json()
_PLOT = launch.define_plot()


def main() -> None:
    """Decodes with every K, times the parts, fits, prints, draws, writes."""
    launch.require(target=_TARGET.value, drafter=_DRAFTERS.value, prompts=_PROMPTS.value)
    lengths = sorted({int(word) for word in _LENGTHS.value if word.isdecimal() and int(word)})
    if len(lengths) < 2 or len(lengths) < len(set(_LENGTHS.value)):
        raise ValueError(f"--lengths takes two K or more, from 1, got {','.join(_LENGTHS.value)}")
    for spec in _DRAFTERS.value:
        if drafts.parts(spec)[1:] != (None, None):
            raise ValueError(f"--drafter={spec}: --lengths says what is drafted here")
    for path in (_JSON.value, _PLOT.value):
        launch.check_writable(path)
    names = launch.require_names("prompt files", _PROMPTS.value, [".jsonl"])
    texts = {
        name: dict(enumerate(read_prompts(path, _LIMIT.value), start=1))
        for name, path in zip(names, _PROMPTS.value, strict=True)
    }
    for name, prompts in texts.items():
        if len(prompts) % _BATCH.value:
            raise ValueError(
                f"{name}: {len(prompts)} prompts are no batches of {_BATCH.value}, which costs are of"
            )
    target = launch.load_target(_TARGET.value, _TEMPLATE_OPTIONS.value)
    encoded = {name: launch.encode(target, name, prompts) for name, prompts in texts.items()}
    rows, summaries, measured, laws = [], [], {}, {}
    for spec in _DRAFTERS.value:
        measured[spec], laws[spec] = {}, {}
        for name, results, law, costs in sweep(target, spec, lengths, encoded):
            laws[spec][name] = law
            rows += [row(spec, name, k, results[str(k)], law, costs[k]) for k in lengths]
            measured[spec][name] = {
                k: (results[str(k)].speedup, *results[str(k)].speedup_interval) for k in lengths
            }
    show(rows)
    for spec, name in itertools.product(laws, encoded):
        summaries.append(summary(spec, name, laws[spec][name], measured[spec][name]))
    settings = {
        "target": target.name,
        "batch": _BATCH.value,
        "rule": _RULE.value,
        **{name: flag.value for name, flag in _SAMPLING.items()},
        **launch.machine(),
    }
    figures = {"settings": settings, "rows": rows, "laws": summaries}
    launch.write_json(_JSON.value, figures)
    if _PLOT.value:
        plots.sweep(_PLOT.value, measured, laws)


def sweep(
    target: Target, spec: str, lengths: list[int], encoded: Mapping[str, list[np.ndarray]]
) -> Iterator[tuple[str, dict[str, Evaluation], Law, dict[int, Costs]]]:
    """One drafter: of every file its name, what every K made of it, and the law; the costs of all K."""
    drafters = {str(k): drafts.load_drafter(spec, target, k, []) for k in lengths}
    if None in drafters.values():
        raise ValueError("--drafter=none: plain decoding is measured beside every drafter anyway")
    filters = {name: flag.value for name, flag in _SAMPLING.items()}
    rule = RULES[_RULE.value] if filters["temperature"] else greedy
    # The same for all files: every K is compiled once.
    size = max(launch.room_for(target, x, _MAX_NEW_TOKENS.value) for x in encoded.values())
    pairs = {k: drafter_and_params(drafters[str(k)]) for k in lengths}
    costs = benchmark.costs(target, pairs, rule, batch=_BATCH.value, max_len=size, **filters)
    for name, prompts in encoded.items():
        with launch.progress() as report:
            results = evaluate(
                target, drafters, prompts, batch=_BATCH.value, progress=report, rule=_RULE.value,
                max_new_tokens=_MAX_NEW_TOKENS.value, max_len=size,
                **launch.sampling_options(_SAMPLING),
            )  # fmt: skip
        longest = results[str(lengths[-1])]
        law = Law.fit(conditional(longest.survival), costs, longest.drafting_share)
        yield name, results, law, costs


def row(spec: str, name: str, k: int, result: Evaluation, law: Law, costs: Costs) -> dict[str, Any]:
    """One K of a drafter on one file."""
    return {
        "drafter": spec,
        "prompts": name,
        "num_draft_tokens": k,
        "tau": result.tau,
        "alpha": tables.listed(result.alpha),
        "speedup": result.speedup,
        "speedup_interval": tables.listed(result.speedup_interval),
        "predicted": law.predicted(k),
        **{f"{part}_ms": 1e3 * seconds for part, seconds in dataclasses.asdict(costs).items()},
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    headings = ["drafter", "prompts", "K", "τ", "draft ms", "verify ms", "plain ms", "speed-up"]
    lines = [
        [
            row["drafter"],
            row["prompts"],
            str(row["num_draft_tokens"]),
            f"{row['tau']:.2f}",
            *(f"{row[f'{part}_ms']:.1f}" for part in ("draft", "verify", "plain")),
            tables.within(row, "speedup"),
            f"{row['predicted']:.2f}",
        ]
        for row in rows
    ]
    Console().print(tables.rich_table([*headings, "predicted"], lines))


def summary(
    spec: str, name: str, law: Law, measured: dict[int, tuple[float, float, float]]
) -> dict[str, Any]:
    """What the law says of a drafter on a file, printed, too."""
    lengths = sorted(measured)
    found = max(lengths, key=lambda k: measured[k][0])
    alpha, wanted = float(np.mean(law.alpha)), _WANTED.value
    fixed = {"fixed": law.start}
    needs = needed_alpha(wanted, law.beta, **fixed), needed_beta(wanted, law.alpha, **fixed)
    Console(highlight=False, soft_wrap=True).print(
        f"{spec}, {name}: α {alpha:.2f}, a draft costs {law.start:.3f} + {law.beta:.3f} K; "
        f"K* predicted {law.best(lengths)}, measured {found}; "
        f"{wanted:g}× would need "
        + (f"α {needs[0]:.2f} at this β" if needs[0] else "more than α 1 at this β")
        + (f" or β {needs[1]:.3f} at this α" if needs[1] else ", and is out of reach at this α")
        + ", were verification as cheap as a step"
    )
    return {
        "drafter": spec,
        "prompts": name,
        **dataclasses.asdict(law),
        "best_predicted": law.best(lengths),
        "best_measured": found,
        "wanted": wanted,
        "needed_alpha": needs[0],
        "needed_beta": needs[1],
    }


if __name__ == "__main__":
    launch.run(main)
