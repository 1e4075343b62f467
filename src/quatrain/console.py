"""Where words for people go: standard output, or standard error when `--json` owns standard output."""

import sys
from typing import TextIO

_to_stderr = False


def people_read_stderr(value: bool = True) -> None:
    """Send everything said from now on to standard error (`--json`), or back to standard output."""
    global _to_stderr
    _to_stderr = value


def human() -> TextIO:
    """The stream that a person reads."""
    return sys.stderr if _to_stderr else sys.stdout


def say(text: str = "", end: str = "\n") -> None:
    """Print text for a person, at once."""
    print(text, end=end, file=human(), flush=True)


def warn(text: str) -> None:
    """Print a warning: something is unusual, and the work goes on."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
