"""Near-duplicates within train: MinHash signatures in bands find candidates, the sets of token 5-grams decide.

A signature has 256 places in 64 bands of 4. It is the R-MinHash of `rensa`, after Dahlgaard, Knudsen and Thorup 2017,
"Fast Similarity Sketching". Documents of Jaccard similarity J share a band with probability 1 - (1 - J^4)^64: 0.9999
at 0.6, 0.98 at 0.5, 0.41 at 0.3. Every candidate is verified, so nothing is removed that is not similar.

Memory per million documents: 256 MB of band hashes, which may lie on disk, and 110 MB while one band of them is
searched (measured). Besides, about 80 bytes for each candidate pair, and `CACHED` bytes of gram sets.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rensa import RMinHash

from quatrain.text.fast import Offsets
from quatrain.text.grams import Ids, gram_set, grams_within, jaccard
from quatrain.text.lookup import Hashes, Places, ascending, distinct, mixed

BANDS, ROWS = 64, 4
SEED = 42  # of the signatures; with rensa's algorithm version it decides which pairs are candidates
NOTHING = 0  # the band hash of a document without grams: it matches nothing, not even its like
PART = 512  # documents whose signatures are Python numbers at the same time
WIDTH = 8  # documents before it, and at the beginning of its bucket, that one is paired with at first
MERGED = 1 << 22  # pairs collected before those of several bands become one
CACHED = 64 << 20  # bytes of gram sets kept for later pairs

Bands = npt.NDArray[np.uint32]
Chosen = npt.NDArray[np.bool_]
Jaccards = npt.NDArray[np.float64]


class NearDuplicates(NamedTuple):
    """For every document the earlier, kept one that it is similar to, or -1: it is kept; and how similar, or 0."""

    like: Places
    jaccards: Jaccards

    @property
    def removed(self) -> Chosen:
        return self.like >= 0


def near_duplicates(
    bands_of: Callable[[int], Bands], document: Callable[[int], Ids], documents: int, threshold: float = 0.6
) -> NearDuplicates:
    """The documents, of so many in stream order, that are similar to an earlier one that is kept.

    `bands_of(band)` gives a column of `band_hashes` over all documents, `document(number)` the ids of one. The result
    is that of verifying every pair of documents that share a band, though of m equal documents few are compared.
    """
    similarity = Similarity(document, threshold)
    pairs, jaccards = np.empty((0, 2), dtype=np.int64), np.empty(0)
    kept, width = np.ones(documents, dtype=np.bool_), WIDTH
    while True:
        found, complete = candidate_pairs(bands_of, kept, width)
        new = found[~_known(found, pairs)]
        pairs = np.concatenate([pairs, new])
        jaccards = np.concatenate([jaccards, np.full(len(new), np.nan)])
        result = repeats(pairs, jaccards, similarity, documents)
        # A kept document that now turns out to repeat an earlier one gives back what was removed for its sake.
        if complete and not (~kept & ~result.removed).any():
            return result
        kept = ~result.removed
        width *= 1 if complete else 2


def band_hashes(ids: Ids, offsets: Offsets) -> Bands:
    """A hash of every band of every document, shape (documents, 64); all `NOTHING` for one of fewer than 5 ids."""
    hashes, bounds = grams_within(ids, offsets)
    bands = np.empty((len(bounds) - 1, BANDS), dtype=np.uint32)
    for start in range(0, len(bands), PART):
        part = bounds[start : start + PART + 1]
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            hashes[part[0] : part[-1]], (part - part[0]).astype(np.uint64), BANDS * ROWS, SEED
        )
        rows = np.array(matrix.to_rows(), dtype=np.uint32).view("<u8").reshape(-1, BANDS, ROWS // 2)
        bands[start : start + PART] = mixed(mixed(rows[..., 0].copy()) ^ rows[..., 1]) >> np.uint64(32)
    bands[bands == NOTHING] = NOTHING + 1
    bands[np.diff(bounds) == 0] = NOTHING
    return bands


def candidate_pairs(
    bands_of: Callable[[int], Bands], among: Chosen | None = None, width: int = WIDTH
) -> tuple[Places, bool]:
    """Distinct pairs i < j of documents that share a band, ascending, shape (pairs, 2); and whether these are all.

    A document is paired with the `width` before it in its bucket and with the bucket's first `width`, so that m equal
    documents give 2 m width pairs and not m^2 / 2. `among` says which documents are in the buckets.
    """
    merged: Hashes = np.empty(0, dtype=np.uint64)
    parts: list[Hashes] = []
    complete = True
    for band in range(BANDS):
        hashes = bands_of(band)
        chosen = np.flatnonzero(hashes != NOTHING if among is None else (hashes != NOTHING) & among)
        members, rank = _buckets(hashes[chosen], chosen)
        complete &= bool((rank <= width).all())
        parts.extend(_linked(members, rank, width))
        if band == BANDS - 1 or sum(map(len, parts)) > MERGED + len(merged):
            merged, parts = ascending(np.concatenate([merged, *parts])), []
    return np.stack(_halves(merged), axis=1).astype(np.int64), complete


def repeats(
    pairs: Places, jaccards: Jaccards, similarity: Callable[[int, int], float], documents: int
) -> NearDuplicates:
    """In stream order, a document is removed if it is similar to an earlier one that is kept.

    Of the similarities of `pairs` those that are NaN are measured, and filled in, where the outcome depends on them.
    """
    result = NearDuplicates(np.full(documents, -1, dtype=np.int64), np.zeros(documents))
    removed: set[int] = set()
    order = np.lexsort(pairs.T)  # by the later document, then by the earlier
    for start in range(0, len(order), MERGED >> 4):
        places = order[start : start + (MERGED >> 4)]
        for place, (earlier, later) in zip(places.tolist(), pairs[places].tolist(), strict=True):
            if later in removed or earlier in removed:
                continue
            if np.isnan(jaccards[place]):
                jaccards[place] = similarity(earlier, later)
            if jaccards[place] > 0:
                removed.add(later)
                result.like[later], result.jaccards[later] = earlier, jaccards[place]
    return result


class Similarity:
    """The exact Jaccard similarity of two documents where it is at least the threshold, else 0."""

    def __init__(self, document: Callable[[int], Ids], threshold: float) -> None:
        self._document = document
        self._threshold = threshold
        self._sets: OrderedDict[int, Hashes] = OrderedDict()  # those used last, up to `CACHED` bytes
        self._bytes = 0

    def __call__(self, one: int, other: int) -> float:
        mine, theirs = self._set(one), self._set(other)
        if min(len(mine), len(theirs)) < self._threshold * max(len(mine), len(theirs)) - 1e-6:
            return 0.0
        found = jaccard(mine, theirs)
        return found if found >= self._threshold else 0.0

    def _set(self, number: int) -> Hashes:
        if number in self._sets:
            self._sets.move_to_end(number)
            return self._sets[number]
        found = gram_set(self._document(number))
        self._sets[number] = found
        self._bytes += found.nbytes
        while self._bytes > CACHED and len(self._sets) > 1:
            self._bytes -= self._sets.popitem(last=False)[1].nbytes
        return found


def _buckets(hashes: Bands, documents: Places) -> tuple[Hashes, Places]:
    """The documents of one bucket after another, ascending in each, and the place of each in its bucket, from 0.

    Buckets of a single document are left out.
    """
    keys = np.sort(hashes.astype(np.uint64) << np.uint64(32) | documents.astype(np.uint64))
    bucket, members = _halves(keys)
    first = distinct(bucket)
    shared = ~(first & np.append(first[1:], True))
    members, first = members[shared], first[shared]
    starts = np.flatnonzero(first)
    return members, np.arange(len(members)) - np.repeat(starts, np.diff(np.append(starts, len(members))))


def _linked(members: Hashes, rank: Places, width: int) -> Iterator[Hashes]:
    """Pairs of each with the `width` before it and with the first `width`, as keys i * 2^32 + j."""
    place = np.arange(len(members))
    for step in range(1, min(width, int(rank.max(initial=0))) + 1):
        later = place[rank >= step]
        yield members[later - step] << np.uint64(32) | members[later]
    far = place[rank > width]
    for step in range(width if len(far) else 0):
        yield members[far - rank[far] + step] << np.uint64(32) | members[far]


def _known(pairs: Places, others: Places) -> Chosen:
    """Whether each pair is one of the others."""
    keys, known = pairs[:, 0] << 32 | pairs[:, 1], np.sort(others[:, 0] << 32 | others[:, 1])
    places = np.searchsorted(known, keys)
    found: Chosen = np.append(known, -1)[places] == keys
    return found


def _halves(keys: Hashes) -> tuple[Hashes, Hashes]:
    return keys >> np.uint64(32), keys & np.uint64(2**32 - 1)
