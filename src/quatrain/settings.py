"""Settings as dataclasses: each field carries its sentence and unit, each class checks itself."""

import dataclasses
import math
import types
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quatrain.errors import ConfigError, did_you_mean


def option(default: Any, sentence: str, unit: str = "") -> Any:
    """A dataclass field with what `--help`, the docs and `recipe.toml` say about it."""
    return dataclasses.field(default=default, metadata={"sentence": sentence, "unit": unit})


class Settings:
    """Base of every configuration: a wrong value raises `ConfigError` with *all* its mistakes."""

    def __post_init__(self) -> None:
        mistakes = list(self.found_wrong())
        if mistakes:
            raise ConfigError(mistakes)

    def mistakes(self) -> Iterator[str]:
        """One sentence for each setting that cannot be; overridden beside the fields it judges."""
        yield from ()

    def found_wrong(self) -> Iterator[str]:
        """Every mistake: first of single values (their choices, numbers that are not finite), then `mistakes`."""
        single = [*self._not_among_choices(), *self._not_finite()]
        told = {sentence.split()[0] for sentence in single}
        yield from single
        yield from (sentence for sentence in self.mistakes() if sentence.split()[0] not in told)

    def _not_finite(self) -> Iterator[str]:
        for name, value in vars(self).items():
            parts = value if isinstance(value, tuple) else (value,)
            if any(isinstance(part, float) and not math.isfinite(part) for part in parts):
                yield f"{name} is {value}, it must be finite"

    def _not_among_choices(self) -> Iterator[str]:
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal:
                try:
                    _one_of(getattr(self, name), get_args(kind))
                except ValueError as error:
                    yield f"{name} {error}"

    def seed_in_range(self) -> Iterator[str]:
        """A sentence if the field `seed` is none that every generator takes."""
        seed: int = vars(self)["seed"]
        if not 0 <= seed < 2**63:
            yield f"seed is {seed}, it must be in 0 .. 2^63 - 1"

    def at_least(self, minimum: float, names: Iterable[str]) -> Iterator[str]:
        """A sentence for each named field below the minimum."""
        for name in names:
            value = getattr(self, name)
            if not value >= minimum:  # also true for nan
                yield f"{name} is {value}, it must be at least {minimum}"


def coerce(value: Any, kind: Any) -> Any:
    """A value from TOML or a flag as the type of its setting; raises `ValueError` with what was expected.

    >>> coerce("1e-3", float), coerce("0.9,0.95", tuple[float, float]), coerce("false", bool)
    (0.001, (0.9, 0.95), False)
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _one_of(value, arguments)
    if origin in (Union, types.UnionType):
        return _first_that_fits(value, arguments)
    if origin is tuple:
        return _tuple(value, arguments)
    return _SCALARS[kind](value)


def _one_of(value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"is {value!r}, expected one of: {', '.join(allowed)}{did_you_mean(str(value), allowed)}")
    return value


def _first_that_fits(value: Any, kinds: tuple[Any, ...]) -> Any:
    expected = []
    for kind in kinds:
        try:
            return coerce(value, kind)
        except ValueError as error:
            expected.append(str(error).partition("expected ")[2])
    raise ValueError(f"is {value!r}, expected {' or '.join(expected)}")


def _tuple(value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    parts = value.strip("[]() ").split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or len(parts) != len(kinds):
        raise ValueError(f"is {value!r}, expected {len(kinds)} values like 0.9,0.95")
    return tuple(coerce(part, kind) for part, kind in zip(parts, kinds, strict=True))


def _int(value: Any) -> int:
    try:
        if isinstance(value, str):
            return int(value.replace("_", "").strip())
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    except ValueError:
        pass
    raise ValueError(f"is {value!r}, expected a whole number")


def _float(value: Any) -> float:
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"is {value!r}, expected a number")


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError(f"is {value!r}, expected true or false")


def _str(value: Any) -> str:
    try:
        if isinstance(value, str):
            value.encode()  # bytes of the command line that are not UTF-8 arrive as lone surrogates
            return value
    except UnicodeEncodeError:
        pass
    raise ValueError(f"is {value!r}, expected a text")


_SCALARS = {int: _int, float: _float, bool: _bool, str: _str}
