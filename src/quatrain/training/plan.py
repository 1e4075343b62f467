"""What a run will take, before its first step: memory, hours, cost, disk, data, communication, interruptions.

Everything is a formula over the settings and a device's figures; what is assumed is said beside it.
"""

import bisect
import functools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from quatrain.errors import ConfigError
from quatrain.model.config import ModelConfig
from quatrain.model.device import Precision
from quatrain.model.gpt import VOCABULARY_TABLES, is_block_matrix
from quatrain.model.pretrained import memory_shapes, true_shapes
from quatrain.tokens.config import DataConfig
from quatrain.training.config import OptimConfig, TrainConfig
from quatrain.training.flops import flops_per_token
from quatrain.training.machines import GIB, MACHINES, NODE, Machine
from quatrain.training.memory import FP32, Memory, Run, memory_of

Shapes = dict[str, tuple[int, ...]]
Facts = dict[str, Any]

EMBEDDINGS = (*VOCABULARY_TABLES, "transformer.wpe.weight")
CHINCHILLA = 20  # tokens per parameter (Hoffmann et al. 2022)
EPOCHS = 4  # repeated data is nearly as good as new up to here (Muennighoff et al. 2023)
LLAMA3_HOURS = 54 * 24 * 16_384 / 419  # of one GPU between interruptions (Grattafiori et al. 2024)
shapes_in_memory = functools.lru_cache(memory_shapes)
DISK = 1e9  # bytes/s to write a checkpoint
MFU_SOURCE = "430,000 tokens/s of gpt2-rope-swiglu on one H100, told by others; assumed for other GPUs too"
MFU = {"cuda": 0.37, "cpu": 0.5}
CPU_MFU_SOURCE = "124M steps in bf16 reached 0.52 to 0.61 on our CPU; of the matmul peak measured just now"


@dataclass(frozen=True)
class Speed:
    """How long steps take on one device: the first apart, it warms up or compiles."""

    first: float  # seconds
    step: float  # seconds
    tokens_per_second: float
    source: str


@dataclass(frozen=True)
class Planned:
    """The parts of a recipe that a plan needs, on `gpus` devices of one kind; vocab_size and precision resolved."""

    model: ModelConfig
    optim: OptimConfig
    data: DataConfig
    train: TrainConfig
    machine: Machine
    gpus: int = 1
    threads: int = 1

    @property
    def cpu(self) -> bool:
        """Whether it is planned for a processor."""
        return self.machine.link is None

    @property
    def precision(self) -> Precision:
        """That of the matrix products."""
        return self.train.precision

    @property
    def rows(self) -> int:
        """Sequences in a step over all devices."""
        return self.train.tokens_per_step // self.data.seq_len

    @property
    def tokens(self) -> int:
        """Targets of the whole run."""
        return self.train.steps * self.train.tokens_per_step

    def memory(self, micro_batch: int | None = None) -> Memory:
        """What one device holds, for this or the recipe's micro_batch."""
        rows = micro_batch or self.train.micro_batch
        run = Run(
            self.model,
            rows,
            self.data.seq_len,
            itemsize=FP32 if self.precision == "fp32" else 2,
            muon=self.optim.kind == "muon",
            accumulates=self.rows > rows * self.gpus,
            packing=self.data.packing,
            cpu=self.cpu,
            threads=self.threads,
        )
        return memory_of(run, shapes_in_memory(self.model))

    @property
    def usable(self) -> float:
        """Bytes of a device that tensors may take."""
        memory = self.machine.memory
        return math.inf if memory is None else memory * self.machine.usable


def plan(
    wanted: Planned,
    mfu: float | None = None,
    price: float | None = None,
    store: int | None = None,
    speed: Speed | None = None,
) -> Facts:
    """All facts of a plan, as `plan --json` gives them.

    `price` is in USD per device and hour, `store` the ids of the store's training split; `speed` was measured.
    Raises `ConfigError` with all mistakes where no such run can be.
    """
    mistakes = list(impossible(wanted))
    if mistakes:
        raise ConfigError(mistakes)
    shapes = true_shapes(wanted.model)
    total = _count(shapes)
    speed = speed or assumed_speed(wanted, mfu)
    time = _time(wanted, speed, price)
    return {
        "device": wanted.machine.name,
        "gpus": wanted.gpus,
        "precision": wanted.precision,
        "parameters": _parameters(shapes),
        "flops": _flops(wanted),
        "memory": asdict(wanted.memory()) | {"device": wanted.machine.memory, "usable": _finite(wanted.usable)},
        "micro_batch": _micro_batch(wanted),
        "time": time,
        "disk": _disk(wanted, shapes, store),
        "data": _data(wanted, total, store),
        "communication": _communication(wanted, total, time),
        "interruptions": _interruptions(wanted, shapes, time),
    }


