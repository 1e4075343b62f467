"""The ladder of an ablation: `--switch KEY=VALUE,VALUE` words to resolved variants of one recipe."""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from quatrain.errors import ConfigError
from quatrain.recipes.config import RunConfig
from quatrain.recipes.named import Recipe
from quatrain.recipes.resolve import Values, flatten, meant, options, resolve
from quatrain.settings import coerce

BASE = "base"
SHORT = {"optim": "optim.kind"}
OUTSIDE_BRACKETS = re.compile(r",(?![^\[]*\])")  # betas are written [0.9,0.95]

_TOKENS = "an ablation compares at equal tokens"
_SEEDS = "every variant has the same seeds (--seeds says how many)"
_ALIKE = "every variant is validated alike"
_NOTHING = "an ablation keeps last checkpoints alone and draws no samples"
_ONE_STORE = "every variant has the same store (--data)"
FIXED = {
    "device": "every variant has the same device (--device)",
    "data.store": _ONE_STORE,
    "model.vocab_size": _ONE_STORE,
    **dict.fromkeys(("train.steps", "train.tokens_per_step"), _TOKENS),
    **dict.fromkeys(("train.seed", "data.seed"), _SEEDS),
    **dict.fromkeys(("train.eval_every", "train.eval_tokens"), _ALIKE),
    **dict.fromkeys((f"train.{name}" for name in ("save_every", "keep_last", "keep_every", "keep_best")), _NOTHING),
    **dict.fromkeys((f"train.{name}" for name in ("samples", "sample_tokens", "sample_prompt")), _NOTHING),
}


class Variant(NamedTuple):
    """A rung of the ladder: its name ("model.mlp=swiglu"; the base's is "base") and its configuration."""

    name: str
    config: RunConfig


def ladder(
    recipe: str,
    flags: Sequence[str] = (),
    switches: Iterable[str] = (),
    product: bool = False,
    extra: Values | None = None,
    also: Sequence[str] = (),
) -> tuple[list[Variant], Recipe | None]:
    """The base, then each value of each switch that is not the base's, one at a time or (`product`) all together.

    Everything but `switches` and `product` is as in `resolve`. Raises `ConfigError` with every mistake of the base,
    of the switches and of each variant.
    """
    mistakes: list[str] = []
    base, named = _tried(mistakes, "", recipe, flags, extra or {}, also)
    rungs = _rungs(switches, mistakes)
    if base is None or mistakes:
        raise ConfigError(mistakes)
    usual = flatten(base)
    for key, values in rungs.items():
        if all(value == usual[key] for value in values):
            mistakes.append(f"--switch {key} has no value but the base's, {_shown(usual[key])}")
    variants = [Variant(BASE, base)]
    for changes in _combinations(rungs, usual, product):
        name = " + ".join(f"{key}={_shown(value)}" for key, value in changes.items())
        config, _ = _tried(mistakes, f"{name}: ", recipe, flags, {**(extra or {}), **changes}, also)
        variants += [Variant(name, config)] if config else []
    if mistakes:
        raise ConfigError(mistakes)
    return variants, named


def _tried(
    mistakes: list[str], prefix: str, recipe: str, flags: Sequence[str], extra: Values, also: Sequence[str]
) -> tuple[RunConfig | None, Recipe | None]:
    """What `resolve` gives, or its mistakes added to the others."""
    try:
        return resolve(recipe, flags, extra, also)
    except ConfigError as error:
        mistakes.extend(prefix + mistake for mistake in error.mistakes)
        return None, None


def _rungs(switches: Iterable[str], mistakes: list[str]) -> dict[str, list[Any]]:
    """The values of each switch by its dotted key, in the order given; a key given twice has the values of both."""
    known = {option.key: option.type for option in options()}
    rungs: dict[str, list[Any]] = {}
    for word in switches:
        given, equals, words = word.partition("=")
        key = given.strip().removeprefix("--").replace("-", "_")
        key = SHORT.get(key, key)
        if key not in known:
            mistakes.append(f"--switch {given}: no such setting{meant(key, known)}")
        elif key in FIXED:
            mistakes.append(f"--switch {key} cannot be: {FIXED[key]}")
        elif not equals or not words.strip():
            mistakes.append(f"--switch {word} has no value; expected {key}=VALUE,VALUE")
        else:
            rungs.setdefault(key, []).extend(_values(key, words, known[key], mistakes))
    return rungs


def _values(key: str, words: str, kind: Any, mistakes: list[str]) -> Iterator[Any]:
    for word in OUTSIDE_BRACKETS.split(words):
        try:
            yield coerce(word.strip(), kind)
        except ValueError as error:
            mistakes.append(f"--switch {key} {error}")


def _combinations(rungs: dict[str, list[Any]], usual: Values, product: bool) -> Iterator[dict[str, Any]]:
    """What differs from the base in each variant."""
    others = {
        key: list(dict.fromkeys(value for value in values if value != usual[key])) for key, values in rungs.items()
    }
    if not product:
        yield from ({key: value} for key, values in others.items() for value in values)
        return
    for values in itertools.product(*([usual[key], *others[key]] for key in others)):
        changes = {key: value for key, value in zip(others, values, strict=True) if value != usual[key]}
        if changes:
            yield changes


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
