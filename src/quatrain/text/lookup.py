"""Sets of 64-bit hashes that many hashes are looked up in at once, a few nanoseconds each."""

import math
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Number = TypeVar("Number", bound=np.integer[Any])

SPARSE = 7  # log2 of the bits of a map for each member, rounded up: at most 1 in 128 of what is foreign gets through
LARGEST_MAP = 26  # log2 of bits: 8 MiB; larger ones let less through, but are slower to look into


class BitMap:
    """A filter: which numbers may be in a set, by one bit for each value of their highest bits."""

    def __init__(self, members: npt.NDArray[Any]) -> None:
        self.log2 = min(math.ceil(math.log2(max(8, len(members)))) + SPARSE, LARGEST_MAP)
        self.shift = members.dtype.type(8 * members.itemsize - self.log2)
        flags = np.zeros(1 << self.log2, dtype=np.bool_)
        flags[members >> self.shift] = True
        self._bytes = np.packbits(flags, bitorder="little")

    def scratch(self, size: int) -> tuple[Places, npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        """Room for `possible` to work in: fresh memory for every block would cost more than the search."""
        return np.empty(size, dtype=np.int64), np.empty(size, dtype=np.uint8), np.empty(size, dtype=np.uint8)

    def possible(self, numbers: npt.NDArray[Any], scratch: Any = None) -> Places:
        """Positions of the numbers that may be members, ascending: all that are, few that are not.

        `numbers` are of the members' dtype, and are overwritten.
        """
        size = len(numbers)
        places, held, bit = (part[:size] for part in scratch or self.scratch(size))
        numbers >>= self.shift
        np.copyto(bit, numbers, casting="unsafe")
        bit &= np.uint8(7)
        np.right_shift(numbers, numbers.dtype.type(3), out=places, casting="unsafe")
        # "wrap" with `out` is the one mode of take that copies nothing more than the answer.
        self._bytes.take(places, out=held, mode="wrap")
        held >>= bit
        held &= np.uint8(1)
        return np.flatnonzero(held.view(np.bool_))


class Lookup:
    """Distinct 64-bit hashes in ascending order, found by their highest bits."""

    def __init__(self, members: Hashes) -> None:
        self.members = members
        self._map = BitMap(members)
        # About one member a bucket, so that a search is one or two looks; `shift` stays below 64 bits.
        self._shift = np.uint64(64 - math.ceil(math.log2(max(2, len(members)))))
        buckets = np.arange(1 << (64 - int(self._shift)), dtype=np.uint64) << self._shift
        self._starts = np.append(np.searchsorted(members, buckets), len(members)).astype(np.int32)

    def find(self, hashes: Hashes) -> tuple[Places, Places]:
        """Positions, ascending, of the hashes that are members, and which member each is."""
        positions = self._map.possible(hashes.copy())
        wanted = hashes[positions]
        bucket = (wanted >> self._shift).astype(np.int64)
        place, end = self._starts[bucket].astype(np.int64), self._starts[bucket + 1]
        member = np.full(len(wanted), -1, dtype=np.int64)
        rest = np.flatnonzero(place < end)
        while len(rest):
            found = self.members[place[rest]] == wanted[rest]
            member[rest[found]] = place[rest[found]]
            rest = rest[~found]
            place[rest] += 1
            rest = rest[place[rest] < end[rest]]
        known = member >= 0
        return positions[known], member[known]


def distinct(ascending: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether each value of a sorted array is the first of its equals."""
    first = np.ones(len(ascending), dtype=np.bool_)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    return first


def ascending(keys: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """The distinct values, sorted."""
    keys = np.sort(keys)
    return keys[distinct(keys)]


def unpaired(keys: Places, size: int) -> tuple[Places, Places]:
    """The two numbers of keys that are first * size + second."""
    first = keys // max(1, size)
    return first, keys - first * size


def mixed(hashes: Hashes) -> Hashes:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014), a bijection, in place."""
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashes ^= hashes >> np.uint64(shift)
        hashes *= np.uint64(multiplier)
    hashes ^= hashes >> np.uint64(31)
    return hashes
