"""Where words for people go: standard output, or standard error when `--json` owns standard output.

How far long work has come is always told on standard error, and only to a terminal.
"""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

_to_stderr = False
_silent = False


def people_read_stderr(value: bool = True) -> None:
    """Send everything said from now on to standard error (`--json`), or back to standard output."""
    global _to_stderr
    _to_stderr = value


def be_silent() -> None:
    """Say nothing from now on and show no bar: another process says the same."""
    global _silent
    _silent = True


def write_utf8() -> None:
    """Make both streams write UTF-8 whatever the locale is; what is not text (file names can be) is escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def human() -> TextIO:
    """The stream that a person reads."""
    return sys.stderr if _to_stderr else sys.stdout


def say(text: str = "", end: str = "\n") -> None:
    """Print text for a person, at once."""
    if not _silent:
        print(text, end=end, file=human(), flush=True)


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while long work goes on, if that is a terminal: call what it gives with what was done."""
    if _silent or not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what, markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)
