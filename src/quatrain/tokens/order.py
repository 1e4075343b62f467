"""Which window comes next: a pure function of (seed, row).

A row is the number of windows consumed before it, over the whole run and all devices, so a loader's
only state is one integer. An epoch of a split of n ids has k = (n-1) // seq_len windows; row g is
window g % k of epoch g // k.

The arithmetic is part of the format: golden values in the tests keep it from changing.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError
from quatrain.mixing import derive, uniform
from quatrain.tokens.config import Order

Rows = npt.NDArray[np.int64]

ROUNDS = 12  # of the Feistel network; four make it pseudo-random in theory (Luby and Rackoff 1988)
MIN_HALF_BITS = 4  # a tiny domain leaves the network too few distinct permutations
PHASE, PERMUTATION, RANDOM = 1, 2, 3  # what a derived key is for


def windows_per_epoch(n: int, seq_len: int, split: str = "this") -> int:
    """The windows of an epoch, (n-1) // seq_len; raises `DataError` with both numbers where not one window fits."""
    if n < seq_len + 1:
        raise DataError(
            f"the {split} split has {n:,} ids, a window of seq_len {seq_len} needs {seq_len + 1:,}; "
            f"lower data.seq_len or prepare more text"
        )
    return (n - 1) // seq_len


def window_starts(order: Order, n: int, seq_len: int, seed: int, rows: Rows) -> Rows:
    """The position in the stream at which each row's window of seq_len + 1 ids starts, int64, shape of rows."""
    k = windows_per_epoch(n, seq_len)
    if order == "sequential":
        return rows % k * seq_len
    epochs = rows // k
    starts = np.empty_like(rows)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        index = rows[here] % k
        starts[here] = (_shuffled if order == "shuffle" else _random)(n, seq_len, seed, epoch, index)
    return starts


def permute(index: Rows, k: int, key: int) -> Rows:
    """A pseudo-random permutation of 0..k-1, applied to indices, in O(1) memory.

    A balanced Feistel network over the next power of four, repeated until the value falls below k
    (cycle walking; Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).

    >>> sorted(permute(np.arange(5), 5, key=7).tolist())
    [0, 1, 2, 3, 4]
    """
    half = np.uint64(max(MIN_HALF_BITS, ((k - 1).bit_length() + 1) // 2))
    keys = _round_keys(key)
    values = _feistel(index.astype(np.uint64), half, keys)
    outside = np.flatnonzero(values >= k)
    while len(outside):
        values[outside] = _feistel(values[outside], half, keys)
        outside = outside[values[outside] >= k]
    return values.astype(np.int64)


def _shuffled(n: int, seq_len: int, seed: int, epoch: int, index: Rows) -> Rows:
    k = (n - 1) // seq_len
    phase = uniform(derive(seed, epoch, PHASE), (n - 1) % seq_len + 1)
    return phase + seq_len * permute(index, k, derive(seed, epoch, PERMUTATION))


def _random(n: int, seq_len: int, seed: int, epoch: int, index: Rows) -> Rows:
    key = derive(seed, epoch, RANDOM)
    return np.array([uniform(derive(key, i), n - seq_len) for i in index.tolist()], dtype=np.int64)


@lru_cache(maxsize=64)
def _round_keys(key: int) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(derive(key, round_number)) for round_number in range(ROUNDS))


def _feistel(values: npt.NDArray[np.uint64], half: np.uint64, keys: tuple[np.uint64, ...]) -> npt.NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        scrambled = right + key
        scrambled = (scrambled ^ (scrambled >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        scrambled = (scrambled ^ (scrambled >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((scrambled ^ (scrambled >> np.uint64(31))) & mask)
    return (left << half) | right
