"""The runs of an ablation: every variant at equal tokens over the same seeds, each in a run folder of its own.

A finished run is read, not trained again, so the same call goes on where the last one stopped.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import cast

import torch

from quatrain.errors import ConfigError, Diverged, Stopped, UsageError
from quatrain.files import replace_file
from quatrain.inference.scoring import scored_targets
from quatrain.model.config import ModelConfig
from quatrain.model.device import pick_compile, pick_device
from quatrain.model.pretrained import parameter_count
from quatrain.tokens.config import DataConfig
from quatrain.tokens.loader import Loader
from quatrain.tokens.store import TokenStore
from quatrain.training.checkpoint import checkpoint_folder, read_state, settings_sha256
from quatrain.training.comparison import Comparison, Outcome, Point, compare, noise_of, require_scipy
from quatrain.training.config import OptimConfig, TrainConfig
from quatrain.training.loop import train
from quatrain.training.metrics import JsonLines
from quatrain.training.progress import Silent, Watcher
from quatrain.training.signals import StopRequest

DIVERGED = "diverged.json"  # in a run folder: what was not finite, so that it is not trained again


@dataclass(frozen=True)
class Trial:
    """One run to be: a variant with one seed, resolved. `recipe` is its configuration as text."""

    variant: str
    folder: Path
    model: ModelConfig
    optim: OptimConfig
    data: DataConfig
    train: TrainConfig
    recipe: str
    device: str = "auto"

    @property
    def name(self) -> str:
        """How people call it."""
        return f"{self.variant}, seed {self.train.seed}"


def quick(config: TrainConfig) -> TrainConfig:
    """The same training with nothing beside it: no samples, and no checkpoint but the last."""
    return replace(config, samples=0, save_every=0, keep_last=1, keep_every=0, keep_best=False)


def ablate(
    trials: Sequence[Trial],
    to_loss: float | None = None,
    report: Callable[[str], None] = lambda sentence: None,
    watcher: Watcher | None = None,
) -> Comparison:
    """Train what is not trained yet and compare; the first run's variant is the base, and its noise is told first.

    Raises `ConfigError` before anything is trained where a run cannot be or the runs are no fair comparison,
    `QuatrainError` where the base diverges, and `Stopped`, with the work saved, on a signal. A variant that diverges is
    a row of the table.
    """
    check(trials)
    outcomes: list[Outcome] = []
    bases = [run for run in trials if run.variant == trials[0].variant]
    for run in [*bases, *(run for run in trials if run not in bases)]:
        outcome, news = _outcome(run, watcher or Silent())
        outcomes.append(outcome)
        report(f"[{len(outcomes)}/{len(trials)}] {run.name}: {_told(outcome)}{news}")
        if len(outcomes) == len(bases):
            report(noise_sentence(outcomes, bases[0]))
    return compare(outcomes, to_loss)


def check(trials: Sequence[Trial]) -> None:
    """Raise `ConfigError` with every reason for which these runs cannot be trained here or not be compared."""
    mistakes: dict[str, str] = {}  # by reason, with the first variant that has it
    for run in trials:
        for reason in _reasons(run, trials[0]):
            mistakes.setdefault(reason, f"{run.variant}: {reason}")
    seeds = {run.variant: [one.train.seed for one in trials if one.variant == run.variant] for run in trials}
    usual = seeds[trials[0].variant]
    mistakes |= {
        name: f"{name}: its seeds are {each}, the base's {usual}" for name, each in seeds.items() if each != usual
    }
    if mistakes:
        raise ConfigError(mistakes.values())
    if len(usual) > 1:
        require_scipy()


def _reasons(run: Trial, base: Trial) -> Iterator[str]:
    if run.train.steps * run.train.tokens_per_step != base.train.steps * base.train.tokens_per_step:
        yield "its steps and tokens_per_step are not the base's; an ablation compares at equal tokens"
    if not run.train.eval_every:
        yield "train.eval_every is 0; an ablation compares validation losses: set it above 0"
    try:
        pick_compile(run.train.compile, pick_device(run.device))
    except ConfigError as error:
        yield from error.mistakes
    try:
        store = TokenStore(run.data.store)
        Loader(store.train, run.data, store.eot)
        scored_targets(len(store.val), run.train.eval_tokens)
    except UsageError as error:
        yield str(error)


def noise_sentence(base: Sequence[Outcome], run: Trial) -> str:
    """What the base's seeds alone do."""
    noise = noise_of(base)
    targets = len(TokenStore(run.data.store).val) - 1
    measured = f"over {min(targets, run.train.eval_tokens):,} of the {targets:,} targets of validation"
    if noise.threshold is None:
        told = f"base: validation loss {noise.val_loss:.4f} ({measured})"
        return f"{told}; one seed says nothing of the noise, several (--seeds 3) do"
    return (
        f"noise of the base over {noise.seeds} seeds: validation loss {noise.val_loss:.4f} ± {noise.val_deviation:.4f} "
        f"({measured}), mean of the last {last_steps(run.train.steps)} train losses {noise.train_loss:.4f} ± "
        f"{noise.train_deviation:.4f} (standard deviations); a difference below {noise.threshold:.4f} is noise"
    )


