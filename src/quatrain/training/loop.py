"""The run: from a store to a run folder, and on from where it stopped.

`Trainer.run` is the loop. Everything in it is a function of the step (rows, learning rate, dropout),
so an interrupted run goes on as if it had never stopped.
"""

import contextlib
import hashlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from quatrain.console import warn
from quatrain.errors import ConfigError, DataError, QuatrainError, Stopped
from quatrain.files import replace_file, writing
from quatrain.inference.config import SamplingConfig
from quatrain.inference.sampling import generate
from quatrain.inference.scoring import data_hash, score
from quatrain.model.config import ModelConfig
from quatrain.model.device import Precision, pick_device, pick_precision
from quatrain.model.gpt import GPT
from quatrain.model.pretrained import layout_of
from quatrain.tokens.config import DataConfig
from quatrain.tokens.loader import Loader
from quatrain.tokens.store import TokenStore
from quatrain.training.checkpoint import (
    TrainerState,
    checkpoint_folder,
    checkpoints,
    newest_good,
    prune,
    read_state,
    remove_leftovers,
    restore,
    save_checkpoint,
)
from quatrain.training.config import OptimConfig, TrainConfig, batch_mistakes
from quatrain.training.metrics import JsonLines, Row
from quatrain.training.optim import build_optimizer
from quatrain.training.progress import Silent, Watcher
from quatrain.training.schedule import learning_rate
from quatrain.training.selftest import check_first_batch
from quatrain.training.signals import StopRequest
from quatrain.training.step import Step

OURS = {"recipe.toml", "metrics.jsonl", "samples.jsonl", "checkpoints", "store"}  # what may lie in a run folder
ROWS_CHECKED = 16  # of the first batch, read again from the files
LEAKED_SHARE = 0.01  # of validation spans found in train: above it a low loss says little
TOO_GOOD = 0.1  # nats per token that no honest validation of text reaches


