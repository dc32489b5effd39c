"""What every program under `experiments/` shares: start-up, errors in one line, progress bars."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Callable, Iterator

import jax
from absl import app, flags, logging

from specjax.checkpoints import download
from specjax.types import Progress

_VERBOSE = flags.DEFINE_bool(
    "verbose", False, "Show the traceback of an error.", module_name="__main__"
)


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
        try:
            rest = flags.FLAGS(argv)
        except flags.Error as error:
            fail(f"{error} (see --help)", 2)
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
