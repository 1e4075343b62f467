"""What can go wrong, by whose fault, and the exit code that says so.

A message has three parts: what was found, what was expected, what to do.
"""

import difflib
import re
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

    def as_flags(self) -> "ConfigError":
        """The same mistakes with settings as command-line flags: the word that begins each, and every a_b."""
        pattern = re.compile(r"'[^']*'|^\w+|\b[a-z]+_[a-z]+\b")  # what stands in quotes is the user's

        def flag(word: re.Match[str]) -> str:
            return word[0] if word[0].startswith("'") else "--" + word[0].replace("_", "-")

        return ConfigError(pattern.sub(flag, mistake) for mistake in self.mistakes)


class Diverged(QuatrainError):
    """A loss, a gradient or a weight is not finite: these settings do not train (exit code 1)."""


class Stopped(QuatrainError):
    """A signal ended the command after its work was saved (exit code 128 + signal)."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the nearest known word, or an empty string.

    >>> did_you_mean("learing_rate", ["learning_rate", "steps"])
    " (did you mean 'learning_rate'?)"
    """
    near = nearest(word, known)
    return f" (did you mean '{near}'?)" if near else ""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that begins with this one, or else the most similar, if any is."""
    words = list(known)
    longer = [one for one in words if len(word.strip("-")) > 2 and one.startswith(word)]
    return next(iter(longer or difflib.get_close_matches(word, words, n=1, cutoff=0.6)), None)