def impossible(wanted: Planned) -> Iterator[str]:
    """A sentence for each thing that cannot be, with the nearest that can."""
    rows, gpus, micro_batch = wanted.rows, wanted.gpus, wanted.train.micro_batch
    if rows % gpus:
        yield (
            f"--gpus is {gpus}, and a step of {rows} sequences cannot be shared evenly by them; nearest: "
            f"{_nearest(gpus, _divisors(rows))}"
        )
    elif rows // gpus % micro_batch:
        yield (
            f"train.micro_batch {micro_batch} does not divide the {rows // gpus} sequences of a step on each of {gpus} "
            f"device{'s' * (gpus > 1)}; nearest: {_nearest(micro_batch, _divisors(rows // gpus))}"
        )
    if wanted.memory(1).peak > wanted.usable:
        yield _too_large(wanted)
    elif wanted.memory().peak > wanted.usable:
        largest = "a smaller one" if rows % gpus else largest_micro_batch(wanted)
        yield (
            f"train.micro_batch {micro_batch} needs {_gib(wanted.memory().peak)}, {wanted.machine.name} has "
            f"{_gib(wanted.usable)} for tensors; the largest that fits and divides: {largest}"
        )


def _too_large(wanted: Planned) -> str:
    def peak(layers: int) -> int:
        return replace(wanted, model=replace(wanted.model, n_layer=layers)).memory(1).peak

    layers = bisect.bisect_right(range(1, wanted.model.n_layer), wanted.usable, key=peak)
    elsewhere = {name: replace(wanted, machine=machine) for name, machine in MACHINES.items()}
    others = [name for name, one in elsewhere.items() if one.memory(1).peak <= one.usable]
    instead = [f"--model.n-layer {layers}"] if layers else []
    instead += [f"--gpu {', '.join(others)}"] if others else []
    return (
        f"model of {_count(true_shapes(wanted.model)):,} parameters needs {_gib(wanted.memory(1).peak)} at micro_batch "
        f"1, {wanted.machine.name} has {_gib(wanted.usable)} for tensors; nearest that fits: "
        f"{' or '.join(instead) or 'a smaller n_embd'}"
    )


def largest_micro_batch(wanted: Planned) -> int | None:
    """The largest that fits into the device and divides each device's share of the step."""
    share = wanted.rows // wanted.gpus or 1
    return next((n for n in reversed(_divisors(share)) if wanted.memory(n).peak <= wanted.usable), None)


def assumed_speed(wanted: Planned, mfu: float | None) -> Speed | None:
    """Steps at a share of the device's peak, or None where no peak is known."""
    peak = wanted.machine.peaks.get(wanted.precision)
    if peak is None:
        return None
    share = mfu or MFU["cpu" if wanted.cpu else "cuda"]
    source = "given" if mfu else CPU_MFU_SOURCE if wanted.cpu else MFU_SOURCE
    rate = share * peak / flops_per_token(wanted.model, wanted.data.seq_len)
    step = wanted.train.tokens_per_step / (rate * wanted.gpus)
    return Speed(step, step, rate * wanted.gpus, f"assumed MFU {share:g} ({source})")


def checkpoint_bytes(wanted: Planned, shapes: Shapes) -> tuple[int, int]:
    """Weights and moments of one checkpoint on disk; its tokenizer and descriptions are a few MB more."""
    weights = FP32 * _count(shapes)
    hidden: Shapes = {name: shape for name, shape in shapes.items() if is_block_matrix(name, shape)}
    return weights, 2 * weights - (FP32 * _count(hidden) if wanted.optim.kind == "muon" else 0)


def checkpoints_kept(train: TrainConfig) -> int:
    """Checkpoints in the run folder at its end."""
    saved = {*range(train.save_every, train.steps + 1, train.save_every)} if train.save_every else set()
    ordered = sorted(saved | {train.steps})
    kept = set(ordered[-train.keep_last :])
    kept |= {step for step in ordered if train.keep_every and step % train.keep_every == 0}
    return len(kept) + train.keep_best


def _parameters(shapes: Shapes) -> Facts:
    embeddings = _count({name: shape for name, shape in shapes.items() if name in EMBEDDINGS})
    return {"total": _count(shapes), "embeddings": embeddings, "without_embeddings": _count(shapes) - embeddings}


