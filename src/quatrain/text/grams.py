"""A document as the set of its token 5-grams, each known by a 64-bit hash: what "similar" is measured on.

Documents are token ids end to end, without eot, and the offsets between them. Two different grams share a hash
with probability 2^-64, which is taken as never.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from quatrain.text.fast import Offsets
from quatrain.text.lookup import Hashes, distinct, mixed

GRAM = 5  # ids; a shorter document has an empty set and is similar to nothing
BLOCK = 1 << 15  # ids whose 64-bit hashes, with what they are computed from, stay in a core's cache

Ids = npt.NDArray[np.unsignedinteger[Any]]
"""Token ids: uint16 or uint32, and the hashes are the same."""

_ODD = np.uint64(0x9E3779B97F4A7C15)


def gram_hashes(ids: Ids) -> Hashes:
    """Hashes of ids[i : i + 5] for every i, shape (max(0, n - 4),), well mixed and the same on every machine."""
    hashes = np.empty(max(0, len(ids) - GRAM + 1), dtype=np.uint64)
    for start in range(0, len(hashes), BLOCK):
        one = ids[start : start + BLOCK + GRAM - 1].astype(np.uint64)
        pair = _pairs(one[:-1], one[1:])
        hashes[start : start + BLOCK] = _fives(_quads(pair[:-2], pair[2:])[:-1], one[4:])
    return hashes


def gram_hashes_at(ids: Ids, positions: npt.NDArray[np.int64]) -> Hashes:
    """`gram_hashes(ids)[positions]` without the others."""
    one, two, three, four, five = (ids[positions + place].astype(np.uint64) for place in range(GRAM))
    return _fives(_quads(_pairs(one, two), _pairs(three, four)), five)


def grams_within(ids: Ids, offsets: Offsets) -> tuple[Hashes, Offsets]:
    """Hashes of the grams that lie whole inside a document, end to end, and the offsets between documents."""
    hashes = gram_hashes(ids[offsets[0] : offsets[-1]])
    inside = np.ones(len(hashes), dtype=np.bool_)
    borders = offsets[1:-1, None] - offsets[0] + np.arange(1 - GRAM, 0)  # where a gram begins that crosses a border
    inside[borders[(borders >= 0) & (borders < len(inside))]] = False
    counts = np.maximum(np.diff(offsets) - (GRAM - 1), 0)
    return hashes[inside], np.concatenate([[0], np.cumsum(counts)])


def gram_set(ids: Ids) -> Hashes:
    """The distinct gram hashes of one document, ascending."""
    hashes = np.sort(gram_hashes(ids))
    return hashes[distinct(hashes)]


def jaccard(one: Hashes, other: Hashes) -> float:
    """|A and B| / |A or B| of two gram sets; 0 where one is empty."""
    if not len(one) or not len(other):
        return 0.0
    both = np.sort(np.concatenate([one, other]))
    union = int(np.count_nonzero(distinct(both)))
    return (len(both) - union) / union


def _pairs(one: Hashes, two: Hashes) -> Hashes:
    # Ids have at most 32 bits, so two are one number, and what follows is a bijection of it.
    hashes = one << np.uint64(32)
    hashes |= two
    hashes *= _ODD
    hashes ^= hashes >> np.uint64(32)
    return hashes


def _quads(one: Hashes, two: Hashes) -> Hashes:
    hashes = one * _ODD
    hashes += two
    hashes ^= hashes >> np.uint64(29)
    return hashes


def _fives(four: Hashes, one: Hashes) -> Hashes:
    hashes = four * _ODD
    hashes += one
    return mixed(hashes)
