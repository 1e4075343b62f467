"""Near-duplicates of validation: every document that is similar to a validation document, found exactly.

Similar means that the Jaccard similarity of the sets of token 5-grams (`text.grams`) is at least a threshold t.
No pair is missed: at least t |B| of the grams of B must stand in A, so whatever part of B's grams is chosen, all but
(1 - t) |B| of it must (the prefix filter of Chaudhuri, Ganti and Kaushik 2006). The index holds the rarest half of
B's grams, which ordinary text seldom meets; what meets enough of them is compared as a whole.
"""

import math
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quatrain.text.fast import Offsets
from quatrain.text.grams import GRAM, Ids, gram_hashes, gram_hashes_at, gram_set, jaccard
from quatrain.text.lookup import BitMap, Hashes, Lookup, Places, ascending, distinct, unpaired
from quatrain.text.postings import PostingLists

BLOCK = 1 << 16  # ids whose 32-bit hashes, with what they are computed from, stay in a core's cache
# The share of B's grams that must be met among the chosen ones, beyond the one that the threshold demands: more
# makes the index larger, less makes more documents be compared as a whole.
EVIDENCE = 0.08
PAIR_TABLE = 22  # log2 of the cells in which pairs of ids are counted

Words = npt.NDArray[np.uint32]
Jaccards = npt.NDArray[np.float64]

_MULTIPLIER, _SQUARE, _LAST = (np.uint32(odd % 2**32) for odd in (0x9E3779B1, 0x9E3779B1**2, 0x85EBCA77))


class ValidationIndex:
    """Validation's rarest grams, and which documents hold them; used from any number of threads at once.

    Holds on to `ids`, and 9 to 36 bytes for each of them besides (the smaller validation, the more; measured); while it
    is built, about 50 bytes for each and 64 MB.
    """

    def __init__(self, ids: Ids, offsets: Offsets, threshold: float = 0.6) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold {threshold}; expected above 0 and at most 1")
        self.threshold = threshold
        self._ids, self._offsets = ids, offsets
        chosen = _choose(ids, offsets, threshold)
        # Documents are known by their rank in size: the larger, the more of the chosen grams must be met.
        self._original = np.argsort(chosen.sizes, kind="stable")
        self._sizes = chosen.sizes[self._original]
        self._left_out = self._sizes - chosen.kept[self._original]
        self._needed = chosen.needed[self._original]
        rank = np.empty_like(self._original)
        rank[self._original] = np.arange(len(rank))
        order = np.argsort(chosen.hashes)
        hashes = chosen.hashes[order]
        first = distinct(hashes)
        self._lookup = Lookup(hashes[first])
        self._lists = PostingLists(np.cumsum(first) - 1, np.repeat(rank, chosen.kept)[order], len(rank))
        self._filter = BitMap(chosen.quick)

    def similar(
        self, ids: Ids, offsets: Offsets, most: int | None = None, behind: int = 0
    ) -> tuple[Places, Places, Jaccards]:
        """Every pair of a document and a validation document with Jaccard >= threshold, in ascending order.

        Gives the documents' numbers, the validation documents' numbers and the similarities, each of shape (pairs,).
        With `most`, a document that has one comes with that many of its pairs at the most: enough to know which
        documents are similar, and soon done where a large family is alike. Each document stands `behind` so many ids
        that are not its own, and that no validation document holds.
        """
        found = [
            (number, other, near)
            for number, ranks, met in self._candidates(ids, offsets)
            for other, near in islice(self._compared(_grams_of(number, ids, offsets, behind), ranks, met), most)
        ]
        found.sort()
        documents, others, jaccards = zip(*found, strict=True) if found else ((), (), ())
        return np.array(documents, dtype=np.int64), np.array(others, dtype=np.int64), np.array(jaccards, dtype=float)

    def _candidates(self, ids: Ids, offsets: Offsets) -> Iterator[tuple[int, Places, Places]]:
        """Documents, the ranks that may be similar to each, and how many of the chosen grams of those it meets."""
        documents, members = self._found(ids, offsets)
        small = np.searchsorted(self._needed, np.bincount(documents), side="right")
        for owners, ranks, met in self._lists.counted(documents, members, small):
            enough = met >= self._needed[ranks]
            owners, ranks, met = owners[enough], ranks[enough], met[enough]
            starts = np.flatnonzero(distinct(owners))
            for start, end in pairwise([*starts.tolist(), len(owners)]):
                yield int(owners[start]), ranks[start:end], met[start:end]

    def _found(self, ids: Ids, offsets: Offsets) -> tuple[Places, Places]:
        """Distinct pairs of a document and a member of the index that it holds, ascending."""
        positions = self._possible(ids)
        counts = np.diff(np.searchsorted(positions, offsets))
        documents = np.repeat(np.arange(len(counts)), counts)
        whole = positions + GRAM <= offsets[documents + 1]
        positions, documents = positions[whole], documents[whole]
        known, members = self._lookup.find(gram_hashes_at(ids, positions))
        size = len(self._lookup.members)
        return unpaired(ascending(documents[known] * size + members), size)

    def _possible(self, ids: Ids) -> Places:
        """Positions at which a member may begin."""
        room, scratch = _room(), self._filter.scratch(BLOCK)
        found = [np.empty(0, dtype=np.int64)]
        for start in range(0, len(ids) - GRAM + 1, BLOCK):
            hashes = _quick_block(ids[start : start + BLOCK + GRAM - 1], room)
            found.append(self._filter.possible(hashes, scratch) + start)
        return np.concatenate(found)

    def _compared(self, own: Hashes, ranks: Places, met: Places) -> Iterator[tuple[int, float]]:
        """The validation documents that are similar to a document with these grams, and how similar."""
        sizes = self._sizes[ranks]
        common = np.minimum(met + self._left_out[ranks], len(own))
        bounds = common / (len(own) + sizes - common)
        for rank in ranks[np.argsort(-bounds)[: np.count_nonzero(bounds >= self.threshold)]].tolist():
            number = int(self._original[rank])
            near = jaccard(own, _grams_of(number, self._ids, self._offsets, 0))
            if near >= self.threshold:
                yield number, near


