"""How a network is changed: the optimizer, its schedule, and the run around them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from quatrain.settings import Settings, option

Schedule = Literal["constant", "cosine", "wsd"]

# The settings of [train] that decide which numbers a run computes: they may not change when it goes on.
DECIDING = frozenset({"steps", "tokens_per_step", "precision", "seed"})


@dataclass(frozen=True)
class OptimConfig(Settings):
    """The `[optim]` section of a recipe."""

    kind: Literal["adamw", "muon"] = option(
        "adamw", "adamw (Loshchilov and Hutter 2019), or muon: that for the blocks' matrices, adamw for the rest"
    )
    lr: float = option(6e-4, "highest learning rate")
    min_lr: float = option(0.0, "learning rate at the end of cosine and wsd")
    schedule: Schedule = option("cosine", "constant, cosine, or wsd: warmup, stable, linear cooldown")
    warmup: int = option(0, "steps of linear warmup", "steps")
    cooldown: int = option(0, "last steps of wsd, in which the rate falls; 0: a fifth of train.steps", "steps")
    weight_decay: float = option(0.1, "decay of parameters of two or more dimensions")
    betas: tuple[float, float] = option((0.9, 0.95), "decay rates of the moments")
    momentum: float = option(0.95, "of muon")
    momentum_warmup: int = option(300, "steps in which muon's momentum rises from 0.85", "steps")
    eps: float = option(1e-8, "added to the root of the second moment")
    clip: float = option(1.0, "largest norm of the gradient; 0: no clipping")

    def mistakes(self) -> Iterator[str]:
        """Sentences about values that cannot be optimized with."""
        yield from self.at_least(
            0, ["lr", "min_lr", "warmup", "cooldown", "momentum_warmup", "weight_decay", "eps", "clip"]
        )
        if self.schedule != "constant" and self.min_lr > self.lr:
            yield f"min_lr {self.min_lr} is above lr {self.lr}"
        if not 0 <= self.momentum < 1:
            yield f"momentum is {self.momentum}, it must be at least 0 and below 1"
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"betas are {list(self.betas)}, each must be at least 0 and below 1"


@dataclass(frozen=True)
class TrainConfig(Settings):
    """The `[train]` section of a recipe."""

    steps: int = option(1000, "optimizer steps; the schedule's length", "steps")
    tokens_per_step: int = option(
        524_288, "targets in one optimizer step over all devices; in pad and best_fit, padding counted", "tokens"
    )
    micro_batch: int = option(16, "sequences in one forward on one device", "sequences")
    eval_every: int = option(250, "steps between validations; 0: never", "steps")
    eval_tokens: int = option(1_310_720, "targets of one validation; above the split: the whole split", "tokens")
    eval_tasks: str = option(
        "", "tasks scored at each validation, with commas between them, as evaluate --task takes them"
    )
    eval_items: int = option(0, "only the first questions of each task; 0: all", "questions")
    save_every: int = option(250, "steps between checkpoints; 0: only the last step", "steps")
    keep_last: int = option(3, "newest checkpoints to keep", "checkpoints")
    keep_every: int = option(0, "also keep checkpoints whose step is a multiple of this; 0: none", "steps")
    keep_best: bool = option(False, "also keep the checkpoint of the lowest validation loss")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "auto", "of the matrix products; auto: bf16 where the hardware has it"
    )
    compile: bool | Literal["auto"] = option("auto", "torch.compile of the step; auto: on CUDA only")
    deterministic: bool = option(False, "refuse operations whose result may differ between equal runs (CUDA)")
    seed: int = option(42, "seed of initial weights, dropout and samples")
    samples: int = option(4, "samples at each validation", "samples")
    sample_tokens: int = option(32, "ids of each sample", "tokens")
    sample_prompt: str = option("Hello, I'm a language model,", "prompt of the samples; empty: a bare eot")

    def mistakes(self) -> Iterator[str]:
        """Sentences about values that no run can have."""
        yield from self.at_least(1, ["steps", "tokens_per_step", "micro_batch", "eval_tokens", "keep_last"])
        yield from self.at_least(
            0, ["eval_every", "eval_items", "save_every", "keep_every", "samples", "sample_tokens"]
        )
        yield from self.seed_in_range()


def batch_mistakes(train: TrainConfig, seq_len: int, world_size: int = 1) -> Iterator[str]:
    """A sentence where tokens_per_step is not a whole number of micro-batches, with the nearest right values."""
    unit = train.micro_batch * seq_len * world_size
    if unit > 0 and train.tokens_per_step % unit:
        below, above = train.tokens_per_step // unit * unit, -(-train.tokens_per_step // unit) * unit
        nearest = f"{below} or {above}" if below else f"{above}"
        yield (
            f"train.tokens_per_step {train.tokens_per_step} is not a multiple of micro_batch {train.micro_batch} "
            f"x seq_len {seq_len} x {world_size} device{'s' if world_size > 1 else ''} = {unit}; nearest: {nearest}"
        )