def train(
    model: ModelConfig,
    optim: OptimConfig,
    data: DataConfig,
    train: TrainConfig,
    run: Path | str,
    recipe: str,
    device: str = "auto",
    stop_at: int | None = None,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Train a GPT on `data.store` into the folder `run`; the same call again goes on where it stopped.

    `recipe` is the resolved configuration as text, written into the run. Weights are drawn from
    `train.seed`, the order of the data from `data.seed`. With `stop_at` the run saves at that step and
    ends; schedules use `train.steps` all the same. Returns the keys of `train --json`. Raises
    `UsageError` for what cannot be run, `QuatrainError` where the loss is not finite, and `Stopped`,
    with the work saved, on SIGINT or SIGTERM.
    """
    store = TokenStore(data.store)
    where = pick_device(device)
    if train.deterministic:
        torch.use_deterministic_algorithms(True)
    if where.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what stays fp32
    network = GPT(model, torch.Generator().manual_seed(train.seed)).to(where)
    loader = Loader(store.train, data, store.eot, where)
    trainer = Trainer(network, loader, store, optim, train, Path(run), watcher or Silent())
    trainer.open_run(recipe)
    return trainer.run(stop_at)


@dataclass
class Progressed:
    """How far a run has come."""

    step: int = 0
    rows: int = 0
    seconds: float = 0.0
    loss: float | None = None
    tokens_per_second: float | None = None


class Trainer:
    """Trains a network on the rows of a loader into a run folder."""

    def __init__(
        self,
        model: GPT,
        loader: Loader,
        store: TokenStore,
        optim: OptimConfig,
        config: TrainConfig,
        run: Path,
        watcher: Watcher | None = None,
    ) -> None:
        mistakes = list(batch_mistakes(config, loader.config.seq_len))
        if loader.config.seq_len > model.config.block_size:
            mistakes.append(f"seq_len {loader.config.seq_len} is above block_size {model.config.block_size}")
        if mistakes:
            raise ConfigError(mistakes)
        self.model = model  # never compiled: evaluation, samples and checkpoints use it
        self.loader = loader
        self.store = store
        self.optim = optim
        self.config = config
        self.folder = run
        self.watcher = watcher or Silent()
        self.optimizer = build_optimizer(model, optim)
        self.precision: Precision = pick_precision(config.precision, model.device)
        compiled = config.compile is True or (config.compile == "auto" and model.device.type == "cuda")
        step_model = cast(torch.nn.Module, torch.compile(model)) if compiled else model
        self.step = Step(step_model, self.optimizer, self.precision, optim.clip, config.seed)
        self.rows_per_step = config.tokens_per_step // loader.config.seq_len
        self.metrics = JsonLines(run / "metrics.jsonl")
        self.samples = JsonLines(run / "samples.jsonl")
        self.at = Progressed()
        self.saved: int | None = None  # the step of the last checkpoint that this process wrote or read
        self.validated: dict[int, float] = {}
        self.val_hash = data_hash(store.val, config.eval_tokens) if config.eval_every else ""

    def open_run(self, recipe: str) -> None:
        """Make the run folder, or put the newest good checkpoint of it back into model and optimizer."""
        present = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        foreign = sorted(name for name in present - OURS if not name.startswith("."))
        if "recipe.toml" not in present and foreign:
            raise DataError(
                f"{self.folder} holds {foreign[0]}, which is not of a run; choose another --out, nothing was touched"
            )
        with writing(self.folder):
            (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)
        checkpoint = newest_good(self.folder, self.watcher.say)
        if checkpoint is not None:
            self._resume(checkpoint)
        replace_file(self.folder / "recipe.toml", recipe.encode())
        for rows in (self.metrics, self.samples):
            rows.cut(-1 if checkpoint is None else self.at.step)
        self.validated = {row["step"]: row["val_loss"] for row in self.metrics.rows() if "val_loss" in row}

    def run(self, stop_at: int | None = None) -> dict[str, Any]:
        """Train to `train.steps` (or `stop_at`); returns the summary. See `train` for what it raises."""
        last = min(self.config.steps, stop_at if stop_at is not None else self.config.steps)
        self.watcher.begin(self.at.step, self.config.steps)
        try:
            with StopRequest() as stop:
                self._check_data()
                self._loop(last, stop)
        finally:
            self.watcher.end()
        if stop and (self.at.step < last or self._validation_is_due()):
            raise Stopped(
                cast(int, stop.signal_number),
                f"stopped by a signal at step {self.at.step} of {self.config.steps}; everything is saved in "
                f"{checkpoint_folder(self.folder, self.at.step)}; the same command goes on from there",
            )
        return self._summary()

    def _loop(self, last: int, stop: StopRequest) -> None:
        while True:
            if self._validation_is_due():
                self._validate(stop)
            if self._save_is_due(last, stop):
                self._save()
            if stop or self.at.step >= last:
                return
            self._train_step()

    def _train_step(self) -> None:
        started = time.perf_counter()
        step, config = self.at.step, self.config
        lr = learning_rate(step, self.optim, config.steps)
        micro_batches = (
            self.loader.batch(self.at.rows + first, config.micro_batch)
            for first in range(0, self.rows_per_step, config.micro_batch)
        )
        self.model.train()
        try:
            result = self.step(step, lr, micro_batches, config.tokens_per_step)
        except torch.OutOfMemoryError as error:
            raise QuatrainError(
                f"step {step + 1}: {self.model.device} has not enough memory for micro_batch {config.micro_batch}; "
                f"give the same command with a smaller --train.micro-batch: the rows of each step stay the same"
            ) from error
        seconds = time.perf_counter() - started
        self.at = Progressed(
            step + 1,
            self.at.rows + self.rows_per_step,
            self.at.seconds + seconds,
            result.loss,
            config.tokens_per_step / seconds,
        )
        row = {
            "step": self.at.step,
            "tokens": self.at.step * config.tokens_per_step,
            "loss": result.loss,
            "lr": lr,
            # Not finite only where fp16 overflowed and the update was skipped.
            "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
            "epoch": round(self.at.rows / self.loader.rows_per_epoch, 4),
            "tokens_per_second": round(config.tokens_per_step / seconds, 1),
            "seconds": round(self.at.seconds, 4),
        }
        self.metrics.append(row)
        self.watcher.trained(row)

    def _validation_is_due(self) -> bool:
        every = self.config.eval_every
        due = every > 0 and (self.at.step % every == 0 or self.at.step == self.config.steps)
        return due and self.at.step not in self.validated

    def _validate(self, stop: StopRequest) -> None:
        """Measure and sample; neither draws from a generator that training uses. A stop request ends it early."""
        data = self.loader.config
        result = score(
            self.model,
            self.store.val,
            data.seq_len,
            data.packing,
            self.store.eot,
            self.config.eval_tokens,
            self.precision,
            lambda: bool(stop),
        )
        if not result.complete:
            return
        if not math.isfinite(result.loss):
            raise QuatrainError(
                f"step {self.at.step}: validation loss is {result.loss}; stopped, the last checkpoint is as good as it "
                f"was. Lower optim.lr or lengthen optim.warmup"
            )
        samples = self._draw_samples()
        row = {
            "step": self.at.step,
            "tokens": self.at.step * self.config.tokens_per_step,
            "val_loss": result.loss,
            "val_tokens": result.tokens,
            "data_hash": self.val_hash,
            "seconds": round(self.at.seconds, 4),
        }
        self.validated[self.at.step] = result.loss
        self.metrics.append(row)
        self.watcher.validated(row)
        if result.loss < TOO_GOOD:
            self.watcher.say(
                f"warning: a validation loss of {result.loss:.4f} nats is too good to be true; "
                f"is the validation text also in train?"
            )
        for sample in samples:
            self.samples.append(sample)
        self.watcher.sampled(samples)

    def _draw_samples(self) -> list[Row]:
        config = self.config
        if not config.samples:
            return []
        prompt = self._sample_prompt()
        settings = SamplingConfig(max_tokens=config.sample_tokens, n=config.samples, seed=config.seed)
        drawn = generate(self.model, self.store.tokenizer, prompt, settings, self.precision)
        return [
            {"step": self.at.step, "sample": number, "prompt": prompt, "text": sample.text, "ids": sample.ids}
            for number, sample in enumerate(drawn)
        ]

    def _sample_prompt(self) -> str:
        """The prompt, or the bare eot where a `char` vocabulary cannot spell it or the model cannot hold it."""
        with contextlib.suppress(DataError):
            if len(self.store.tokenizer.encode(self.config.sample_prompt)) < self.model.config.block_size:
                return self.config.sample_prompt
        return ""

    def _save_is_due(self, last: int, stop: StopRequest) -> bool:
        every = self.config.save_every
        due = bool(stop) or self.at.step >= last or (every > 0 and self.at.step > 0 and self.at.step % every == 0)
        return due and self.at.step != self.saved

    def _save(self) -> None:
        state = TrainerState(
            step=self.at.step,
            rows_consumed=self.at.rows,
            tokens=self.at.step * self.config.tokens_per_step,
            seconds=self.at.seconds,
            data_fingerprint=self.store.fingerprint,
            tokenizer_sha256=self.store.tokenizer.sha256,
            next_batch=self.loader.hash_of(self.at.rows, self.rows_per_step),
            recipe_sha256=hashlib.sha256((self.folder / "recipe.toml").read_bytes()).hexdigest(),
            scaler=self.step.scaler.state_dict(),
        )
        save_checkpoint(self.folder, self.model, self.store.tokenizer, self.optimizer, state)
        self.saved = self.at.step
        prune(self.folder, self.config.keep_last, self.config.keep_every, self._best_saved())

    def _best_saved(self) -> list[int]:
        measured = [step for step, _ in checkpoints(self.folder) if step in self.validated]
        return [min(measured, key=self.validated.__getitem__)] if measured and self.config.keep_best else []

    def _resume(self, checkpoint: Path) -> None:
        state = read_state(checkpoint)
        if state.tokenizer_sha256 != self.store.tokenizer.sha256:
            raise DataError(f"{self.folder} was trained with another tokenizer than that of {self.store.folder}")
        if state.data_fingerprint != self.store.fingerprint:
            raise DataError(
                f"{self.folder} was trained on a store of fingerprint {state.data_fingerprint[:16]}, and "
                f"{self.store.folder} has {self.store.fingerprint[:16]}; give the store it began with, or another --out"
            )
        if state.next_batch != self.loader.hash_of(state.rows_consumed, self.rows_per_step):
            raise DataError(
                f"{checkpoint}: the next batch is not the one that the run was about to read; the data or their order "
                f"changed: give the settings that it began with, or another --out"
            )
        restore(checkpoint, self.model, self.optimizer)
        if state.scaler:
            self.step.scaler.load_state_dict(state.scaler)
        self.at = Progressed(state.step, state.rows_consumed, state.seconds)
        self.saved = state.step
        self.watcher.say(f"resuming from {checkpoint}: step {state.step} of {self.config.steps}")

    def _check_data(self) -> None:
        """What is too good to be true is looked for before it can be believed."""
        if self.at.step < self.config.steps:
            check_first_batch(self.loader, self.store, "train", self.at.rows, min(self.rows_per_step, ROWS_CHECKED))
        share = self.store.facts["splits"]["val"].get("share_in_train", 0.0)
        if share > LEAKED_SHARE:
            warn(f"{share:.1%} of sampled validation spans stand word for word in train: the validation loss flatters")
        if layout_of(self.model.config).architecture is None:
            self.watcher.say("no class of transformers has these switches: checkpoints are model_type 'quatrain'")

    def _summary(self) -> dict[str, Any]:
        rows = self.metrics.rows()
        trained = [row for row in rows if "loss" in row]
        validated = [row for row in rows if "val_loss" in row]
        return {
            "step": self.at.step,
            "tokens": self.at.step * self.config.tokens_per_step,
            "train_loss": trained[-1]["loss"] if trained else None,
            "val_loss": validated[-1]["val_loss"] if validated else None,
            "tokens_per_second": trained[-1]["tokens_per_second"] if trained else None,
            "seconds": round(self.at.seconds, 3),
            "checkpoint": str(checkpoint_folder(self.folder, self.at.step)),
            "stopped": self.at.step < self.config.steps,
        }