def _grams_of(number: int, ids: Ids, offsets: Offsets, behind: int) -> Hashes:
    return gram_set(ids[offsets[number] + behind : offsets[number + 1]])


class _Chosen(NamedTuple):
    hashes: Hashes  # of the chosen grams, document by document
    quick: Words  # their 32-bit hashes
    sizes: Places  # of every document: its distinct grams,
    kept: Places  # how many of them are chosen,
    needed: Places  # and how many chosen ones a similar document must hold


def _choose(ids: Ids, offsets: Offsets, threshold: float) -> _Chosen:
    """Of every validation document the grams that are rarest, judged by the pairs of ids in them."""
    commonness = _pair_commonness(ids)
    hashes, positions, counts = [np.empty(0, dtype=np.uint64)], [np.empty(0, dtype=np.int64)], []
    for start, end in pairwise(offsets.tolist()):
        found = gram_hashes(ids[start:end])
        order = np.argsort(found)
        order = order[distinct(found[order])]
        counts.append((len(order), *_quota(len(order), threshold)))
        chosen = counts[-1][1]
        if chosen < len(order):
            # The logarithms' sum takes the pairs of a gram as independent. Of equals the smallest hashes are chosen, so
            # that of one boilerplate all documents choose the same grams, and these share their posting list.
            score = np.sum(
                [commonness[start + place : start + place + len(found)] for place in range(GRAM - 1)], axis=0
            )
            order = order[np.argsort(score[order], kind="stable")[:chosen]]
        hashes.append(found[order])
        positions.append(start + order)
    sizes, kept, needed = np.array(counts, dtype=np.int64).reshape(-1, 3).T
    return _Chosen(np.concatenate(hashes), _quick_hashes(ids)[np.concatenate(positions)], sizes, kept, needed)


def _quota(size: int, threshold: float) -> tuple[int, int]:
    """How many of a document's grams to choose, and how many of those a similar document must hold."""
    demanded = max(1, math.ceil(threshold * size - 1e-6))  # of all its grams; rounding must not make it one more
    kept = min(size, size - demanded + 1 + int(EVIDENCE * size))
    return kept, kept - (size - demanded)


def _pair_commonness(ids: Ids) -> npt.NDArray[np.float32]:
    """The logarithm of how often each pair of neighbours stands there, roughly: different pairs may share a count."""
    cells = ids[:-1].astype(np.uint32) * _MULTIPLIER
    cells += ids[1:]
    cells *= _LAST
    cells >>= np.uint32(32 - PAIR_TABLE)
    logarithms = np.log(np.maximum(np.bincount(cells), 1).astype(np.float32))
    return np.take(logarithms, cells)


def _quick_hashes(ids: Ids) -> Words:
    """A 32-bit hash of ids[i : i + 5] for every i; the high bits are the good ones."""
    room = _room()
    hashes = np.empty(max(0, len(ids) - GRAM + 1), dtype=np.uint32)
    for start in range(0, len(hashes), BLOCK):
        hashes[start : start + BLOCK] = _quick_block(ids[start : start + BLOCK + GRAM - 1], room)
    return hashes


def _room() -> Words:
    return np.empty((3, BLOCK + GRAM - 1), dtype=np.uint32)


def _quick_block(ids: Ids, room: Words) -> Words:
    """A polynomial with the five ids as coefficients, by way of pairs and fours; a view of `room`."""
    one, pair, more = room[:, : len(ids)]
    np.copyto(one, ids)
    np.multiply(one, _MULTIPLIER, out=pair)
    pair[:-1] += one[1:]
    np.multiply(pair, _SQUARE, out=more)
    more[:-2] += pair[2:]
    hashes: Words = more[: 1 - GRAM]
    hashes *= _MULTIPLIER
    hashes += one[GRAM - 1 :]
    hashes *= _LAST
    return hashes
