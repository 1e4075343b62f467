"""How much of validation stands word for word in train: a sample of 32-token spans, compared by hash.

Which spans are sampled is decided by their first two ids alone, so the same span is sampled wherever it
stands; the sample is thinned so that a corpus of any size keeps about a million hashes.
"""

import numpy as np
import numpy.typing as npt

from quatrain.text.fast import Ids, Offsets

Hashes = npt.NDArray[np.uint64]

SPAN = 32  # tokens
KEPT = 1 << 20  # hashes to aim at over the whole corpus
BYTES_PER_TOKEN = 4  # of English text, roughly; only sets how thin the sample is


def thinning(corpus_bytes: int) -> int:
    """The bits of a span's first hash that must be zero for it to be sampled."""
    return max(0, (corpus_bytes // (BYTES_PER_TOKEN * KEPT)).bit_length())


def sampled_spans(ids: Ids, offsets: Offsets, bits: int) -> Hashes:
    """Hashes of the sampled spans that lie whole inside one of the documents that offsets bound, shape (spans,)."""
    count = len(ids) - SPAN + 1
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    first = (ids[:count] * np.uint32(0x9E3779B1)) ^ (ids[1 : count + 1] * np.uint32(0x85EBCA77))
    first ^= first >> np.uint32(15)
    starts = np.flatnonzero((first & np.uint32((1 << bits) - 1)) == 0)
    starts = starts[starts + SPAN <= offsets[np.searchsorted(offsets, starts, side="right")]]
    hashed = np.zeros(len(starts), dtype=np.uint64)
    for offset in range(SPAN):  # FNV-1a over the ids (Fowler, Noll, Vo), wrapping as it should
        hashed = (hashed ^ ids[starts + offset]) * np.uint64(0x100000001B3)
        hashed ^= hashed >> np.uint64(29)
    return hashed


def share_in_train(train: list[Hashes], val: list[Hashes]) -> float:
    """The share of sampled validation spans that also stand in train; 0 where none was long enough."""
    wanted = np.concatenate([np.empty(0, dtype=np.uint64), *val])
    known = np.sort(np.concatenate([np.empty(0, dtype=np.uint64), *train]))
    if not len(wanted) or not len(known):
        return 0.0
    places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return float((known[places] == wanted).mean())
