"""A recipe's name or file and `--section.key value` flags to one checked `RunConfig`, and back to TOML.

Later wins: defaults < recipe < flags. Every mistake is collected, and all are told at once.
"""

import dataclasses
import json
import os
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from quatrain.errors import ConfigError, UsageError, did_you_mean, nearest
from quatrain.recipes.config import SECTIONS, RunConfig
from quatrain.recipes.named import RECIPES, Recipe
from quatrain.settings import Settings, coerce

Part = TypeVar("Part", bound=Settings)
Values = dict[str, Any]  # by dotted key: "model.n_layer", "device"


# What nanoGPT, llm.c and Hugging Face call a setting.
PEERS_NAMES = {
    "learning_rate": "optim.lr",
    "batch_size": "train.micro_batch",
    "max_iters": "train.steps",
    "max_steps": "train.steps",
    "warmup_iters": "optim.warmup",
    "warmup_steps": "optim.warmup",
    "grad_clip": "optim.clip",
    "eval_interval": "train.eval_every",
    "gradient_accumulation_steps": "train.tokens_per_step",
    "total_batch_size": "train.tokens_per_step",
    "dtype": "train.precision",
    "n_positions": "model.block_size",
    "hidden_size": "model.n_embd",
}


class Option(NamedTuple):
    """One setting as `--help`, the docs and recipe files show it."""

    key: str
    default: Any
    type: Any
    sentence: str
    unit: str


class Given(NamedTuple):
    """A value and where it was given, for messages."""

    value: Any
    place: str  # the file, or empty for a flag

    def name(self, key: str) -> str:
        """How a message calls the setting."""
        return f"{self.place}: {key}" if self.place else f"--{key}"


def options() -> list[Option]:
    """Every setting of a recipe, in the order of the sections."""
    found = [_option("device", field) for field in dataclasses.fields(RunConfig) if field.name == "device"]
    for section, kind in SECTIONS.items():
        hints = get_type_hints(kind)
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # every Settings is a dataclass
            found.append(_option(f"{section}.{field.name}", field)._replace(type=hints[field.name]))
    return found


def _option(key: str, field: "dataclasses.Field[Any]") -> Option:
    return Option(key, field.default, field.type, field.metadata["sentence"], field.metadata["unit"])


def resolve(
    recipe: str, flags: Iterable[str] = (), extra: Values | None = None, also: Iterable[str] = ()
) -> tuple[RunConfig, Recipe | None]:
    """The configuration of a recipe with flags, and the named recipe if it is one.

    `recipe` is a built-in name or the path of a .toml; `flags` are command-line words; `extra` are
    values by dotted key that win over both; `also` are the command's own options, which a mistyped
    word may have meant. Raises `ConfigError` with every mistake.
    """
    named = RECIPES[recipe]() if recipe in RECIPES else None
    given = _from_config(named.config) if named else _from_file(Path(recipe))
    mistakes: list[str] = []
    flagged = _from_flags(list(flags), list(also), mistakes)
    for key, value in (extra or {}).items():
        flagged[key] = Given(value, "")
    known = {option.key: option for option in options()}
    values: Values = {}
    for key, one in {**given, **flagged}.items():
        if key not in known:
            mistakes.append(f"{one.name(key)}: no such setting{meant(key, known)}")
            continue
        try:
            values[key] = coerce(one.value, known[key].type)
        except ValueError as error:
            mistakes.append(f"{one.name(key)} {error}")
    return _build(values, mistakes), named


def _from_config(config: RunConfig) -> dict[str, Given]:
    return {key: Given(value, "recipe") for key, value in flatten(config).items()}


