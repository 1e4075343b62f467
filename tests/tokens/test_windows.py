from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.errors import DataError
from quatrain.tokens.store import TokenStream
from quatrain.tokens.windows import coverage, sample_batch, sequential_batches


class CountedCalls:
    """A generator of which nothing but `integers` can be called; it writes down the calls."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.calls: list[tuple[tuple[int, ...], dict[str, int]]] = []

    def integers(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self.rng.integers(*args, **kwargs)


def as_memmap(ids, tmp_path):
    ids.astype("<u2").tofile(tmp_path / "ids.bin")
    return np.memmap(tmp_path / "ids.bin", dtype="<u2", mode="r")


KINDS = {
    "uint16": lambda ids, tmp_path: ids.astype(np.uint16),
    "uint32": lambda ids, tmp_path: ids.astype(np.uint32),
    "int64": lambda ids, tmp_path: ids.astype(np.int64),
    "big-endian": lambda ids, tmp_path: ids.astype(">u2"),
    "every second id of an array": lambda ids, tmp_path: np.repeat(ids, 2)[::2],
    "memmap": as_memmap,
    "stream": lambda ids, tmp_path: TokenStream([ids[:7].astype(np.uint16), ids[7:7], ids[7:].astype(np.uint32)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_sample_batch_is_one_call_of_the_generator_and_int64_copies(kind, tmp_path):
    n, B, T = 50, 6, 8
    ids = np.random.default_rng(1).integers(0, 60_000, n)
    data = KINDS[kind](ids, tmp_path)

    counted = CountedCalls(seed=2)
    x, y = sample_batch(data, B, T, counted)
    assert counted.calls == [((0, n - T), {"size": B})]

    rng = np.random.default_rng(2)  # an independent reading with the same generator
    starts = rng.integers(0, n - T, size=B)
    assert x.tolist() == [ids[s : s + T].tolist() for s in starts]
    assert y.tolist() == [ids[s + 1 : s + T + 1].tolist() for s in starts]
    assert counted.rng.bit_generator.state == rng.bit_generator.state
    assert x.dtype == y.dtype == np.int64
    assert x.shape == y.shape == (B, T)

    before = y.copy()
    x[:] = -1  # writable, and neither y nor the data sees it
    assert np.array_equal(y, before)
    y[:] = -1
    assert np.array_equal(np.asarray(data), ids)


def test_sample_batch_reads_a_split_of_a_store(sonnets):
    x, y = sample_batch(sonnets.train, 4, 32, np.random.default_rng(0))
    starts = np.random.default_rng(0).integers(0, len(sonnets.train) - 32, size=4)
    stream = np.fromfile(next(sonnets.folder.glob("*_train_000000.bin")), dtype="<u2")
    assert x.tolist() == [stream[s : s + 32].tolist() for s in starts]
    assert y.tolist() == [stream[s + 1 : s + 33].tolist() for s in starts]


def test_sample_batch_draws_both_ends_and_every_start_between():
    n, T = 20, 7
    x, y = sample_batch(np.arange(n), 400, T, np.random.default_rng(0))
    assert set(x[:, 0].tolist()) == set(range(n - T))
    assert y.max() == n - 1


def all_rows(data, T):
    return sum(len(x) for x, _ in sequential_batches(data, 1, T))


def test_case_06_a_text_of_block_plus_one_ids_is_exactly_one_sample():
    T = 16
    data = np.arange(T + 1)
    x, y = sample_batch(data, 5, T, np.random.default_rng(0))
    assert x.tolist() == [list(range(T))] * 5
    assert y.tolist() == [list(range(1, T + 1))] * 5
    assert [all_rows(np.arange(n), T) for n in (T + 1, T + 2, 2 * T, 2 * T + 1)] == [1, 1, 1, 2]
    with pytest.raises(ValueError):  # the fault: starts below n - T - 1
        np.random.default_rng(0).integers(0, len(data) - T - 1, size=5)


@pytest.mark.parametrize("n", [0, 1, 16])
def test_case_08_too_short_a_text_is_refused_with_both_numbers(n):
    with pytest.raises(DataError, match=rf"has {n} ids, .* T \+ 1 = 17"):
        sample_batch(np.zeros(n, dtype=np.uint16), 2, 16, np.random.default_rng(0))
    with pytest.raises(DataError, match=rf"has {n} ids, .* 2 x 16 \+ 1 = 33"):
        next(sequential_batches(np.zeros(n, dtype=np.uint16), 2, 16))
    with pytest.raises(DataError, match=rf"has {n} ids, .* T \+ 1 = 17"):
        coverage(n, 16)


@pytest.mark.parametrize("data", [np.zeros((5, 5), dtype=int), np.zeros(9), np.zeros(9, dtype=bool), np.int64(3)])
def test_what_is_not_a_row_of_integers_is_refused_by_shape_and_type(data):
    for read in (lambda: sample_batch(data, 1, 2, np.random.default_rng(0)), lambda: all_rows(data, 2)):
        with pytest.raises(DataError, match=f"{data.ndim}-D of {data.dtype}"):
            read()


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 1),
    B=st.integers(1, 4),
    T=st.integers(1, 12),
)
def test_sequential_batches_read_each_id_once_and_hand_over_the_last_target(sizes, B, T):
    n = sum(sizes)
    stream = TokenStream(np.split(np.arange(n, dtype=np.uint16), np.cumsum(sizes)[:-1]))
    if n < B * T + 1:
        with pytest.raises(DataError):
            next(sequential_batches(stream, B, T))
        return
    batches = list(sequential_batches(stream, B, T))
    full = (n - 1) // (B * T)
    assert np.array_equal(np.ravel([x for x, _ in batches]), np.arange(full * B * T))
    assert np.array_equal(np.ravel([y for _, y in batches]), np.arange(1, full * B * T + 1))
    assert all(x.shape == y.shape == (B, T) and x.dtype == y.dtype == np.int64 for x, y in batches)
    for (_, y), (x, _) in pairwise(batches):
        assert y[-1, -1] == x[0, 0]


def test_sequential_batches_are_writable_copies():
    data = np.arange(9)
    for x, y in sequential_batches(data, 2, 4):
        x += 100
        assert y.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
        y += 100
    assert data.tolist() == list(range(9))


@given(n=st.integers(2, 60), data=st.data())
def test_coverage_is_the_simulated_number_of_windows_that_hold_each_target(n, data):
    T = data.draw(st.integers(1, n - 1))
    counted = np.zeros(n, dtype=np.int64)
    for start in range(n - T):
        counted[start + 1 : start + T + 1] += 1
    found = coverage(n, T)
    assert found.dtype == np.int64
    assert found.tolist() == counted.tolist()


def test_coverage_is_what_sample_batch_draws():
    n, T, B = 12, 5, 20_000
    _, y = sample_batch(np.arange(n), B, T, np.random.default_rng(4))
    share = np.bincount(y.ravel(), minlength=n) / B * (n - T)
    assert np.abs(share - coverage(n, T)).max() < 0.15
