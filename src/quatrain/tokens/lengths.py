"""How long the documents of a split are, and what rows of documents would waste."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quatrain.console import progress
from quatrain.errors import DataError
from quatrain.tokens.packing import padding_waste
from quatrain.tokens.pieces import IntArray
from quatrain.tokens.rows import best_fit
from quatrain.tokens.store import SplitName, TokenStore

CHUNK = 1 << 20  # entries of the index read at once
BINS = 20  # at most, in a histogram

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Lengths:
    """Every distinct length in ids of text, and how many documents have it: exact, and small for a store of any size.

    k documents of different lengths hold at least k(k-1)/2 ids, so a split of n ids has at most about
    sqrt(2n) distinct lengths.
    """

    values: Counts  # (k,), ascending; the eot is not counted
    documents: Counts  # (k,)

    @property
    def total(self) -> int:
        """All documents."""
        return int(self.documents.sum())

    @property
    def targets(self) -> Counts:
        """What a document of each length has to predict, (k,): its ids and the eot that follows."""
        return self.values + 1

    @property
    def ids(self) -> int:
        """The ids of all texts."""
        return int((self.values * self.documents).sum())

    def quantile(self, share: float) -> int:
        """The smallest length that at least this share of the documents does not exceed; 0 without documents."""
        if not self.total:
            return 0
        wanted = max(1, int(np.ceil(share * self.total - 1e-9)))
        return int(self.values[np.searchsorted(np.cumsum(self.documents), wanted)])

    def histogram(self, edges: Counts) -> Counts:
        """Documents of length edges[i] <= length < edges[i+1], shape (len(edges) - 1,)."""
        below = np.concatenate([[0], np.cumsum(self.documents)])[np.searchsorted(self.values, edges)]
        return np.diff(below)

    def padded(self, T: int) -> tuple[int, int]:
        """Rows of T and wasted positions with one document to a row: `padding_waste` of every document's targets."""
        targets = self.targets
        rows = -(-targets // T) * self.documents
        return int(rows.sum()), int((T * rows - targets * self.documents).sum())

    def packed(self, T: int) -> tuple[int, int, int]:
        """Rows of T, wasted positions and documents cut where `best_fit` packs them."""
        whole, rest = divmod(self.targets, T)
        counts = np.zeros(T + 1, dtype=np.int64)
        np.add.at(counts, rest, self.documents)
        counts[0], counts[T] = 0, (whole * self.documents).sum()
        rows = sum(move.rows for move in best_fit(counts) if move.room == T)
        cut = self.documents[self.targets > T].sum()
        return rows, T * rows - int((self.targets * self.documents).sum()), int(cut)


def document_lengths(store: TokenStore, name: SplitName) -> Lengths:
    """The lengths of a split's documents, from its index alone, read in chunks.

    Raises `DataError` where the index does not ascend.
    """
    starts = store.document_starts(name)
    ids = len(store.split(name))
    values = documents = np.empty(0, dtype=np.int64)
    with progress(f"{name} index", len(starts)) as advance:
        for first in range(0, len(starts), CHUNK):
            bounds = starts[first : first + CHUNK + 1].astype(np.int64)
            if first + CHUNK >= len(starts):
                bounds = np.append(bounds, ids - 1)  # the closing eot
            lengths = np.diff(bounds) - 1
            if lengths.min() < 0:
                raise DataError(
                    f"{store.folder}: the index of {name} does not ascend within the split's {ids:,} ids; "
                    f"quatrain inspect {store.folder} --verify names the damaged file"
                )
            values, documents = _merged(values, documents, lengths)
            advance(len(lengths))
    return Lengths(values, documents)


def _merged(values: Counts, documents: Counts, lengths: Counts) -> tuple[Counts, Counts]:
    new, counts = np.unique(lengths, return_counts=True)
    merged, place = np.unique(np.concatenate([values, new]), return_inverse=True)
    total = np.zeros(len(merged), dtype=np.int64)
    np.add.at(total, place, np.concatenate([documents, counts]))
    return merged, total


def bin_edges(shortest: int, longest: int) -> Counts:
    """Edges of a histogram over shortest .. longest: powers of two, cut finer while at most `BINS` bins are needed.

    >>> bin_edges(3, 9000).tolist()[:5], bin_edges(600, 650).tolist()
    ([2, 4, 8, 16, 32], [512, 609, 725])
    """
    edges = _edges(shortest, longest, 1)
    for parts in (2, 4):
        finer = _edges(shortest, longest, parts)
        edges = finer if len(finer) - 1 <= BINS else edges
    return edges


def _edges(shortest: int, longest: int, parts: int) -> Counts:
    """Edges at every `parts`-th of a power of two, as many as hold both lengths."""
    steps = np.arange(parts * (longest.bit_length() + 1) + 1)
    edges = np.unique(np.concatenate([[0], np.ceil(2 ** (steps / parts))])).astype(np.int64)
    first = np.searchsorted(edges, shortest, side="right") - 1
    last = np.searchsorted(edges, longest, side="right")
    found: Counts = edges[first : last + 1]
    return found


class PaddedRows:
    """Cuts ids that come past into documents at their eots, and fills rows of T with one document each."""

    def __init__(self, T: int, eot: int) -> None:
        self.T = T
        self.eot = eot
        self.open: int | None = None  # ids of the document under way, its eot included; None before the first eot
        self.documents = self.rows = self.wasted = 0

    def read(self, ids: IntArray) -> None:
        """The next ids of the stream, shape (n,)."""
        ends = np.flatnonzero(ids == self.eot)
        if self.open is not None:
            ends = np.concatenate([[-self.open], ends])
        targets = np.diff(ends)
        rows, wasted = padding_waste(targets, self.T)
        self.documents += len(targets)
        self.rows += rows
        self.wasted += wasted
        if len(ends):
            self.open = len(ids) - int(ends[-1])

    def jump(self) -> None:
        """The ids that come next stand elsewhere: the document under way is left out."""
        self.open = None
