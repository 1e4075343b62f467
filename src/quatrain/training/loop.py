"""The run: from a store to a run folder, and on from where it stopped.

`Trainer.run` is the loop. Everything in it is a function of the step (rows, learning rate, dropout),
so an interrupted run goes on as if it had never stopped.
"""

import contextlib
import itertools
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from quatrain.errors import ConfigError, DataError, Diverged, Stopped
from quatrain.files import replace_file, writing
from quatrain.inference.config import SamplingConfig
from quatrain.inference.sampling import generate
from quatrain.inference.scoring import data_hash, score
from quatrain.model.config import ModelConfig
from quatrain.model.device import Precision, pick_compile, pick_device, pick_precision
from quatrain.model.gpt import GPT
from quatrain.model.layouts import layout_of
from quatrain.tokens.config import DataConfig
from quatrain.tokens.loader import Loader
from quatrain.tokens.store import TokenStore
from quatrain.training.checkpoint import (
    TrainerState,
    check_ours,
    checkpoint_folder,
    checkpoints,
    newest_good,
    prune,
    read_state,
    remove_leftovers,
    restore,
    save_checkpoint,
    settings_sha256,
)
from quatrain.training.config import OptimConfig, TrainConfig, batch_mistakes
from quatrain.training.feed import Feed
from quatrain.training.flops import flops_per_token, peak_flops
from quatrain.training.metrics import JsonLines, Row, data_wait
from quatrain.training.optim import build_optimizer
from quatrain.training.process import enough_memory, settle
from quatrain.training.progress import Silent, Watcher
from quatrain.training.schedule import learning_rate, momentum
from quatrain.training.selftest import check_first_batch
from quatrain.training.signals import StopRequest
from quatrain.training.step import Step
from quatrain.training.task_scores import TaskScores

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
    `UsageError` for what cannot be run, `Diverged` where the loss is not finite, and `Stopped`,
    with the work saved, on SIGINT or SIGTERM.
    """
    store = TokenStore(data.store)
    where = pick_device(device)
    settle(where, train.deterministic)
    loader = Loader(store.train, data, store.eot, where)
    with enough_memory(where, train.micro_batch):
        network = GPT(model, torch.Generator().manual_seed(train.seed)).to(where)
        return Trainer(network, loader, store, optim, train, Path(run), recipe, watcher).run(stop_at)


@dataclass
class Progressed:
    """How far a run has come."""

    step: int = 0
    rows: int = 0
    tokens: int = 0  # targets
    seconds: float = 0.0


class Trainer:
    """Trains a network on the rows of a loader into a run folder.

    `recipe` is written into the folder as recipe.toml. Raises `ConfigError` for settings that do not
    fit together.
    """

    def __init__(
        self,
        model: GPT,
        loader: Loader,
        store: TokenStore,
        optim: OptimConfig,
        config: TrainConfig,
        run: Path,
        recipe: str = "",
        watcher: Watcher | None = None,
    ) -> None:
        mistakes = list(batch_mistakes(config, loader.config.seq_len))
        if loader.config.seq_len > model.config.block_size:
            mistakes.append(f"seq_len {loader.config.seq_len} is above block_size {model.config.block_size}")
        if mistakes:
            raise ConfigError(mistakes)
        self.model = model
        self.loader = loader
        self.store = store
        self.optim = optim
        self.config = config
        self.folder = run
        self.recipe = recipe
        self.watcher = watcher or Silent()
        self.optimizer = build_optimizer(model, optim)
        self.precision: Precision = pick_precision(config.precision, model.device)
        self.step = Step(model, self.optimizer, self.precision, optim.clip, config.seed, self._compiles())
        self.rows_per_step = config.tokens_per_step // loader.config.seq_len
        self.metrics = JsonLines(run / "metrics.jsonl")
        self.samples = JsonLines(run / "samples.jsonl")
        self.at = Progressed()
        self.saved: int | None = None  # the step of the last checkpoint that this process wrote or read
        self.validated: dict[int, float] = {}
        tasks = config.eval_tasks if config.eval_every else ""
        self.tasks = TaskScores(tasks, config.eval_items, store.tokenizer, model.config.block_size)
        self.val_hash = data_hash(store.val, config.eval_tokens) if config.eval_every else ""
        self.settings = settings_sha256(model.config, optim, loader.config, replace(config, precision=self.precision))
        self.flops_per_token = flops_per_token(model.config, loader.config.seq_len)
        self.peak_flops = peak_flops(model.device, self.precision)

    def run(self, stop_at: int | None = None) -> dict[str, Any]:
        """Train to `train.steps` (or `stop_at`) from where the folder is; returns the keys of `train --json`.

        See `train` for what it raises.
        """
        self._open_folder()
        last = min(self.config.steps, stop_at if stop_at is not None else self.config.steps)
        self.watcher.begin(self.at.step, self.config.steps)
        try:
            with StopRequest() as stop, enough_memory(self.model.device, self.config.micro_batch):
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

    def _open_folder(self) -> None:
        """Make the run folder, or put the newest good checkpoint of it back into model and optimizer."""
        check_ours(self.folder)
        with writing(self.folder):
            (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)
        checkpoint = newest_good(self.folder, self.watcher.say)
        if checkpoint is not None:
            self._resume(checkpoint)
        replace_file(self.folder / "recipe.toml", self.recipe.encode())
        for rows in (self.metrics, self.samples):
            rows.cut(-1 if checkpoint is None else self.at.step)
        self.validated = {row["step"]: row["val_loss"] for row in self.metrics.validated()}

    def _compiles(self) -> bool:
        compiles = pick_compile(self.config.compile, self.model.device)
        if self.config.compile == "auto" and self.model.device.type == "cuda" and not compiles:
            self.watcher.warn("no compiler that torch.compile can call: the step runs uncompiled, which is slower")
        return compiles

    def _loop(self, last: int, stop: StopRequest) -> None:
        end = self.at.rows + max(0, last - self.at.step) * self.rows_per_step
        rows = range(self.at.rows, end, self.config.micro_batch)
        with Feed(self.loader, rows, self.config.micro_batch) as feed:
            while True:
                if self._validation_is_due():
                    self._validate(stop)
                if self._save_is_due(last, stop):
                    self._save()
                if stop or self.at.step >= last:
                    return
                self._train_step(feed)

    def _train_step(self, feed: Feed) -> None:
        started, waited = time.perf_counter(), feed.waited
        step, config = self.at.step, self.config
        lr = learning_rate(step, self.optim, config.steps)
        micro_batches = itertools.islice(feed, self.rows_per_step // config.micro_batch)
        valid = self.loader.valid(self.at.rows, self.rows_per_step)
        self.model.train()
        result = self.step(step, lr, micro_batches, valid, momentum(step, self.optim))
        self.optimizer.zero_grad(set_to_none=True)  # validation, samples and saving take the gradients' memory
        seconds = time.perf_counter() - started
        self.at = Progressed(
            step + 1,
            self.at.rows + self.rows_per_step,
            self.at.tokens + valid,
            self.at.seconds + seconds,
        )
        rate = valid / seconds
        row = {
            "step": self.at.step,
            "tokens": self.at.tokens,
            "loss": result.loss,
            "lr": lr,
            # Not finite only where fp16 overflowed and the update was skipped.
            "grad_norm": result.grad_norm if math.isfinite(result.grad_norm) else None,
            "epoch": round(self.at.rows / self.loader.rows_per_epoch, 4),
            "tokens_per_second": round(rate, 1),
            "mfu": round(rate * self.flops_per_token / self.peak_flops, 4) if self.peak_flops else None,
            "data_wait": round((feed.waited - waited) / seconds, 4),
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
            raise Diverged(
                f"step {self.at.step}: validation loss is {result.loss}; stopped, the last checkpoint is as good as it "
                f"was. Lower optim.lr or lengthen optim.warmup"
            )
        tasks = self.tasks.score(self.model, self.store.tokenizer, self.precision, lambda: bool(stop))
        if tasks is None:
            return
        samples = self._draw_samples()
        row: Row = {
            "step": self.at.step,
            "tokens": self.at.tokens,
            "val_loss": result.loss,
            "val_tokens": result.tokens,
            "data_hash": self.val_hash,
            "seconds": round(self.at.seconds, 4),
        } | ({"tasks": tasks} if tasks else {})
        self.validated[self.at.step] = result.loss
        self.metrics.append(row)
        self.watcher.validated(row)
        if result.loss < TOO_GOOD:
            self.watcher.warn(
                f"a validation loss of {result.loss:.4f} nats is too good to be true; "
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
        best = self.config.keep_best and self.validated and self.at.step == min(self.validated, key=self._val_loss)
        due = (
            bool(stop) or best or self.at.step >= last or (every > 0 and self.at.step > 0 and self.at.step % every == 0)
        )
        return due and self.at.step != self.saved

    def _save(self) -> None:
        if not all(bool(weight.isfinite().all()) for weight in self.model.parameters()):
            raise Diverged(
                f"step {self.at.step}: weights are not finite; not saved, the last checkpoint is as good as it was. "
                f"Lower optim.lr or lengthen optim.warmup"
            )
        state = TrainerState(
            step=self.at.step,
            rows_consumed=self.at.rows,
            tokens=self.at.tokens,
            seconds=self.at.seconds,
            data_fingerprint=self.store.fingerprint,
            tokenizer_sha256=self.store.tokenizer.sha256,
            next_batch=self.loader.hash_of(self.at.rows, self.rows_per_step),
            settings_sha256=self.settings,
            scaler=self.step.scaler.state_dict(),
        )
        save_checkpoint(self.folder, self.model, self.store.tokenizer, self.optimizer, state)
        self.saved = self.at.step
        prune(self.folder, self.config.keep_last, self.config.keep_every, self._best_saved())

    def _best_saved(self) -> list[int]:
        measured = [step for step, _ in checkpoints(self.folder) if step in self.validated]
        return [min(measured, key=self._val_loss)] if measured and self.config.keep_best else []

    def _val_loss(self, step: int) -> float:
        return self.validated[step]

    def _resume(self, checkpoint: Path) -> None:
        state = read_state(checkpoint)
        if state.tokenizer_sha256 != self.store.tokenizer.sha256:
            raise DataError(f"{self.folder} was trained with another tokenizer than that of {self.store.folder}")
        if state.data_fingerprint != self.store.fingerprint:
            raise DataError(
                f"{self.folder} was trained on a store of fingerprint {state.data_fingerprint[:16]}, and "
                f"{self.store.folder} has {self.store.fingerprint[:16]}; give the store it began with, or another --out"
            )
        if state.settings_sha256 != self.settings:
            raise DataError(f"{self.folder} began with other settings; set them back, or give another --out")
        if state.next_batch != self.loader.hash_of(state.rows_consumed, self.rows_per_step):
            raise DataError(
                f"{checkpoint}: the next batch is not the one that the run was about to read; the data or their order "
                f"changed: give the settings that it began with, or another --out"
            )
        restore(checkpoint, self.model, self.optimizer)
        if state.scaler:
            self.step.scaler.load_state_dict(state.scaler)
        self.at = Progressed(state.step, state.rows_consumed, state.tokens, state.seconds)
        self.saved = state.step
        self.watcher.say(f"resuming from {checkpoint}: step {state.step} of {self.config.steps}")

    def _check_data(self) -> None:
        """What is too good to be true is looked for before it can be believed."""
        epochs = self.config.steps * self.rows_per_step / self.loader.rows_per_epoch
        self.watcher.say(f"{self.loader.told()}; this run is {epochs:.2f} epochs")
        if self.at.step < self.config.steps:
            check_first_batch(self.loader, self.store, "train", self.at.rows, min(self.rows_per_step, ROWS_CHECKED))
        share = self.store.facts["splits"]["val"].get("share_in_train", 0.0)
        if share > LEAKED_SHARE:
            self.watcher.warn(
                f"{share:.1%} of sampled validation spans stand word for word in train: the validation loss flatters"
            )
        if layout_of(self.model.config).architecture is None:
            self.watcher.say(
                "no class of transformers has these switches: checkpoints are model_type 'quatrain', for quatrain alone"
            )

    def _summary(self) -> dict[str, Any]:
        trained, validated = self.metrics.trained(), self.metrics.validated()
        return {
            "step": self.at.step,
            "tokens": self.at.tokens,
            "train_loss": trained[-1]["loss"] if trained else None,
            "val_loss": validated[-1]["val_loss"] if validated else None,
            "tokens_per_second": trained[-1]["tokens_per_second"] if trained else None,
            "data_wait": data_wait(trained),
            "seconds": round(self.at.seconds, 3),
            "checkpoint": str(checkpoint_folder(self.folder, self.at.step)),
            "stopped": self.at.step < self.config.steps,
        }
