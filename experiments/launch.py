"""What every program under `experiments/` shares: start-up, errors in one line, progress bars."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Callable, Iterator

import jax
from absl import app, flags, logging

from specjax.checkpoints import download

_VERBOSE = flags.DEFINE_bool("verbose", False, "Show the traceback of an error.")


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
        jax.config.update("jax_compilation_cache_dir", str(download.cache_dir() / "xla"))
        try:
            main()
        except KeyboardInterrupt:
            sys.exit(130)
        except Exception as error:
            if _VERBOSE.value:
                raise
            expected = isinstance(error, ValueError | OSError | FloatingPointError)
            kind = "" if expected else f"{type(error).__name__}: "
            fail(f"{kind}{error} (--verbose shows where)", 1)

    app.run(guarded, flags_parser=parse)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """Progress bars on stderr as a callable (what, done, total); None where it is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
            bars.update(tasks[what], completed=done, total=total, visible=done < total)

        yield report
