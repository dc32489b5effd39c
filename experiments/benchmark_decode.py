r"""Times plain decoding and a cycle with its parts, on weights or on a shape without any.

  python -m experiments.benchmark_decode --target=smollm2 --drafter=ngram --json=benchmark.json
  python -m experiments.benchmark_decode --random_init=qwen3_0_6b --drafter=early_exit:4 \
    --simulated_alpha=0.8

Rows hold random tokens. With `--simulated_alpha` every draft has K tokens, and each is accepted with
that probability; otherwise the rule decides, which on random text accepts little: `--rule` above
temperature 0, greedy at 0.
"""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
from absl import flags
from rich.console import Console
from rich.table import Table

from experiments import drafts, launch
from specjax.evaluation.benchmark import Breakdown, Simulated, breakdown
from specjax.models.shapes import SHAPES
from specjax.models.target import random_target
from specjax.types import Rule, drafter_and_params
from specjax.verification import RULES, greedy

_TARGET = launch.define_target()
_RANDOM_INIT = flags.DEFINE_enum(
    "random_init", None, list(SHAPES), "Instead of a target: random weights of this shape."
)
_DRAFTER = flags.DEFINE_string("drafter", "ngram", f"{drafts.SPECS}.")
_NUM_DRAFT_TOKENS = drafts.define_num_draft_tokens()
_TREE = drafts.define_tree()
_SIMULATED_ALPHA = flags.DEFINE_float(
    "simulated_alpha", None, "Accept each draft with this probability.",
    lower_bound=0.0, upper_bound=1.0,
)  # fmt: skip
_SAMPLING = launch.define_sampling()
_RULE = launch.define_rule()
_BATCH = flags.DEFINE_integer("batch", 1, "Rows.", lower_bound=1)
_MAX_LEN = flags.DEFINE_integer("max_len", 512, "Rows of the KV cache.", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 16, "Steps or cycles a timed run.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed runs of each part.", lower_bound=1)
_JSON = launch.define_json()
_PROFILE = flags.DEFINE_string("profile", None, "Folder to write a JAX profiler trace to.")


def main() -> None:
    """Loads, times, prints, writes."""
    launch.check_writable(_JSON.value)
    if bool(_TARGET.value) == bool(_RANDOM_INIT.value):
        raise ValueError("give either --target or --random_init (see --help)")
    if _RANDOM_INIT.value:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        target = random_target(SHAPES[_RANDOM_INIT.value], dtype=dtype)
    else:
        target = launch.load_target(_TARGET.value)
    loaded = drafts.load_drafter(_DRAFTER.value, target, _NUM_DRAFT_TOKENS.value, _TREE.value)
    if loaded is None:
        raise ValueError("--drafter=none: plain decoding is timed beside every drafter anyway")
    drafter, params = drafter_and_params(loaded)
    alpha = _SIMULATED_ALPHA.value
    sampling = {name: flag.value for name, flag in _SAMPLING.items()}
    rule = RULES[_RULE.value] if sampling["temperature"] else greedy
    if alpha is not None:
        rule = Rule(Simulated(alpha))
    trace = jax.profiler.trace(_PROFILE.value) if _PROFILE.value else contextlib.nullcontext()
    with trace:
        result = breakdown(
            target, drafter, params, rule, batch=_BATCH.value, max_len=_MAX_LEN.value,
            steps=_STEPS.value, repeats=_REPEATS.value, **sampling,
        )  # fmt: skip
    show(result)
    figures = {
        **dataclasses.asdict(result),
        "bandwidth_share": result.bandwidth_share,
        "overhead_share": result.overhead_share,
        "rule_share": result.rule_share,
        "speedup": result.speedup,
        "predicted_speedup": result.predicted_speedup,
        "measured_over_predicted": result.measured_over_predicted,
        "target": _RANDOM_INIT.value or target.name,
        "drafter": _DRAFTER.value,
        "num_draft_tokens": drafter.num_draft_tokens,
        "simulated_alpha": alpha,
        "rule": _RULE.value if rule is RULES[_RULE.value] else None,
        **sampling,
        "batch": _BATCH.value,
        "max_len": _MAX_LEN.value,
        "tree": _TREE.value,
        "dtype": target.dtype.name,
        **launch.machine(),
    }
    launch.write_json(_JSON.value, figures)


def show(result: Breakdown) -> None:
    """Prints the table."""
    table = Table("part", "ms", "fastest", "slowest")
    for name in ("plain", "cycle", "draft", "verify", "rule"):
        timing = getattr(result, name)
        table.add_row(
            name, *(f"{1e3 * x:.2f}" for x in (timing.median, timing.fastest, timing.slowest))
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"τ {result.tau:.2f}; speed-up {result.speedup:.2f}×, predicted "
        f"{result.predicted_speedup:.2f}× (measured / predicted "
        f"{result.measured_over_predicted:.2f}); overhead {100 * result.overhead_share:.1f} % of a "
        f"cycle, rule {100 * result.rule_share:.1f} %\nplain decoding reads weights at "
        f"{100 * result.bandwidth_share:.0f} % of the read bandwidth of "
        f"{result.read_bandwidth.median / 1e9:.1f} GB/s",
        soft_wrap=True,
    )


if __name__ == "__main__":
    launch.run(main)
