"""quatrain ablate: a ladder of switches, several seeds, mean, spread and p-value."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from quatrain.console import say
from quatrain.errors import ConfigError, DataError, UsageError
from quatrain.recipes.config import RunConfig
from quatrain.recipes.resolve import data_is_missing, differences, resolve, to_toml
from quatrain.recipes.switches import Variant, ladder

if TYPE_CHECKING:
    from quatrain.tokens.store import TokenStore
    from quatrain.training.ablation import Trial

MARK = "ablation.toml"  # the base's recipe, in a folder that an ablation made
MAY_CHANGE = {"device", "data.store", "train.micro_batch", "train.compile"}  # of an ablation that goes on
OWN = ("--switch", "--seeds", "--product", "--data", "--out", "--to-loss", "--device", "--json")


def ablate(
    recipe: str,
    *settings: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    switch: Annotated[list[str] | None, Parameter(negative=())] = None,
    seeds: int = 3,
    product: Annotated[bool, Parameter(negative=())] = False,
    data: Path | None = None,
    out: Path | None = None,
    to_loss: float | None = None,
    device: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> dict[str, Any]:
    """Train a recipe and its variants at equal tokens, and tell which differences are more than noise.

    Parameters
    ----------
    recipe
        A built-in name (see: quatrain recipes) or a .toml file: the base. `--section.key value` overrides it.
    switch
        KEY=VALUE,VALUE: a setting and what to try for it (optim alone is optim.kind). Again for another setting.
    seeds
        Runs of each variant: the recipe's train.seed and data.seed, then those plus 1, plus 2 ...
    product
        Train every combination of the switches' values instead of one change at a time.
    data
        Folder of the token store.
    out
        Folder of the ablation: absent, empty, or our own. Default: runs/ablate-RECIPE.
    to_loss
        Tell tokens and seconds to this validation loss. Default: the base's mean at its end.
    device
        auto, cpu, cuda, cuda:N or mps.
    json
        Print one JSON object as the last line of stdout; words for people go to stderr.

    """
    extra: dict[str, Any] = {} if data is None else {"data.store": str(data.resolve())}
    if device is not None:
        extra["device"] = device
    variants = _variants(recipe, settings, switch or [], product, extra, list(_mistakes(seeds, to_loss)))
    folder = out or Path("runs") / f"ablate-{Path(recipe).stem}"
    variants = _fitted(variants, folder)
    trials = [_trial(variant, number, folder) for variant in variants for number in range(seeds)]
    from quatrain.training.ablation import ablate as run_ablation
    from quatrain.training.ablation import check
    from quatrain.training.progress import BarWatcher
    from quatrain.web.ladder import facts, markdown, write

    check(trials)
    _claim(folder, variants[0].config)
    say(f"{recipe} and {_count(len(variants) - 1, 'variant')} x {_count(seeds, 'seed')}: {_tokens(trials)}")
    comparison = run_ablation(trials, to_loss, say, BarWatcher())
    told = {"recipe": recipe, "out": str(folder), "seeds": [run.train.seed for run in trials[:seeds]]}
    files = write(folder, comparison, told | _conditions(variants[0].config))
    say("\n" + markdown(comparison))
    say(f"written: {', '.join(map(str, files))}")
    return facts(comparison, told | _conditions(variants[0].config))


def _mistakes(seeds: int, to_loss: float | None) -> Iterator[str]:
    if seeds < 1:
        yield f"--seeds is {seeds}, it must be at least 1"
    if to_loss is not None and not (math.isfinite(to_loss) and to_loss > 0):
        yield f"--to-loss is {to_loss}, it must be above 0"


def _variants(
    recipe: str,
    settings: tuple[str, ...],
    switches: list[str],
    product: bool,
    extra: dict[str, Any],
    mistakes: list[str],
) -> list[Variant]:
    """The ladder; what is wrong with it is told together with the mistakes found before."""
    try:
        variants, named = ladder(recipe, settings, switches, product, extra, OWN)
    except ConfigError as error:
        raise ConfigError([*mistakes, *error.mistakes]) from error
    if mistakes:
        raise ConfigError(mistakes)
    if not variants[0].config.data.store:
        raise data_is_missing("ablate", named)
    return variants


def _fitted(variants: list[Variant], folder: Path) -> list[Variant]:
    """The variants with what the store, the device and an ablation that goes on decide written into them."""
    from quatrain.tokens.store import TokenStore

    store = TokenStore(variants[0].config.data.store)
    began = _began(folder)
    fitted = [Variant(name, _fit(name, config, store, began)) for name, config in variants]
    changed = differences(began, fitted[0].config) if began else {}
    told = "".join(f"\n  - {key}: it began with {was!r}, now {now!r}" for key, (was, now) in changed.items())
    if changed.keys() - MAY_CHANGE:
        raise UsageError(f"{folder} holds an ablation of another base; set it back or choose another --out:{told}")
    return fitted


def _fit(name: str, config: RunConfig, store: "TokenStore", began: RunConfig | None) -> RunConfig:
    from quatrain.model.device import pick_device, pick_precision
    from quatrain.training.ablation import quick

    fitted = config.for_vocabulary(store.vocab_size)
    precision = config.train.precision
    if precision == "auto" and began is not None:
        precision = began.train.precision
    try:
        precision = pick_precision(precision, pick_device(config.device))
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error
    fitted = fitted.with_values("data", store=str(Path(config.data.store).resolve()))
    return fitted.with_values("train", **vars(quick(config.train)) | {"precision": precision})


def _began(folder: Path) -> RunConfig | None:
    """The base of an ablation that is in the folder already; raises `DataError` for a folder of something else."""
    if (folder / MARK).is_file():
        return resolve(str(folder / MARK))[0]
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: a file; --out must be a folder that is absent, empty or our own")
    foreign = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if foreign:
        raise DataError(f"{folder} holds {foreign[0]} and is no ablation; choose another --out, nothing was touched")
    return None


def _claim(folder: Path, base: RunConfig) -> None:
    from quatrain.files import replace_file, writing

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / MARK, to_toml(base, "The base of an ablation; the folders hold its runs.").encode())


def _trial(variant: Variant, number: int, folder: Path) -> "Trial":
    """A variant with its seed of that number, counted from 0."""
    from quatrain.training.ablation import Trial

    seed = variant.config.train.seed + number
    config = variant.config.with_values("train", seed=seed)
    config = config.with_values("data", seed=variant.config.data.seed + number)
    run = folder / _slug(variant.name) / f"seed_{seed}"
    sections = (config.model, config.optim, config.data, config.train)
    return Trial(variant.name, run, *sections, to_toml(config, f"{variant.name}, of an ablation"), config.device)


def _slug(name: str) -> str:
    """A variant's name as that of a folder."""
    return re.sub(r"[^\w.,=+\[\]-]", "_", name.replace(" + ", "+"))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _tokens(trials: list["Trial"]) -> str:
    train = trials[0].train
    steps = f"{train.steps:,} steps of {train.tokens_per_step:,} tokens"
    return f"{_count(len(trials), 'run')} of {steps} on {trials[0].data.store}"


def _conditions(config: RunConfig) -> dict[str, Any]:
    """What every number of the table depends on."""
    from quatrain.tokens.store import TokenStore
    from quatrain.training.ablation import last_steps

    store, train = TokenStore(config.data.store), config.train
    return {
        "steps": train.steps,
        "tokens_per_step": train.tokens_per_step,
        "tokens": train.steps * train.tokens_per_step,
        "val_tokens": min(len(store.val) - 1, train.eval_tokens),
        "val_split_tokens": len(store.val) - 1,
        "last_train_losses": last_steps(train.steps),
        "precision": train.precision,
        "fingerprint": store.fingerprint,
    }
