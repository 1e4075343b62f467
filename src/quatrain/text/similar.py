"""Near-duplicates of validation: every document that is similar to a validation document, found exactly.

Similar means that the Jaccard similarity of the sets of token 5-grams (`text.grams`) is at least a threshold.
Nothing is sampled. A 32-bit hash of every gram goes through a bit map of validation's grams; the few that pass are
looked up by their 64-bit hash, and counted for each validation document that holds them.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from quatrain.text.fast import Offsets
from quatrain.text.grams import GRAM, Ids, gram_hashes_at, gram_set, grams_within
from quatrain.text.lookup import BitMap, Hashes, Lookup, Places, distinct, mixed

BLOCK = 1 << 16  # ids whose 32-bit hashes, with what they are computed from, stay in a core's cache
EXPANDED = 1 << 21  # (document, validation document) counts held at once, plus one posting list

Words = npt.NDArray[np.uint32]

_MULTIPLIER = np.uint32(0x9E3779B1)
_SQUARE = np.uint32(0x9E3779B1**2 % 2**32)
_LAST = np.uint32(0x85EBCA77)


class ValidationIndex:
    """Validation's grams, and which documents hold them; used from any number of threads at once.

    Memory: about 20 bytes a distinct gram, and up to 32 MiB for filters; four times that while it is built.
    """

    def __init__(self, ids: Ids, offsets: Offsets, threshold: float = 0.6) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold {threshold}; expected above 0 and at most 1")
        self.threshold = threshold
        members, numbers, holders = _postings(ids, offsets)
        sizes = np.bincount(holders, minlength=len(offsets) - 1)
        # Documents are known by their rank in size, so that in every list those that are small enough come first.
        self._original = np.argsort(sizes, kind="stable")
        self._sizes = sizes[self._original]
        rank = np.empty_like(self._original)
        rank[self._original] = np.arange(len(rank))
        self._lookup = Lookup(members)
        self._lists = PostingLists(numbers, rank[holders], len(rank))
        self._filter = BitMap(_quick_hashes(ids))

    def similar(self, ids: Ids, offsets: Offsets) -> tuple[Places, Places, npt.NDArray[np.float64]]:
        """Every pair of a document and a validation document with Jaccard >= threshold, in ascending order.

        Gives the documents' numbers, the validation documents' numbers and the similarities, each of shape (pairs,).
        """
        documents, members = self._found(ids, offsets)
        documents, ranks, common = self._counted(documents, members)
        enough = common / self._sizes[ranks] >= self.threshold  # necessary, for the union is at least as large
        documents, ranks, common = documents[enough], ranks[enough], common[enough]
        own = np.zeros(len(offsets) - 1, dtype=np.int64)
        for number in documents[distinct(documents)]:
            own[number] = len(gram_set(ids[offsets[number] : offsets[number + 1]]))
        jaccards = common / (own[documents] + self._sizes[ranks] - common)
        near = np.flatnonzero(jaccards >= self.threshold)
        documents, others, jaccards = documents[near], self._original[ranks[near]], jaccards[near]
        order = np.lexsort((others, documents))
        return documents[order], others[order], jaccards[order]

    def _found(self, ids: Ids, offsets: Offsets) -> tuple[Places, Places]:
        """Distinct pairs of a document and a gram of validation that it holds, ascending."""
        positions = self._possible(ids)
        counts = np.diff(np.searchsorted(positions, offsets))
        documents = np.repeat(np.arange(len(counts)), counts)
        whole = positions + GRAM <= offsets[documents + 1]
        positions, documents = positions[whole], documents[whole]
        known, members = self._lookup.find(gram_hashes_at(ids, positions))
        return _unpaired(_distinct(documents[known] * len(self._lookup.members) + members), len(self._lookup.members))

    def _possible(self, ids: Ids) -> Places:
        """Positions at which a gram of validation may begin."""
        room, scratch = _room(), self._filter.scratch(BLOCK)
        found = [np.empty(0, dtype=np.int64)]
        for start in range(0, len(ids) - GRAM + 1, BLOCK):
            hashes = _quick_block(ids[start : start + BLOCK + GRAM - 1], room)
            found.append(self._filter.possible(hashes, scratch) + start)
        return np.concatenate(found)

    def _counted(self, documents: Places, members: Places) -> tuple[Places, Places, Places]:
        """Document, rank of a validation document, grams in common: every pair that can still be similar."""
        totals = np.bincount(documents)  # grams in common with all of validation
        # Only documents with |B| <= total / threshold matter, as |A and B| <= total.
        small = np.searchsorted(self._sizes, totals / self.threshold + 1, side="right")
        lists = self._lists.list_of[members]
        keys, grams = _summed(documents * len(self._lists) + lists, np.ones(len(lists), dtype=np.int64))
        documents, lists = _unpaired(keys, len(self._lists))
        parts = list(self._lists.expanded(documents, lists, grams, small))
        keys, sums = (np.concatenate([np.empty(0, dtype=np.int64), *column]) for column in zip(*parts, strict=True))
        return *_unpaired(keys, len(self._sizes)), sums


class PostingLists:
    """For every gram the ranks of the documents that hold it; grams of the same documents share one list.

    What only one document holds, which is nearly all, is one list a document; a boilerplate's grams are one list.
    """

    def __init__(self, numbers: Places, ranks: Places, documents: int) -> None:
        """From the pairs of a gram's number, 0 and up without gaps, and a rank below `documents`: distinct pairs."""
        self._documents = documents
        keys = np.sort(numbers * documents + ranks)
        numbers, ranks = _unpaired(keys, documents)
        starts = np.flatnonzero(distinct(numbers))
        lengths = np.diff(np.append(starts, len(numbers)))
        several = np.flatnonzero(lengths > 1)
        alike, first = _alike(_mixed_sums(ranks, starts[several], lengths[several]))
        # List r below `documents` is that of rank r alone; the others follow.
        self.list_of = ranks[starts].astype(np.int32)
        self.list_of[several] = documents + alike
        one_each = np.arange(documents)
        shared = lengths[several[first]]
        self._starts = np.concatenate([one_each, documents + np.cumsum(shared) - shared])
        self._ranks = np.concatenate([one_each, ranks[_runs(starts[several[first]], shared)]])
        self._ends = np.append(self._starts[1:], len(self._ranks))
        self._keys = np.repeat(np.arange(len(self._starts)), self._ends - self._starts) * documents + self._ranks

    def __len__(self) -> int:
        return len(self._starts)

    def expanded(
        self, documents: Places, lists: Places, grams: Places, small: Places
    ) -> Iterator[tuple[Places, Places]]:
        """Sums of `grams` by document and rank, as keys (document x documents + rank) and sums, a part at a time.

        Document d counts towards the ranks below small[d] alone. `documents` ascend.
        """
        limits = small[documents]
        held = self._ranks[self._starts[lists]] < limits
        documents, lists, grams, limits = documents[held], lists[held], grams[held], limits[held]
        lengths = np.searchsorted(self._keys, lists * self._documents + limits) - self._starts[lists]
        cuts = np.searchsorted(np.cumsum(lengths), np.arange(EXPANDED, lengths.sum(), EXPANDED))
        open_keys = open_sums = np.empty(0, dtype=np.int64)
        for start, stop in pairwise([0, *cuts[distinct(cuts)].tolist(), len(lists)]):
            part = slice(start, stop)
            ranks = self._ranks[_runs(self._starts[lists[part]], lengths[part])]
            keys = np.repeat(documents[part], lengths[part]) * self._documents + ranks
            sums = np.repeat(grams[part], lengths[part])
            keys, sums = _summed(np.concatenate([open_keys, keys]), np.concatenate([open_sums, sums]))
            # The last document may go on in the next part.
            closed = len(keys) if stop == len(lists) else int(np.searchsorted(keys, documents[stop] * self._documents))
            yield keys[:closed], sums[:closed]
            open_keys, open_sums = keys[closed:], sums[closed:]


