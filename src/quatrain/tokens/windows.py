"""Inputs and targets from a stream: a window of T+1 ids is T training examples.

These functions are the plain readings of a corpus, on any 1-D integer array: random crops and
sequential chunks. Training reads by row through `loader`, which adds the global shuffle.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError
from quatrain.tokens.pieces import IntArray
from quatrain.tokens.store import TokenStream

Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def sample_batch(data: IntArray | TokenStream, B: int, T: int, rng: np.random.Generator) -> Batch:
    """B random crops: `(x, y)`, int64 copies of shape (B, T), y one step ahead of x.

    Starts are uniform over exactly 0 .. n-T-1 (one call of `rng.integers`), so the first and the
    last window can both be drawn and no row is ever short. Fewer than T+1 ids raise `DataError`.

    >>> x, y = sample_batch(np.arange(10, dtype=np.uint16), B=2, T=4, rng=np.random.default_rng(0))
    >>> bool((y == x + 1).all()), x.shape, x.dtype
    (True, (2, 4), dtype('int64'))
    """
    stream = as_stream(data)
    check_length(len(stream), 1, T)
    starts = rng.integers(0, len(stream) - T, size=B)
    windows = stream.gather(starts, T + 1)  # (B, T+1)
    return windows[:, :-1].copy(), windows[:, 1:].copy()


def sequential_batches(data: IntArray | TokenStream, B: int, T: int) -> Iterator[Batch]:
    """One pass in order: each batch reads B*T+1 ids and advances B*T; `(x, y)`, int64, shape (B, T).

    The last target of a batch is the first input of the next. The ids behind the last full batch
    are left out. Fewer than B*T+1 ids raise `DataError`.

    >>> [(x.tolist(), y.tolist()) for x, y in sequential_batches(np.arange(5), B=1, T=2)]
    [([[0, 1]], [[1, 2]]), ([[2, 3]], [[3, 4]])]
    """
    stream = as_stream(data)
    check_length(len(stream), B, T)
    for start in range(0, len(stream) - B * T, B * T):
        ids = stream.read(start, start + B * T + 1).astype(np.int64)
        yield ids[:-1].reshape(B, T).copy(), ids[1:].reshape(B, T).copy()


def coverage(n: int, T: int) -> npt.NDArray[np.int64]:
    """How many of the n-T windows hold target j, for j = 0 .. n-1: min(j, T, n-T, n-j).

    >>> coverage(6, 2).tolist()
    [0, 1, 2, 2, 2, 1]
    """
    check_length(n, 1, T)
    j = np.arange(n, dtype=np.int64)
    return np.minimum(np.minimum(j, T), np.minimum(n - T, n - j))


def as_stream(data: IntArray | TokenStream) -> TokenStream:
    """The data as a stream; raises `DataError` for what is not a 1-D integer array."""
    if isinstance(data, TokenStream):
        return data
    array: npt.NDArray[Any] = np.asanyarray(data)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"ids are a 1-D integer array, this one is {array.ndim}-D of {array.dtype}")
    return TokenStream([array])


def check_length(n: int, B: int, T: int) -> None:
    """Raise `DataError` unless n ids hold B*T+1."""
    if n < B * T + 1:
        needed = f"{B} x {T} + 1 = {B * T + 1:,}" if B > 1 else f"T + 1 = {T + 1:,}"
        raise DataError(f"the data has {n:,} ids, a batch needs {needed}")
