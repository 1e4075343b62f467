"""Data gathered ahead: while a micro-batch is computed, a thread reads those that follow.

What is handed out is what `loader.batch` gives, in the same order; only the time at which it is read differs.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from quatrain.tokens.loader import Batch, Loader

AHEAD = 1 << 19  # tokens gathered ahead: 8 MB of inputs and targets
MOST_AHEAD = 32  # micro-batches, however small
HOST = torch.device("cpu")


class Feed:
    """An iterator over the micro-batches that begin at `first_rows`, on the loader's device.

    At most `depth` of them wait; as many again are advised to the system, so that a disk reads them
    before the thread does. What goes wrong in the thread is raised, as itself, by the `next` that
    would have given its batch. Leaving the `with` block ends the thread.
    """

    def __init__(self, loader: Loader, first_rows: Iterable[int], micro_batch: int) -> None:
        self.loader = loader
        self.micro_batch = micro_batch
        self.depth = max(2, min(MOST_AHEAD, AHEAD // (micro_batch * loader.config.seq_len)))
        self.waited = 0.0  # seconds that `next` stood still
        self._gathered, self._advised = itertools.tee(first_rows)
        self._coming: deque[tuple[Future[Batch], Slot]] = deque()
        self._copies = Copies(loader.device) if loader.device.type == "cuda" else None

    def __enter__(self) -> Self:
        self._thread = ThreadPoolExecutor(1, "feed", self._copies.begin if self._copies else None)
        for first in itertools.islice(self._advised, self.depth):
            self._thread.submit(self.loader.advise, first, self.micro_batch)
        for _ in range(self.depth):
            self._ask(Slot(self.loader.device, self._copies))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._coming.clear()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._coming:
            raise StopIteration
        future, slot = self._coming.popleft()
        started = time.perf_counter()
        batch = future.result()
        self.waited += time.perf_counter() - started
        batch = slot.send(batch)
        self._ask(slot)
        return batch

    def _ask(self, slot: "Slot") -> None:
        """Have the thread fill a slot with the micro-batch that is next, if there is one."""
        first = next(self._gathered, None)
        if first is not None:
            self._coming.append((self._thread.submit(self._gather, slot, first, next(self._advised, None)), slot))

    def _gather(self, slot: "Slot", first: int, advised: int | None) -> Batch:
        if advised is not None:
            self.loader.advise(advised, self.micro_batch)
        return slot.fill(self.loader.batch(first, self.micro_batch, HOST))


class Slot:
    """The place of one batch on its way to a device; without `copies`, the device computes where it was gathered."""

    def __init__(self, device: torch.device, copies: "Copies | None") -> None:
        self.device = device
        self.copies = copies
        self._pinned: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def fill(self, batch: Batch) -> Batch:
        """The batch in pinned memory, once what was there before has been copied; called by the thread."""
        if self.copies is None:
            return batch
        if self._copied is not None:
            self._copied.synchronize()
        pinned: dict[str, Any] = {
            name: self._pin(name, tensor, self.copies) for name, tensor in batch.tensors().items()
        }
        return replace(batch, **pinned)

    def send(self, batch: Batch) -> Batch:
        """The batch on the device."""
        if self.copies is None:
            return batch.map(lambda tensor: tensor.to(self.device))
        sent, self._copied = self.copies.start(batch)
        return sent

    def _pin(self, name: str, tensor: torch.Tensor, copies: "Copies") -> torch.Tensor:
        pinned = self._pinned.get(name)
        if pinned is None or pinned.shape != tensor.shape:
            pinned = self._pinned[name] = copies.pinned_like(tensor)
        np.copyto(pinned.numpy(), tensor.numpy())  # in this thread: torch would wake as many as it computes with
        return pinned


class Copies:
    """Copies from pinned memory to a CUDA device, on a stream of their own: they do not wait for the computation."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here

    def begin(self) -> None:
        """To be called first in a thread that pins: it begins on device 0, and pinned memory belongs to a device."""
        torch.cuda.set_device(self.stream.device)

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned memory of a tensor's shape and dtype."""
        return torch.empty_like(tensor, pin_memory=True)

    def start(self, batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        """The batch on the device, and the event behind its copy, for which the computation from here on waits."""
        # Blocking: the thread that waits for it must not keep a core busy.
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            sent = batch.map(lambda tensor: tensor.to(self.stream.device, non_blocking=True))
            copied.record(self.stream)
        computing = torch.cuda.current_stream(self.stream.device)
        computing.wait_event(copied)
        for tensor in sent.tensors().values():
            tensor.record_stream(computing)  # its memory came from the other stream and must not go back too early
        return sent, copied
