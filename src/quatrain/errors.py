"""What can go wrong, by whose fault, and the exit code that says so.

A message has three parts: what was found, what was expected, what to do.
"""

import difflib
from collections.abc import Iterable


class QuatrainError(Exception):
    """The job failed, though what the user gave was right (exit code 1)."""

    exit_code = 1


class UsageError(QuatrainError):
    """What the user gave is wrong (exit code 2)."""

    exit_code = 2


class DataError(UsageError):
    """A source, a store or a run cannot be used as it is."""


class ConfigError(UsageError):
    """One or more settings are wrong; `mistakes` holds a sentence for each."""

    def __init__(self, mistakes: Iterable[str]) -> None:
        self.mistakes = list(mistakes)
        count = len(self.mistakes)
        lines = "\n".join(f"  - {mistake}" for mistake in self.mistakes)
        super().__init__(self.mistakes[0] if count == 1 else f"{count} mistakes in the configuration:\n{lines}")


class Stopped(QuatrainError):
    """A signal ended the command after its work was saved (exit code 128 + signal)."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest known word, or an empty string.

    >>> did_you_mean("learing_rate", ["learning_rate", "steps"])
    "; did you mean 'learning_rate'?"
    """
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{near[0]}'?" if near else ""