def _postings(ids: Ids, offsets: Offsets) -> tuple[Hashes, Places, Places]:
    """The distinct gram hashes, ascending, and the distinct pairs of a gram's number there and a document."""
    hashes, bounds = grams_within(ids, offsets)
    documents = len(offsets) - 1
    order = np.argsort(hashes)
    hashes = hashes[order]
    first = distinct(hashes)
    holders = np.repeat(np.arange(documents), np.diff(bounds))[order]
    pairs = _distinct((np.cumsum(first) - 1) * documents + holders)
    return hashes[first], *_unpaired(pairs, documents)


def _mixed_sums(ranks: Places, starts: Places, lengths: Places) -> Hashes:
    """A hash of every run of ranks."""
    if not len(starts):
        return np.empty(0, dtype=np.uint64)
    hashes = mixed(ranks[_runs(starts, lengths)].astype(np.uint64))
    return np.add.reduceat(hashes, np.cumsum(lengths) - lengths)


def _alike(hashes: Hashes) -> tuple[Places, Places]:
    """Equal hashes numbered alike, 0 and up, and where the first of every number stands."""
    order = np.argsort(hashes)
    first = distinct(hashes[order])
    numbers = np.empty(len(hashes), dtype=np.int64)
    numbers[order] = np.cumsum(first) - 1
    return numbers, order[first]


def _runs(starts: Places, lengths: Places) -> Places:
    """start, start + 1, ... of every run, end to end."""
    return np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)


def _distinct(keys: Places) -> Places:
    keys = np.sort(keys)
    return keys[distinct(keys)]


def _unpaired(keys: Places, size: int) -> tuple[Places, Places]:
    return keys // max(1, size), keys % max(1, size)


def _summed(keys: Places, counts: Places) -> tuple[Places, Places]:
    """Distinct keys, ascending, and the sum of each one's counts."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(distinct(keys))
    sums = np.add.reduceat(counts[order], starts) if len(starts) else counts
    return keys[starts], sums


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
    hashes = more[: 1 - GRAM]
    hashes *= _MULTIPLIER
    hashes += one[GRAM - 1 :]
    hashes *= _LAST
    return hashes
