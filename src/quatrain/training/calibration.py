"""The speed of a recipe's own steps on this machine. Nothing is written; weights and moments are scratch."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quatrain.model.device import pick_compile
from quatrain.model.gpt import GPT
from quatrain.tokens.loader import Batch, Loader
from quatrain.tokens.store import TokenStore
from quatrain.training.optim import build_optimizer
from quatrain.training.plan import Planned, Speed
from quatrain.training.process import enough_memory, settle
from quatrain.training.step import Step

STEPS = 20
MICRO_STEPS = 2  # of a step that has more: the others take as long as the second


@dataclass
class Clock:
    """Seconds of one step: of its first micro-step, of each further one, and of the update."""

    first: float = 0.0
    further: float = 0.0
    update: float = 0.0

    def step(self, micro_steps: int) -> float:
        """Of a step with so many micro-steps."""
        return self.first + (micro_steps - 1) * self.further + self.update


def calibrate(wanted: Planned, device: torch.device, store: TokenStore | None = None) -> Speed:
    """Run 20 steps after one that warms up; of a step with many micro-steps two are run and the others reckoned."""
    settle(device, wanted.train.deterministic)
    micro_steps = wanted.rows // (wanted.train.micro_batch * wanted.gpus)
    with enough_memory(device, wanted.train.micro_batch):
        network = GPT(wanted.model, torch.Generator().manual_seed(wanted.train.seed)).to(device).train()
        optimizer = build_optimizer(network, wanted.optim)
        compiled = pick_compile(wanted.train.compile, device)
        step = Step(network, optimizer, wanted.precision, wanted.optim.clip, wanted.train.seed, compiled)
        batches = _batches(wanted, device, store)
        count, valid = min(micro_steps, MICRO_STEPS), wanted.train.tokens_per_step // micro_steps
        clocks = [_timed(step, number, batches, count, count * valid, device) for number in range(STEPS + 1)]
    whole = [clock.step(micro_steps) for clock in clocks]
    mean = sum(whole[1:]) / STEPS
    told = f"measured in {STEPS} steps on this machine, {'of random ids' if store is None else 'of the store'}"
    return Speed(whole[0], mean, wanted.train.tokens_per_step / mean, told)


def _timed(step: Step, number: int, batches: Iterator[Batch], count: int, valid: int, device: torch.device) -> Clock:
    """One step of `count` micro-steps; a loss is divided by `valid`."""
    marks: list[float] = []

    def handed_out() -> Iterator[Batch]:
        for _ in range(count):
            marks.append(_now(device))
            yield next(batches)
        marks.append(_now(device))

    step(number, 0.0, handed_out(), valid)  # a rate of 0 takes as long as any other
    ended = _now(device)
    further = marks[2] - marks[1] if count > 1 else 0.0
    return Clock(marks[1] - marks[0], further, ended - marks[-1])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _batches(wanted: Planned, device: torch.device, store: TokenStore | None) -> Iterator[Batch]:
    """Micro-batches without end: of the store in the recipe's order, or of random ids."""
    B, T = wanted.train.micro_batch, wanted.data.seq_len
    if store is None:
        while True:
            ids = torch.randint(wanted.model.vocab_size, (B, T + 1), device=device)
            yield Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), B * T)
    loader = Loader(store.train, wanted.data, store.eot, device)
    row = 0
    while True:
        yield loader.batch(row, B)
        row += B