def last_steps(steps: int) -> int:
    """How many last train losses stand for the end of a run: a tenth of them."""
    return max(1, steps // 10)


def _told(outcome: Outcome) -> str:
    if outcome.diverged:
        return f"diverged ({outcome.diverged})"
    return f"validation loss {outcome.curve[-1].loss:.4f}, {outcome.tokens_per_second:,.0f} tokens/s"


def _outcome(run: Trial, watcher: Watcher) -> tuple[Outcome, str]:
    """What a run gave, trained now unless it was before, and a word that says so."""
    parameters = parameter_count(run.model)
    news = " (finished before)"
    message = _diverged(run)
    if not message and not _is_finished(run):
        news = ""
        message = _train(run, watcher)
    if message:
        return Outcome(run.variant, run.train.seed, parameters, diverged=message), news
    metrics = JsonLines(run.folder / "metrics.jsonl")
    trained = metrics.trained()
    outcome = Outcome(
        run.variant,
        run.train.seed,
        parameters,
        tuple(Point(row["step"], row["tokens"], row["val_loss"], row["seconds"]) for row in metrics.validated()),
        fmean(row["loss"] for row in trained[-last_steps(run.train.steps) :]),
        median(row["tokens_per_second"] for row in trained),
    )
    return outcome, news


def _train(run: Trial, watcher: Watcher) -> str:
    """Train a run to its end; returns what was not finite, or nothing. Raises `Stopped` on any signal."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # each variant is compiled anew: past a few, dynamo would give up and run eagerly
    with StopRequest() as stop:
        message = ""
        try:
            train(run.model, run.optim, run.data, run.train, run.folder, run.recipe, run.device, None, watcher)
        except Diverged as error:
            message = str(error)
            replace_file(run.folder / DIVERGED, json.dumps({"message": message}).encode() + b"\n")
    if stop:
        raise Stopped(
            cast(int, stop.signal_number),
            f"stopped by a signal after {run.name}; everything is saved; the same command goes on with the next run",
        )
    return message


def _diverged(run: Trial) -> str:
    try:
        return str(json.loads((run.folder / DIVERGED).read_bytes())["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _is_finished(run: Trial) -> bool:
    """Whether the last step of this very run is saved and validated; anything else `train` continues or refuses."""
    last = checkpoint_folder(run.folder, run.train.steps)
    if not (last / "manifest.json").is_file():
        return False
    state = read_state(last)
    return (
        state.settings_sha256 == settings_sha256(run.model, run.optim, run.data, run.train)
        and state.data_fingerprint == TokenStore(run.data.store).fingerprint
        and any(row["step"] == run.train.steps for row in JsonLines(run.folder / "metrics.jsonl").validated())
    )
