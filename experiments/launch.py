"""What the programs under `experiments/` share: start-up, flags, errors in one line, progress."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging as python_logging
import operator
import os
import pathlib
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

import specjax
from specjax.checkpoints import download
from specjax.decoding.controllers import Fixed
from specjax.decoding.decode import cache_size, encode_prompts
from specjax.drafters import REGISTRY
from specjax.drafters.dspark import ConfidenceThreshold, PrefixScheduler
from specjax.evaluation.benchmark import cycle_seconds
from specjax.models.target import Target
from specjax.trees import DynamicTree, Tree
from specjax.types import Controller, Drafter, LoadedDrafter, Progress, drafter_and_params
from specjax.verification import RULES, greedy

MAIN = sys.argv[0]  # flags of this module are listed by --help like the program's own

_VERBOSE = flags.DEFINE_bool("verbose", False, "Show the traceback of an error.", module_name=MAIN)


CONTROLLERS = ("fixed:LENGTH", "confidence:THRESHOLD", "scheduler")
DRAFTER_SPECS = (
    ", ".join(["none", *(name + entry.argument for name, entry in REGISTRY.items())])
    + ", or the folder of a drafter trained here; @K or @TREE behind it says what this one drafts, "
    "@K+CONTROLLER also how much of it is verified: " + ", ".join(CONTROLLERS)
)
REFUSED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "grammar")


def define_target() -> flags.FlagHolder:
    """`--target`."""
    text = "Model folder, GGUF file, hub id (owner/name) or packaged model (smollm2)."
    return flags.DEFINE_string("target", None, text, module_name=MAIN)


def define_num_draft_tokens() -> flags.FlagHolder:
    """`--num_draft_tokens`."""
    text = "K, drafted tokens a cycle. Default: the drafter's usual one."
    return flags.DEFINE_integer("num_draft_tokens", None, text, module_name=MAIN)


def define_tree() -> flags.FlagHolder:
    """`--tree`."""
    text = (
        "Draft a tree: children of each node on level 1, 2, …, like 4,2,1; or, with eagle3, one that "
        "follows the draft: dynamic,TOTAL_TOKENS,DEPTH,TOP_K. Default: a chain."
    )
    return flags.DEFINE_list("tree", [], text, module_name=MAIN)


def define_rule() -> flags.FlagHolder:
    """`--rule`."""
    text = "Verification rule above temperature 0."
    return flags.DEFINE_enum("rule", "token", list(RULES), text, module_name=MAIN)


def load_drafter(
    spec: str,
    target: Target,
    num_draft_tokens: int | None,
    words: list[str],
    *,
    controlled: bool = False,
) -> Drafter | LoadedDrafter | None:
    """The drafter that `--drafter`, `--num_draft_tokens` and `--tree` name.

    `SPEC@K` and `SPEC@TREE` say there what the other flags say for all drafters. What follows a `+`
    is for `load_controller`, in programs that have it (`controlled`).
    """
    spec, _, own = spec.partition("@")
    own, _, controller = own.partition("+")
    if controller and not controlled:
        raise ValueError(f"+{controller}: no controller can be chosen here")
    if own:
        num_draft_tokens = int(own) if own.isdecimal() else None
        words = [] if own.isdecimal() else own.split(",")
    if words and num_draft_tokens is not None:
        raise ValueError("give either --num_draft_tokens or --tree")
    dynamic = words[:1] == ["dynamic"]
    numbers = words[dynamic:]
    if not all(word.strip().isdecimal() for word in numbers) or (dynamic and len(numbers) != 3):
        raise ValueError(
            "--tree takes numbers of children like 4,2,1, or dynamic,TOTAL_TOKENS,DEPTH,TOP_K, got "
            f"{','.join(words)!r}"
        )
    numbers = [int(word) for word in numbers]
    nodes = numbers[0] if dynamic else sum(itertools.accumulate(numbers, operator.mul))
    nodes = nodes or num_draft_tokens or 0
    if nodes >= target.config.context_length:
        raise ValueError(
            f"a draft of {nodes} tokens does not fit the target's context of "
            f"{target.config.context_length}"
        )
    tree = None
    if numbers:
        tree = DynamicTree(*numbers) if dynamic else Tree.of_widths(numbers)
    return specjax.load_drafter(spec, target, num_draft_tokens, tree=tree)


def load_controller(
    spec: str,
    target: Target,
    loaded: Drafter | LoadedDrafter | None,
    batch: int,
    rule: str,
    sampling: Mapping[str, Any],
) -> Controller | None:
    """The controller behind the `+` of `--drafter`; its costs are measured here and now.

    Args:
      spec: the whole of `--drafter`.
      target, loaded, batch, rule: what is decoded.
      sampling: as `sampling_options` gives it.
    """
    word = spec.partition("@")[2].partition("+")[2]
    name, _, argument = word.partition(":")
    if not word:
        return None
    drafter, params = drafter_and_params(loaded)
    if name == "fixed" and argument.isdecimal():
        return Fixed(jnp.int32(argument))
    if name == "confidence" and re.fullmatch(r"(0|1)?(\.\d+)?", argument or "?"):
        return ConfidenceThreshold(jnp.float32(argument))
    if word != "scheduler":
        known = ", ".join(CONTROLLERS)
        raise ValueError(f"--drafter={spec}: unknown controller {word!r}; known: {known}")
    if not (drafter and drafter.confident):
        raise ValueError(f"--drafter={spec}: the scheduler needs a drafter with a confidence head")
    law = RULES[rule] if sampling["temperature"] else greedy
    filters = {name: sampling[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    seconds = cycle_seconds(target, drafter, params, law, batch=batch, **filters)
    return PrefixScheduler.of(batch, seconds)


def encode(target: Target, path: str, what: str, prompts: Mapping[int, str]) -> list[np.ndarray]:
    """Token ids of a file's prompts, each with room for an answer.

    Args:
      target: whose tokenizer and context.
      path: of the file, for the message.
      what: the numbers count, `prompt` or `line`.
      prompts: by number.

    Raises:
      ValueError: one of them cannot be used; the message has the file and its number.
    """
    ids = []
    for number, text in prompts.items():
        try:
            ids += encode_prompts(target, text)
            cache_size(target, ids[-1:], np.ones(1, int))
        except ValueError as error:
            raise ValueError(f"{path}, {what} {number}: {error}") from None
    return ids


def define_sampling() -> dict[str, flags.FlagHolder]:
    """`--temperature`, `--top_k`, `--top_p`, `--min_p` and `--seed`, by name."""
    main = {"module_name": MAIN}
    return {
        "temperature": flags.DEFINE_float("temperature", 0.0, "0 is greedy.", **main),
        "top_k": flags.DEFINE_integer("top_k", 0, "Keep the k likeliest; 0 keeps all.", **main),
        "top_p": flags.DEFINE_float("top_p", 1.0, "Keep the likeliest with this mass.", **main),
        "min_p": flags.DEFINE_float(
            "min_p", 0.0, "Keep what is this likely relative to the likeliest.", **main
        ),
        "seed": flags.DEFINE_integer("seed", 0, "Seed of the sampling.", **main),
    }


def sampling_options(holders: dict[str, flags.FlagHolder]) -> dict[str, Any]:
    """The flags of `define_sampling` as arguments of `specjax.decode`."""
    options = {name: holder.value for name, holder in holders.items()}
    options["key"] = jax.random.key(options.pop("seed"), impl="threefry2x32")
    return options


def require(**values: Any) -> None:
    """Raises ValueError that names the first flag that was not given."""
    for name, value in values.items():
        if not value:
            raise ValueError(f"--{name} is missing (see --help)")


def load_target(source: str) -> Target:
    """The target, with progress bars; on a terminal, what its weights need is told first."""
    log = python_logging.getLogger("specjax.checkpoints.memory")
    with progress() as report:
        log.handlers, log.propagate = [python_logging.StreamHandler()], False  # without a prefix
        log.setLevel("INFO" if report else "WARNING")
        return specjax.load_target(source, progress=report)


def define_json() -> flags.FlagHolder:
    """`--json`."""
    return flags.DEFINE_string("json", None, "File to write the figures to.", module_name=MAIN)


def check_writable(path: str | None) -> None:
    """Raises OSError now, and not after hours of work, where a file cannot be written."""
    if path:
        pathlib.Path(path).open("a").close()


def write_json(path: str | None, figures: dict[str, Any]) -> None:
    """Writes the figures and the command that gave them, if a file was asked for."""
    if path:
        program = f"experiments.{pathlib.Path(sys.argv[0]).stem}"
        command = shlex.join(["python", "-m", program, *sys.argv[1:]])
        text = json.dumps({"command": command, **figures}, indent=1)
        pathlib.Path(path).write_text(text + "\n", "utf-8")


def machine() -> dict[str, Any]:
    """Where figures were measured, for results."""
    return {
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}, {os.cpu_count()} cores",
        "jax": jax.__version__,
    }


def listed(values: Any) -> list[float | None]:
    """Figures as JSON has them: no NaN."""
    return [None if value != value else float(value) for value in values]


def run(main: Callable[[], None]) -> None:
    """Parses the flags and runs `main`.

    Whatever goes wrong is one line on stderr that a person can act on, with exit status 2 for a
    wrong flag and 1 for anything else; `--verbose` shows the traceback instead.
    """
    program = pathlib.Path(sys.argv[0]).stem

    def fail(message: str, status: int) -> None:
        print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(status)

    def parse(argv: list[str]) -> list[str]:
        for name in REFUSED:
            if any(re.match(rf"--?{name}\b", argument) for argument in argv):
                fail(f"--{name} is not supported: it would change the target's distribution", 2)
        try:
            rest = flags.FLAGS(argv)
        except flags.Error as error:
            fail(f"{error} (see --help)", 2)
        except AttributeError as error:
            # A config has no such key; the KeyError inside says it well.
            inner = error.args[0] if error.args else error
            fail(f"--config: {inner.args[0] if isinstance(inner, KeyError) else error}", 2)
        if rest[1:]:
            fail(f"unexpected argument {rest[1]!r}; every option is a --flag=value (see --help)", 2)
        return rest

    def guarded(_: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # else jax tells of every device it does not find
        compiled = download.cache_dir() / "xla"
        with contextlib.suppress(OSError):  # a cache that cannot be written is no obstacle
            compiled.mkdir(parents=True, exist_ok=True)
            jax.config.update("jax_compilation_cache_dir", str(compiled))
        try:
            main()
        except KeyboardInterrupt:
            sys.exit(130)
        except Exception as error:
            if _VERBOSE.value:
                raise
            if isinstance(error, ValueError | OSError | FloatingPointError):
                fail(str(error), 1)
            fail(f"{type(error).__name__}: {error} (--verbose shows where)", 1)

    app.run(guarded, flags_parser=parse)


@contextlib.contextmanager
def progress() -> Iterator[Progress | None]:
    """Progress bars on stderr as a callable (what, done, total); None where it is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.MofNCompleteColumn(),
    )
    console = Console(stderr=True)
    with rich_progress.Progress(*columns, console=console, transient=True) as bars:
        tasks = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
            bars.update(tasks[what], completed=done, total=total, visible=done < total)

        yield report