def _flops(wanted: Planned) -> Facts:
    each = flops_per_token(wanted.model, wanted.data.seq_len)
    return {
        "per_token": each,
        "total": each * wanted.tokens,
        "formula": "6 N + 12 L T C; N without position embeddings and, when untied, the input embedding; "
        "causal halving not applied",
    }


def _micro_batch(wanted: Planned) -> Facts:
    train = wanted.train
    largest = largest_micro_batch(wanted) or train.micro_batch
    return {
        "recipe": train.micro_batch,
        "grad_accum_steps": wanted.rows // (train.micro_batch * wanted.gpus),
        "largest": largest,
        "largest_needs": wanted.memory(largest).peak,
    }


def _time(wanted: Planned, speed: Speed | None, price: float | None) -> Facts:
    if speed is None:
        keys = ("tokens_per_second", "mfu", "seconds_per_step", "hours", "gpu_hours", "cost")
        source = "no peak is known for this device and precision: --calibrate measures, or choose another --gpu"
        return dict.fromkeys(keys) | {"source": source}
    hours = (speed.first + (wanted.train.steps - 1) * speed.step) / 3600
    peak = wanted.machine.peaks.get(wanted.precision)
    used = speed.tokens_per_second / wanted.gpus * flops_per_token(wanted.model, wanted.data.seq_len)
    return {
        "tokens_per_second": speed.tokens_per_second,
        "mfu": used / peak if peak else None,
        "seconds_per_step": speed.step,
        "hours": hours,
        "gpu_hours": hours * wanted.gpus,
        "cost": None if price is None else hours * wanted.gpus * price,
        "source": speed.source,
    }


def _disk(wanted: Planned, shapes: Shapes, store: int | None) -> Facts:
    weights, moments = checkpoint_bytes(wanted, shapes)
    kept = checkpoints_kept(wanted.train)
    id_bytes = 2 if wanted.model.vocab_size <= 1 << 16 else 4
    return {
        "checkpoint": weights + moments,
        "weights": weights,
        "moments": moments,
        "kept": kept,
        "run": kept * (weights + moments),
        "run_while_saving": (kept + 1) * (weights + moments),
        "bytes_per_id": id_bytes,
        "store": id_bytes * (wanted.tokens if store is None else store),
    }


def _data(wanted: Planned, parameters: int, store: int | None) -> Facts:
    return {
        "tokens": wanted.tokens,
        "tokens_per_parameter": wanted.tokens / parameters,
        "chinchilla_tokens": CHINCHILLA * parameters,
        "store_tokens": store,
        "epochs": wanted.tokens / store if store else None,
        "many_epochs": bool(store) and wanted.tokens > EPOCHS * (store or 0),
    }


def _communication(wanted: Planned, parameters: int, time: Facts) -> Facts | None:
    """A ring all-reduce of fp32 gradients, once a step; it runs beside the backward, so that hours leave it out."""
    n, machine = wanted.gpus, wanted.machine
    if n == 1:
        return None
    sent = round(2 * (n - 1) / n * FP32 * parameters)
    speed = machine.link if n <= NODE else machine.network
    seconds = sent / speed if speed else None
    step = time["seconds_per_step"]
    return {
        "bytes_per_step": sent,
        "bytes_per_second": speed,
        "seconds_per_step": seconds,
        "share_of_step": seconds / step if seconds and step else None,
        "over": "the link within a machine" if n <= NODE else f"the network between machines of {NODE}",
    }


def _interruptions(wanted: Planned, shapes: Shapes, time: Facts) -> Facts | None:
    """Expected failures at Llama 3's rate, what each loses, and the interval that loses least (Young 1974)."""
    if time["hours"] is None or wanted.cpu:
        return None
    between = LLAMA3_HOURS / wanted.gpus
    saving = sum(checkpoint_bytes(wanted, shapes)) / DISK
    step = time["seconds_per_step"]
    every = wanted.train.save_every or wanted.train.steps
    return {
        "expected": time["hours"] / between,
        "hours_between": between,
        "lost_hours_each": every * step / 2 / 3600,
        "seconds_to_save": saving,
        "best_save_every": min(wanted.train.steps, max(1, round(math.sqrt(2 * saving * between * 3600) / step))),
    }


def _count(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _nearest(value: int, allowed: list[int]) -> str:
    below = [n for n in allowed if n < value][-1:]
    above = [n for n in allowed if n > value][:1]
    return " or ".join(map(str, below + above))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
