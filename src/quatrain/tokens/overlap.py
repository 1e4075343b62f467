"""How much of validation stands word for word in train: a sample of 32-token spans, compared by hash.

Which spans are sampled is decided by their first two ids alone, so the same span is sampled wherever it
stands; the sample is thinned so that a corpus of any size keeps about a quarter of a million hashes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from quatrain.text.fast import Offsets

Hashes = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]
Ids = npt.NDArray[np.unsignedinteger[Any]]

SPAN = 32  # tokens
KEPT = 1 << 18  # spans to aim at over the whole corpus
BYTES_PER_TOKEN = 4  # of English text, roughly; only sets how thin the sample is
BLOCK = 1 << 15  # ids whose first hashes stay in a core's cache


def thinning(corpus_bytes: int) -> int:
    """The bits of a span's first hash that must be zero for it to be sampled."""
    return (corpus_bytes // (BYTES_PER_TOKEN * KEPT)).bit_length()


class SpanSample:
    """The sampled spans of validation; used from any number of threads at once."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.hashes = np.empty(0, dtype=np.uint64)  # ascending, each as often as it stands in validation
        self._begins = np.zeros(1 << 16, dtype=np.bool_)  # by a hash of their first four ids

    def add(self, ids: Ids, offsets: Offsets) -> None:
        """Take in the spans of documents of validation."""
        starts = sampled_starts(ids, offsets, self.bits)
        self._begins[_beginnings(ids, starts)] = True
        self.hashes = np.sort(np.concatenate([self.hashes, span_hashes(ids, starts)]))

    def found_in(self, ids: Ids, offsets: Offsets) -> Hashes:
        """The hashes of validation's spans that stand in other documents."""
        starts = sampled_starts(ids, offsets, self.bits)
        starts = starts[self._begins[_beginnings(ids, starts)]]  # hashing whole spans is what costs
        hashes = span_hashes(ids, starts)
        return hashes[among(hashes, self.hashes)]

    def share(self, found: Hashes) -> float:
        """The share of the spans whose hashes were found; 0 where no document was long enough."""
        return float(among(self.hashes, np.sort(found)).mean()) if len(self.hashes) else 0.0


def among(hashes: Hashes, ascending: Hashes) -> npt.NDArray[np.bool_]:
    """Whether each hash is one of those in ascending order (`np.isin` takes fifty times as long)."""
    if not len(ascending):
        return np.zeros(len(hashes), dtype=np.bool_)
    places = np.minimum(np.searchsorted(ascending, hashes), len(ascending) - 1)
    held: npt.NDArray[np.bool_] = ascending[places] == hashes
    return held


def sampled_starts(ids: Ids, offsets: Offsets, bits: int) -> Positions:
    """Where the sampled spans begin that lie whole inside one of the documents that offsets bound."""
    below = np.uint16((1 << 16 - min(bits, 16)) - 1)  # the highest bits are those in which every bit counts
    narrow = ids.astype(np.uint16, copy=False)  # of larger ids the lower half: what is sampled need not be rare
    found = [np.empty(0, dtype=np.int64)]
    for start in range(0, len(ids) - SPAN + 1, BLOCK):
        count = min(BLOCK, len(ids) - SPAN + 1 - start)
        part = narrow[start : start + count + 1]
        first = part[:-1] * np.uint16(0x79B1)
        first ^= part[1:] * np.uint16(0xCA77)
        found.append(np.flatnonzero(first <= below) + start)
    starts = np.concatenate(found)
    if bits > 16:  # of over 68 GB of text
        again = ids[starts] * np.uint32(0x9E3779B1) ^ ids[starts + 1] * np.uint32(0x85EBCA77)
        starts = starts[again < np.uint32(1 << 32 - (bits - 16))]
    inside = starts + SPAN <= offsets[np.searchsorted(offsets, starts, side="right")] if len(starts) else starts == 0
    return starts[inside]


def span_hashes(ids: Ids, starts: Positions) -> Hashes:
    """64-bit hashes of the spans that begin at the starts."""
    hashed = np.zeros(len(starts), dtype=np.uint64)
    for offset in range(SPAN):  # FNV-1a over the ids (Fowler, Noll, Vo), wrapping as it should
        hashed = (hashed ^ ids[starts + offset]) * np.uint64(0x100000001B3)
        hashed ^= hashed >> np.uint64(29)
    return hashed


def _beginnings(ids: Ids, starts: Positions) -> npt.NDArray[np.uint16]:
    hashed = np.zeros(len(starts), dtype=np.uint32)
    for offset in range(4):
        hashed = (hashed + ids[starts + offset]) * np.uint32(0x9E3779B1)
    return (hashed >> np.uint32(16)).astype(np.uint16)
