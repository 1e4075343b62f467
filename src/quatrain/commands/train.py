"""quatrain train: a token store to a run folder; the same command again resumes."""

import contextlib
import os
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from quatrain.console import say
from quatrain.errors import ConfigError, DataError, UsageError
from quatrain.recipes.config import RunConfig
from quatrain.recipes.resolve import data_is_missing, differences, options, resolve, to_toml
from quatrain.training.config import DECIDING
from quatrain.web.live import PORT, live

if TYPE_CHECKING:
    from quatrain.tokens.store import TokenStore


def train(
    recipe: str,
    *settings: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    data: Path | None = None,
    out: Path | None = None,
    device: str | None = None,
    stop_at: int | None = None,
    serve: Annotated[list[int] | None, Parameter(consume_multiple=(0, 1), negative=())] = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, Any]:
    """Train a GPT. The same command again goes on where the run stopped.

    Parameters
    ----------
    recipe
        A built-in name (see: quatrain recipes) or a .toml file. `--section.key value` overrides it.
    data
        Folder of the token store.
    out
        Run folder: absent, empty, or our own. Default: runs/RECIPE; for a run's own recipe.toml, that run.
    device
        auto, cpu, cuda, cuda:N or mps.
    stop_at
        Save at this step and end; the schedule still spans train.steps.
    serve
        Show the run's page while it trains, on this port of 127.0.0.1 (8000; 0 takes one that is free).
    json
        Print one JSON object as the last line of stdout; words for people go to stderr.

    """
    extra: dict[str, Any] = {} if data is None else {"data.store": str(data.resolve())}
    if device is not None:
        extra["device"] = device
    config, named = resolve(
        recipe, settings, extra, also=("--data", "--out", "--device", "--stop-at", "--serve", "--json")
    )
    if not config.data.store:
        raise data_is_missing("train", named)
    if stop_at is not None and stop_at < 0:
        raise ConfigError([f"--stop-at is {stop_at}, it must be at least 0"])
    run = out or _usual_folder(recipe)
    config = _fit(config, run)
    with _shown(run, serve):
        from quatrain.training.loop import train as run_training
        from quatrain.training.progress import TerminalWatcher

        say(f"{recipe} on {config.data.store} -> {run} ({config.train.precision})")
        done = run_training(
            config.model,
            config.optim,
            config.data,
            config.train,
            run,
            to_toml(config, named.head if named else ""),
            config.device,
            stop_at,
            TerminalWatcher(),
        )
    say(_told(done, config))
    return done


@contextlib.contextmanager
def _shown(run: Path, port: list[int] | None) -> Iterator[None]:
    """Show the run's page, where that is asked for; of a distributed launch one process does."""
    if port is None or os.environ.get("RANK", "0") != "0":
        yield
        return
    with live(run, *(port or [PORT])) as url:
        say(f"the run's page: {url}")
        yield


def _usual_folder(recipe: str) -> Path:
    """runs/NAME, or the run itself for the recipe.toml that lies in one."""
    path = Path(recipe)
    return path.parent if path.name == "recipe.toml" else Path("runs") / path.stem


def settings_help() -> str:
    """The table of `--section.key` options, from the fields of the dataclasses."""
    lines = ["Settings of a recipe, each also a flag (--model.n-layer 6), with their defaults:", ""]
    for option in options():
        unit = f" [{option.unit}]" if option.unit else ""
        default = f" ({option.default!r})" if option.default != "" else ""
        lines.append(f"  --{option.key}")
        lines.append(
            textwrap.fill(option.sentence + unit + default, 78, initial_indent=" " * 6, subsequent_indent=" " * 6)
        )
    return "\n".join(lines)


def _fit(config: RunConfig, run: Path) -> RunConfig:
    """The configuration with what the store, the device and a run that goes on decide written into it."""
    from quatrain.model.device import pick_device, pick_precision
    from quatrain.tokens.store import TokenStore

    store = TokenStore(config.data.store)
    fitted = config.for_vocabulary(store.vocab_size)
    began = _began(run)
    precision = config.train.precision
    if precision == "auto" and began is not None:
        precision = began.train.precision
    precision = pick_precision(precision, pick_device(config.device))
    fitted = replace(
        fitted.with_values("train", precision=precision),
        data=replace(config.data, store=str(Path(config.data.store).resolve())),
    )
    if began is not None:
        _check_continues(run, began, fitted, store)
    return fitted


def _began(run: Path) -> RunConfig | None:
    """The configuration of a run that is there already."""
    recipe = run / "recipe.toml"
    return resolve(str(recipe))[0] if recipe.is_file() else None


def _check_continues(run: Path, began: RunConfig, config: RunConfig, store: "TokenStore") -> None:
    """Refuse to go on with a run under settings that would change what it computes, with both values of each."""
    changed = {key: pair for key, pair in differences(began, config).items() if _decides(key)}
    if "model.vocab_size" in changed:
        raise DataError(
            f"{run} was trained with another tokenizer ({began.model.vocab_size} ids) than that of {store.folder} "
            f"({store.vocab_size} ids); give its own store, or another --out"
        )
    if changed:
        told = "".join(f"\n  - {key}: it began with {was!r}, now {now!r}" for key, (was, now) in changed.items())
        longer = "\na longer run is another run: its schedule spans train.steps" if "train.steps" in changed else ""
        raise UsageError(f"{run} holds a run of other settings; set them back or choose another --out:{told}{longer}")


def _decides(key: str) -> bool:
    """Whether a setting decides which numbers a run computes."""
    section, _, name = key.rpartition(".")
    may_change = {"device", "data.store", "model.vocab_multiple"}  # a store's fingerprint may not: that is checked too
    return key not in may_change and (section != "train" or name in DECIDING)


def _told(done: dict[str, Any], config: RunConfig) -> str:
    val = f", validation loss {done['val_loss']:.4f}" if done["val_loss"] is not None else ""
    loss = f", train loss {done['train_loss']:.4f}" if done["train_loss"] is not None else ""
    return f"step {done['step']} of {config.train.steps}{loss}{val}; {done['checkpoint']}"
