"""Settings as dataclasses: each field carries its sentence and unit, each class checks itself."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from quatrain.errors import ConfigError


def option(default: Any, sentence: str, unit: str = "") -> Any:
    """A dataclass field with what `--help`, the docs and `recipe.toml` say about it."""
    return dataclasses.field(default=default, metadata={"sentence": sentence, "unit": unit})


class Settings:
    """Base of every configuration: a wrong value raises `ConfigError` with *all* its mistakes."""

    def __post_init__(self) -> None:
        mistakes = list(self.mistakes())
        if mistakes:
            raise ConfigError(mistakes)

    def mistakes(self) -> Iterator[str]:
        """One sentence for each setting that cannot be; overridden beside the fields it judges."""
        yield from ()

    def at_least(self, minimum: float, names: Iterable[str]) -> Iterator[str]:
        """A sentence for each named field below the minimum."""
        for name in names:
            value = getattr(self, name)
            if not value >= minimum:  # also true for nan
                yield f"{name} is {value}, it must be at least {minimum}"
