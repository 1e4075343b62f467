"""Which documents hold a gram, and how many grams each of them has in common with another document."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from quatrain.text.lookup import Hashes, Places, distinct, mixed, unpaired

EXPANDED = 1 << 21  # entries of posting lists looked at together, beyond which a part is closed
DENSE = 4  # cells that one key is worth, as counting in a table is so much faster than sorting


class PostingLists:
    """The holders of every gram, ascending; grams with the same holders share one list.

    What one document alone holds, which is nearly all, is one list a document; a boilerplate's grams are one list.
    """

    def __init__(self, grams: Places, holders: Places, documents: int) -> None:
        """From distinct pairs of a gram, numbered from 0 without gaps, and its holder, a number below `documents`."""
        self._documents = documents
        grams, holders = unpaired(np.sort(grams * documents + holders), documents)
        starts = np.flatnonzero(distinct(grams))
        lengths = np.diff(np.append(starts, len(grams)))
        several = np.flatnonzero(lengths > 1)
        alike, first = _alike(_hashes_of_runs(holders, starts[several], lengths[several]))
        # List d below `documents` holds d alone; the others follow.
        self._list_of = holders[starts].astype(np.int32)
        self._list_of[several] = documents + alike
        alone, longer = np.arange(documents), several[first]
        self._holders = np.concatenate([alone, holders[_runs(starts[longer], lengths[longer])]])
        lengths = np.concatenate([np.ones_like(alone), lengths[longer]])
        self._starts = np.cumsum(lengths) - lengths
        self._keys = np.repeat(np.arange(len(lengths)), lengths) * documents + self._holders

    def counted(self, documents: Places, grams: Places, below: Places) -> Iterator[tuple[Places, Places, Places]]:
        """From distinct pairs of a document and a gram of it, ascending: (document, holder, grams in common).

        Of document d only the holders below below[d] are counted. Comes in parts of whole documents, so that memory
        stays bounded however many hold a gram: about 100 bytes for each of `EXPANDED` and of the holders.
        """
        keys = documents * len(self._starts) + self._list_of[grams]
        keys, counts = _summed(keys, np.ones(len(grams), dtype=np.int64))
        documents, lists = unpaired(keys, len(self._starts))
        starts = self._starts[lists]
        lengths = np.searchsorted(self._keys, lists * self._documents + below[documents]) - starts
        held = lengths > 0
        yield from self._expanded(documents[held], starts[held], lengths[held], counts[held])

    def _expanded(
        self, documents: Places, starts: Places, lengths: Places, counts: Places
    ) -> Iterator[tuple[Places, Places, Places]]:
        open_keys = open_sums = np.empty(0, dtype=np.int64)
        for start, stop in pairwise(_cuts(lengths)):
            part = slice(start, stop)
            holders = self._holders[_runs(starts[part], lengths[part])]
            keys = np.repeat(documents[part], lengths[part]) * self._documents + holders
            sums = np.repeat(counts[part], lengths[part])
            keys, sums = _summed(np.concatenate([open_keys, keys]), np.concatenate([open_sums, sums]))
            # The last document may go on in the next part.
            goes_on = stop < len(lengths)
            closed = int(np.searchsorted(keys, documents[stop] * self._documents)) if goes_on else len(keys)
            yield *unpaired(keys[:closed], self._documents), sums[:closed]
            open_keys, open_sums = keys[closed:], sums[closed:]


def _cuts(lengths: Places) -> list[int]:
    """Where to cut so that no part but of a single item has lengths of more than `EXPANDED` in all."""
    ends = np.cumsum(lengths)
    cuts = np.searchsorted(ends, np.arange(EXPANDED, ends[-1] if len(ends) else 0, EXPANDED), side="right")
    return [0, *cuts[distinct(cuts) & (cuts > 0)].tolist(), len(lengths)]


def _hashes_of_runs(numbers: Places, starts: Places, lengths: Places) -> Hashes:
    if not len(starts):
        return np.empty(0, dtype=np.uint64)
    hashes = mixed(numbers[_runs(starts, lengths)].astype(np.uint64) + np.uint64(1))  # as 0 is mixed to 0
    return np.add.reduceat(hashes, np.cumsum(lengths) - lengths)


def _alike(hashes: Hashes) -> tuple[Places, Places]:
    """Equal hashes numbered alike, from 0 without gaps, and where one of every number stands."""
    order = np.argsort(hashes)
    first = distinct(hashes[order])
    numbers = np.empty(len(hashes), dtype=np.int64)
    numbers[order] = np.cumsum(first) - 1
    return numbers, order[first]


def _runs(starts: Places, lengths: Places) -> Places:
    """start, start + 1, ... of every run, end to end."""
    ends = np.cumsum(lengths)
    return np.repeat(starts + lengths - ends, lengths) + np.arange(lengths.sum())


def _summed(keys: Places, counts: Places) -> tuple[Places, Places]:
    """Distinct keys, ascending, and the sum of the counts of each, all positive."""
    low, high = (int(keys.min()), int(keys.max())) if len(keys) else (0, 0)
    if high - low < DENSE * len(keys):
        sums = np.bincount(keys - low, weights=counts).astype(np.int64)
        present = np.flatnonzero(sums)
        return present + low, sums[present]
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(distinct(keys))
    return keys[starts], np.add.reduceat(counts[order], starts)
