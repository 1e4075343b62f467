"""The feed gives what the loader gives, ahead of time, and leaves nothing behind."""

import gc
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quatrain.errors import DataError
from quatrain.tokens.config import DataConfig
from quatrain.tokens.loader import Batch, Loader
from quatrain.tokens.store import TokenStream
from quatrain.training import feed as feed_module
from quatrain.training.feed import Feed

PATIENCE = 20.0  # seconds, after which what should have happened never will


def loader(device: str = "cpu", **settings: Any) -> Loader:
    ids = np.random.default_rng(5).integers(0, 50, 1001).astype(np.uint16)
    return Loader(TokenStream(np.split(ids, [300, 301])), DataConfig(seq_len=8, **settings), 0, device)


def slow(source: Loader, monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> Loader:
    """The loader, but something happens in its thread before each batch is read; told the first row."""
    right = source.batch

    def batch(first_row: int, count: int, device: torch.device | None = None) -> Batch:
        act(first_row)
        return right(first_row, count, device)

    monkeypatch.setattr(source, "batch", batch)
    return source


def same(one: Batch, other: Batch) -> bool:
    tensors, others = one.tensors(), other.tensors()
    alike = all(torch.equal(tensors[name], others[name]) for name in tensors)
    return alike and tensors.keys() == others.keys() and one.valid == other.valid


def eventually(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@given(
    first=st.integers(0, 400),
    micro=st.integers(1, 20),
    count=st.integers(0, 80),
    packing=st.sampled_from(["concat", "document"]),
    order=st.sampled_from(["shuffle", "sequential", "random"]),
)
def test_the_batches_are_those_of_the_loader(first: int, micro: int, count: int, packing: str, order: str) -> None:
    source = loader(packing=packing, order=order)
    rows = range(first, first + count * micro, micro)
    with Feed(source, rows, micro) as feed:
        found = list(feed)
    assert len(found) == count
    fresh = loader(packing=packing, order=order)
    assert all(same(batch, fresh.batch(row, micro)) for row, batch in zip(rows, found, strict=True))


@pytest.mark.parametrize("error", [DataError("a.bin: ends early"), SystemExit(3), OSError(5, "Input/output error")])
def test_what_goes_wrong_in_the_thread_is_raised_as_itself_where_its_batch_was_due(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(first: int) -> None:
        if first == 6:
            raise error

    taken: list[Batch] = []
    with Feed(slow(loader(), monkeypatch, fail), range(0, 100, 2), 2) as feed, pytest.raises(type(error)) as caught:
        taken.extend(feed)
    assert caught.value is error
    assert len(taken) == 3
    assert all(same(batch, loader().batch(2 * number, 2)) for number, batch in enumerate(taken))


def test_an_error_of_the_caller_ends_the_thread_however_much_was_asked_for() -> None:
    feed = Feed(loader(), range(0, 10**9, 2), 2)
    with pytest.raises(ZeroDivisionError), feed:
        1 / len([next(feed)][1:])


def test_ctrl_c_while_waiting_for_data_interrupts_at_once_and_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    main = threading.main_thread().ident
    assert main is not None
    ready, interrupted = threading.Event(), threading.Event()

    def stall(first: int) -> None:
        if first == 4:
            assert ready.wait(PATIENCE)
            signal.pthread_kill(main, signal.SIGINT)
            assert interrupted.wait(PATIENCE)  # no batch comes before the interrupt has gone through

    with Feed(slow(loader(), monkeypatch, stall), range(0, 1000, 2), 2) as feed:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            ready.set()
            for _ in feed:
                pass
        interrupted.set()


def test_few_batches_are_alive_and_few_rows_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MOST_AHEAD", 3)
    made: list[weakref.ref[Batch]] = []
    source = loader()
    right = source.batch

    def batch(first_row: int, count: int, device: torch.device | None = None) -> Batch:
        batch = right(first_row, count, device)
        made.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(source, "batch", batch)
    with Feed(source, range(0, 200, 2), 2) as feed:
        assert feed.depth == 3
        for taken in range(1, 51):
            next(feed)
            assert eventually(lambda: len(made) >= taken + 3)  # noqa: B023
            assert len(made) == taken + 3
            assert sum(one() is not None for one in made) <= 3 + 1
    gc.collect()
    assert all(one() is None for one in made)


@pytest.mark.parametrize(("micro", "seq_len", "depth"), [(1, 8, 32), (64, 1024, 8), (512, 1024, 2), (4096, 1024, 2)])
def test_what_is_read_ahead_is_bounded_in_tokens(micro: int, seq_len: int, depth: int) -> None:
    source = Loader(TokenStream([np.zeros(2000, dtype=np.uint16)]), DataConfig(seq_len=seq_len), 0)
    assert Feed(source, [], micro).depth == depth


def test_rows_are_advised_before_they_are_read_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []
    source = slow(loader(), monkeypatch, lambda first: done.append(("read", first)))
    monkeypatch.setattr(source, "advise", lambda first, count: done.append(("advise", first)))
    rows = range(0, 100, 2)
    with Feed(source, rows, 2) as feed:
        assert len(list(feed)) == 50
    assert [first for what, first in done if what == "advise"] == list(rows)
    assert [first for what, first in done if what == "read"] == list(rows)
    assert all(done.index(("advise", first)) < done.index(("read", first)) for first in rows)


def test_the_seconds_that_next_stood_still_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 10.5, 20.0, 20.25])
    monkeypatch.setattr(feed_module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    with Feed(loader(), range(0, 4, 2), 2) as feed:
        assert feed.waited == 0.0
        assert len(list(feed)) == 2
        assert feed.waited == 0.75


class LateCopies:
    """A device whose copies are done late: it reads pinned memory when the event comes, not when it is told to."""

    def __init__(self, device: torch.device) -> None:
        self.begun = threading.Event()
        self.pinned: list[torch.Tensor] = []
        self.work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.engine = threading.Thread(target=self._run)
        self.engine.start()

    def begin(self) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.begun.set()

    def pinned_like(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.begun.is_set()
        self.pinned.append(torch.empty_like(tensor))
        return self.pinned[-1]

    def start(self, batch: Batch) -> tuple[Batch, Any]:
        sent, copied = batch.map(lambda tensor: torch.full_like(tensor, -7)), threading.Event()

        def copy() -> None:
            time.sleep(0.002)
            for name, tensor in sent.tensors().items():
                tensor.copy_(batch.tensors()[name])
            copied.set()

        self.work.put(copy)
        return sent, SimpleNamespace(synchronize=lambda: copied.wait(PATIENCE))

    def _run(self) -> None:
        while (copy := self.work.get()) is not None:
            copy()

    def end(self) -> None:
        self.work.put(None)
        self.engine.join()


@pytest.mark.parametrize("packing", ["concat", "document"])
def test_pinned_memory_is_filled_again_only_behind_the_event_of_its_copy(
    monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    monkeypatch.setattr(feed_module, "Copies", LateCopies)
    monkeypatch.setattr(feed_module, "MOST_AHEAD", 3)
    with Feed(loader("cuda", packing=packing), range(0, 80, 4), 4) as feed:
        copies: Any = feed._copies
        try:
            found = list(feed)
        finally:
            copies.end()
    assert len(found) == 20
    fresh = loader(packing=packing)
    assert all(same(batch, fresh.batch(4 * number, 4)) for number, batch in enumerate(found))
    tensors = 2 if packing == "concat" else 4
    assert len(copies.pinned) == 3 * tensors  # a ring, whatever the number of batches


def test_without_waiting_for_the_event_that_test_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(LateCopies):
        def start(self, batch: Batch) -> tuple[Batch, Any]:
            return super().start(batch)[0], SimpleNamespace(synchronize=lambda: None)

    monkeypatch.setattr(feed_module, "Copies", Careless)
    monkeypatch.setattr(feed_module, "MOST_AHEAD", 2)
    with Feed(loader("cuda"), range(0, 80, 4), 4) as feed:
        copies: Any = feed._copies
        try:
            found = list(feed)
        finally:
            copies.end()
    assert not all(same(batch, loader().batch(4 * number, 4)) for number, batch in enumerate(found))


def test_pinned_memory_follows_the_shape_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "Copies", LateCopies)
    slot = feed_module.Slot(torch.device("cuda"), LateCopies(torch.device("cuda")))  # type: ignore[arg-type]
    copies: Any = slot.copies
    copies.begun.set()
    try:
        for rows in (3, 3, 5):
            batch = loader().batch(rows, rows)
            assert same(slot.fill(batch), batch)
        assert [len(tensor) for tensor in copies.pinned] == [3, 3, 5, 5]
    finally:
        copies.end()
