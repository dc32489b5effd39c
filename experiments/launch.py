"""What the programs under `experiments/` share: start-up, flags, errors in one line, progress."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import logging as python_logging
import os
import pathlib
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

import specjax
from specjax.checkpoints import download
from specjax.decoding.decode import cache_size, encode_prompts
from specjax.models.target import Target
from specjax.types import Progress
from specjax.verification import RULES

MAIN = sys.argv[0]  # flags of this module are listed by --help like the program's own

_VERBOSE = flags.DEFINE_bool("verbose", False, "Show the traceback of an error.", module_name=MAIN)


TARGETS = "Model folder, GGUF file, hub id (owner/name) or packaged model (smollm2)."
REFUSED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "grammar")


def define_target() -> flags.FlagHolder:
    """`--target`."""
    return flags.DEFINE_string("target", None, TARGETS, module_name=MAIN)


class _JsonObject(flags.ArgumentParser):
    """A JSON object."""

    syntactic_help = "a JSON object"

    def parse(self, argument: str | dict[str, Any]) -> dict[str, Any]:
        """The object, as absl asks for it."""
        value = json.loads(argument) if isinstance(argument, str) else argument
        if not isinstance(value, dict):
            raise ValueError(f'expected {{"name": value, …}}, got {argument}')
        return value


def define_template_options() -> flags.FlagHolder:
    """`--template_options`."""
    text = 'Arguments of the chat template, as {"enable_thinking": false}.'
    return flags.DEFINE(_JsonObject(), "template_options", {}, text, module_name=MAIN)


def define_rule() -> flags.FlagHolder:
    """`--rule`."""
    text = "Verification rule above temperature 0."
    return flags.DEFINE_enum("rule", "token", list(RULES), text, module_name=MAIN)


def define_prompts() -> flags.FlagHolder:
    """`--prompts`, several."""
    text = "A prompt file; may be repeated."
    return flags.DEFINE_multi_string("prompts", [], text, module_name=MAIN)


def define_limit() -> flags.FlagHolder:
    """`--limit`."""
    text = "Prompts a file; all by default."
    return flags.DEFINE_integer("limit", None, text, lower_bound=1, module_name=MAIN)


def define_max_new_tokens(default: int = 128) -> flags.FlagHolder:
    """`--max_new_tokens`."""
    text = "Longest answer, in tokens."
    return flags.DEFINE_integer("max_new_tokens", default, text, module_name=MAIN)


def require_names(what: str, paths: Sequence[str], endings: Sequence[str]) -> list[str]:
    """The names of files, without folder and these endings.

    Raises:
      ValueError: two are alike.
    """
    files = map(pathlib.Path, paths)
    names = [path.stem if path.suffix in endings else path.name for path in files]
    if len(set(names)) < len(names):
        raise ValueError(f"the {what} {', '.join(paths)} cannot be told apart by their names")
    return names


def encode(
    target: Target, path: str, prompts: Mapping[int, str], *, fitting: bool = True
) -> list[np.ndarray]:
    """Token ids of a file's prompts, each with room for an answer.

    Args:
      target: whose tokenizer and context.
      path: of the file, for the message.
      prompts: by number.
      fitting: one without room is an error.

    Raises:
      ValueError: one of them cannot be used; the message has the file and its number.
    """
    ids = []
    for number, text in prompts.items():
        try:
            ids += encode_prompts(target, text)
            if fitting:
                cache_size(target, ids[-1:], np.ones(1, int))
        except ValueError as error:
            raise ValueError(f"{path}, prompt {number}: {error}") from None
    return ids


def room_for(target: Target, prompts: list[np.ndarray], max_new_tokens: int) -> int:
    """Rows of the cache that holds the longest of some prompts and its answer."""
    budgets = np.full(len(prompts), max_new_tokens)
    return min(cache_size(target, prompts, budgets), target.config.context_length)


def define_sampling(*, several_temperatures: bool = False) -> dict[str, flags.FlagHolder]:
    """`--temperature`, `--top_k`, `--top_p`, `--min_p` and `--seed`, by name."""
    main = {"module_name": MAIN}
    if several_temperatures:
        text = "0 is greedy; may be repeated."
        temperature = flags.DEFINE_multi_float("temperature", [0.0], text, **main)
    else:
        temperature = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", **main)
    return {
        "temperature": temperature,
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


def load_target(source: str, template_options: Mapping[str, Any] | None = None) -> Target:
    """The target, with progress bars; on a terminal, what its weights need is told first."""
    log = python_logging.getLogger("specjax.checkpoints.memory")
    with progress() as report:
        log.handlers, log.propagate = [python_logging.StreamHandler()], False  # without a prefix
        log.setLevel("INFO" if report else "WARNING")
        return specjax.load_target(source, template_options=template_options, progress=report)


def define_json() -> flags.FlagHolder:
    """`--json`."""
    return flags.DEFINE_string("json", None, "File to write the figures to.", module_name=MAIN)


def define_plot(name: str = "plot", text: str = "PNG file to draw.") -> flags.FlagHolder:
    """`--plot`, or another flag for a plot."""
    holder = flags.DEFINE_string(name, None, text, module_name=MAIN)
    flags.register_validator(
        holder, lambda path: not path or path.endswith(".png"), "takes the name of a .png file"
    )
    return holder


def check_writable(path: str | None) -> None:
    """Raises OSError now, and not after hours of work, where a file cannot be written."""
    if path:
        pathlib.Path(path).open("a").close()


def write_json(path: str | None, figures: dict[str, Any]) -> None:
    """Writes figures and the command that gave them, if a file was asked for: all or nothing."""
    if path:
        text = json.dumps({"command": command(), **figures}, indent=1)
        whole = pathlib.Path(f"{path}.tmp")
        whole.write_text(text + "\n", "utf-8")
        whole.replace(path)


def command() -> str:
    """What was typed."""
    program = f"experiments.{pathlib.Path(sys.argv[0]).stem}"
    return shlex.join(["python", "-m", program, *sys.argv[1:]])


def machine() -> dict[str, Any]:
    """Where figures were measured, for results."""
    return {
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}, {os.cpu_count()} cores",
        **{name: importlib.metadata.version(name) for name in ("specjax", "jax", "jaxlib", "flax")},
        "python": platform.python_version(),
    }


@functools.cache
def warn(text: str) -> None:
    """Says on stderr, once, what is no error."""
    print(f"{pathlib.Path(MAIN).stem}: {text}", file=sys.stderr)


def run(main: Callable[[], None]) -> None:
    """Parses the flags and runs `main`.

    Whatever goes wrong is one line on stderr that a person can act on, with exit status 2 for a
    wrong flag and 1 for anything else; `--verbose` shows the traceback instead.
    """
    program = pathlib.Path(MAIN).stem

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
