"""Settings as dataclasses: each field carries its sentence and unit, each class checks itself."""

import dataclasses
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
        mistakes = list(self._not_among_choices()) or list(self.mistakes())
        if mistakes:
            raise ConfigError(mistakes)

    def mistakes(self) -> Iterator[str]:
        """One sentence for each setting that cannot be; overridden beside the fields it judges."""
        yield from ()

    def _not_among_choices(self) -> Iterator[str]:
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal:
                try:
                    _one_of(getattr(self, name), get_args(kind))
                except ValueError as error:
                    yield f"{name} {error}"

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
    reasons = []
    for kind in kinds:
        try:
            return coerce(value, kind)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(" and ".join(dict.fromkeys(reasons)))


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
    except (TypeError, ValueError):
        pass
    raise ValueError(f"is {value!r}, expected a number")


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError(f"is {value!r}, expected true or false")


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"is {value!r}, expected a text")
    return value


_SCALARS = {int: _int, float: _float, bool: _bool, str: _str}
