"""A JSON body and its fields, read strictly: what is not what it should be raises `Refused` with the field's name."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from quatrain.errors import ConfigError, did_you_mean
from quatrain.web.refusals import Refused, shown

Fields = dict[str, Any]


def read_json(body: bytes) -> Fields:
    """The object in a body. Raises `Refused`, also for what JSON proper does not hold (NaN) and for endless nesting."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise Refused(400, f"the body is not UTF-8 (byte {error.start})") from error
    except RecursionError:
        raise Refused(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise Refused(400, f"the body is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise Refused(400, f"the body is {shown(found)}; expected an object")
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def known_only(fields: Fields, known: Sequence[str]) -> None:
    """Raise `Refused` for a field of another name."""
    for name in fields:
        if name not in known:
            refuse_field(name, f"no field {shown(name)}{did_you_mean(name[:64], known)}")


def get(fields: Fields, name: str, read: Callable[[str, Any], Any], default: Any) -> Any:
    """A field as `read` gives it from its name and value; where it is absent or null, the default."""
    value = fields.get(name)
    return default if value is None else read(name, value)


def refuse_field(param: str, message: str) -> NoReturn:
    """Raise `Refused` for a field that is wrong."""
    raise Refused(400, message, param=param)


def refusal_of(error: ConfigError) -> Refused:
    """The same for settings, whose mistakes begin with their names."""
    return Refused(400, str(error), param=error.mistakes[0].split()[0])


def is_whole(value: object) -> bool:
    """Whether it is a whole number of JSON, which true is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole(name: str, value: Any) -> int:
    """A whole number of 64 bits; a text is none."""
    if not is_whole(value):
        refuse_field(name, f"{name} is {shown(value)}, expected a whole number")
    if abs(value) >= 2**63:
        refuse_field(name, f"{name} is beyond 64 bits")
    found: int = value
    return found


def number(name: str, value: Any) -> float:
    """A number; a text is none."""
    if not is_whole(value) and not isinstance(value, float):
        refuse_field(name, f"{name} is {shown(value)}, expected a number")
    if abs(value) > 1e300 or not math.isfinite(value):
        refuse_field(name, f"{name} is too large")
    return float(value)