def _from_file(path: Path) -> dict[str, Given]:
    if path.suffix != ".toml" and not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        raise UsageError(
            f"no recipe '{path}'{did_you_mean(str(path), RECIPES)}; there is {', '.join(RECIPES)}, or a .toml file"
        )
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; expected a recipe in TOML") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML ({error})") from error
    return {key: Given(value, str(path)) for key, value in _flat(content)}


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and (value or prefix + key in SECTIONS):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _from_flags(words: list[str], also: list[str], mistakes: list[str]) -> dict[str, Given]:
    """`--section.key value` and `--section.key=value`; dashes and underscores in a key are the same."""
    given: dict[str, Given] = {}
    known = [option.key for option in options()]
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            mistakes.append(f"'{word}' is neither an option nor the value of one (the store is --data, the run --out)")
            continue
        name, equals, value = word[2:].partition("=")
        key = name.replace("-", "_")
        if key not in known:
            mistakes.append(f"no option --{name}{meant(key, known, '--', also)}")
            if not equals and words and not words[0].startswith("--"):
                words.pop(0)
            continue
        if not equals and (not words or words[0].startswith("--")):
            mistakes.append(f"--{name} needs a value (write --{name}=VALUE for one that begins with --)")
            continue
        given[key] = Given(value if equals else words.pop(0), "")
    return given


def meant(key: str, known: Iterable[str], dashes: str = "", also: Iterable[str] = ()) -> str:
    """The setting that a wrong key most likely means, peers' names for it included; or one of the other options."""
    option = nearest(dashes + key, also)
    if option:
        return f" (did you mean '{option}'?)"
    last = key.rpartition(".")[2]
    peer = nearest(last, PEERS_NAMES)
    own = [one for one in known if one.rpartition(".")[2] == last]
    found = own[0] if own else PEERS_NAMES[peer] if peer else nearest(key, known)
    return f" (did you mean '{dashes}{found}'?)" if found else ""


def _build(values: Values, mistakes: list[str]) -> RunConfig:
    parts: dict[str, Any] = {key: value for key, value in values.items() if "." not in key}
    for section, kind in SECTIONS.items():
        mine = {key.split(".", 1)[1]: value for key, value in values.items() if key.startswith(f"{section}.")}
        parts[section] = _unchecked(kind, mine)
        mistakes.extend(f"{section}.{mistake}" for mistake in parts[section].found_wrong())
    mistakes.extend(_unchecked(RunConfig, parts).found_wrong())
    if mistakes:
        raise ConfigError(mistakes)
    return RunConfig(**parts)


def _unchecked(kind: type[Part], values: Values) -> Part:
    """A configuration whose mistakes are still to be asked for, so that all sections' can be told at once."""
    part = object.__new__(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # every Settings is a dataclass
        object.__setattr__(part, field.name, values.get(field.name, field.default))
    return part


def data_is_missing(verb: str, named: Recipe | None) -> UsageError:
    """What to say where a command was given no store: how to prepare one."""
    expected = f"prepare what this recipe expects with:\n  {named.prepare}\nor " if named else "prepare "
    return UsageError(
        f"{verb} needs --data STORE; {expected}a text of your own with:\n  quatrain prepare FILE --out stores/mine"
    )


def flatten(config: RunConfig) -> Values:
    """Every setting by its dotted key."""
    values: Values = {}
    for option in options():
        target: Any = config
        for part in option.key.split("."):
            target = getattr(target, part)
        values[option.key] = target
    return values


def to_toml(config: RunConfig, head: str = "") -> str:
    """The configuration as a recipe file that `resolve` reads back as it stands; each setting with its sentence."""
    lines = [f"# {line}" for line in head.splitlines()]
    section = ""
    values = flatten(config)
    for option in options():
        prefix, _, name = option.key.rpartition(".")
        if prefix != section:
            section = prefix
            lines += ["", f"[{section}]"]
        unit = f" [{option.unit}]" if option.unit else ""
        lines.append(f"{name} = {_toml_value(values[option.key])}  # {option.sentence}{unit}")
    return "\n".join(lines).lstrip("\n") + "\n"


def settings_page() -> str:
    """docs/settings.md: the table of every setting."""
    lines = ["# Settings of a recipe", "", "Generated by `make fix` from the fields of the dataclasses.", ""]
    lines += ["| setting | default | meaning |", "|---|---|---|"]
    for option in options():
        unit = f" [{option.unit}]" if option.unit else ""
        lines.append(f"| `{option.key}` | `{_toml_value(option.default)}` | {option.sentence}{unit} |")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # a TOML basic string has JSON's escapes
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(part) for part in value) + "]"
    return repr(value)


def differences(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, by dotted key: (before, after)."""
    old, new = flatten(before), flatten(after)
    return {key: (old[key], new[key]) for key in old if old[key] != new[key]}
