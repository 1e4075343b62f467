"""Rows of whole documents: which pieces of which documents stand in each row, from the index alone.

A document whose eot stands at s, with the next eot at e, has the targets s+1 .. e: its closing eot is its
last one. `pad` gives each document rows of its own; `best_fit` packs several into a row with few cut
(Ding et al. 2024, Fewer Truncations Improve Language Modeling). Either way each target of the stream
stands in exactly one row. A table is a function of the index, never saved, kept in memory by its hash.
"""

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError
from quatrain.tokens.config import Packing
from quatrain.tokens.packing import IGNORED
from quatrain.tokens.store import TokenStream

RowPacking = Literal["pad", "best_fit"]
Ints = npt.NDArray[np.int64]

TABLES_KEPT = 4  # in memory: train, validation, and what is evaluated beside them


def has_table(packing: Packing) -> TypeGuard[RowPacking]:
    """Whether rows are made of documents rather than of windows cut from the stream."""
    return packing in ("pad", "best_fit")


class PackedRows(NamedTuple):
    """Rows of pieces side by side, padding behind them; all int64 (B, T)."""

    inputs: Ints  # eot where there is padding
    targets: Ints  # IGNORED where there is padding
    documents: Ints  # 1, 2, ... by the piece; the padding has the number behind the last
    positions: Ints  # restart at each piece, and at the padding


@dataclass(frozen=True)
class RowTable:
    """Pieces in the order of their rows, rows in the order of their first piece in the stream."""

    seq_len: int
    documents: int
    cut: int  # documents longer than a row, so in more than one piece
    firsts: Ints  # (pieces,) place in the stream of a piece's first input
    lengths: Ints  # (pieces,) its targets, 1 .. seq_len
    bounds: Ints  # (k + 1,) row r holds the pieces bounds[r] .. bounds[r+1] - 1

    @property
    def rows(self) -> int:
        """k: the rows of an epoch."""
        return len(self.bounds) - 1

    @property
    def targets(self) -> int:
        """The targets of an epoch: all that the documents have."""
        return int(self.lengths.sum())

    @property
    def padding(self) -> int:
        """The positions that hold no target."""
        return self.rows * self.seq_len - self.targets

    def targets_of(self, rows: Ints) -> int:
        """The targets of some rows."""
        return int((self._targets_before[self.bounds[rows + 1]] - self._targets_before[self.bounds[rows]]).sum())

    def firsts_of(self, rows: Ints) -> Ints:
        """The first input of each piece of some rows."""
        return np.concatenate([self.firsts[self.bounds[row] : self.bounds[row + 1]] for row in rows])

    @cached_property
    def _targets_before(self) -> Ints:
        """Of each piece the targets of all pieces before it, (pieces + 1,)."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """First input and number of targets of each piece of a row."""
        here = slice(int(self.bounds[row]), int(self.bounds[row + 1]))
        return list(zip(self.firsts[here].tolist(), self.lengths[here].tolist(), strict=True))

    def read(self, stream: TokenStream, rows: Ints, eot: int) -> PackedRows:
        """Some rows as ids. A piece's first input is the id before its first target."""
        shape = (len(rows), self.seq_len)
        counting = np.tile(np.arange(self.seq_len, dtype=np.int64), (len(rows), 1))
        packed = PackedRows(_full(shape, eot), _full(shape, IGNORED), _full(shape, 0), counting)
        for place, row in enumerate(rows.tolist()):
            inputs, targets, documents, positions = (array[place] for array in packed)
            document = at = 0
            for document, (first, length) in enumerate(self.pieces(row), start=1):
                ids = stream.read(first, first + length + 1)
                here = slice(at, at + length)
                inputs[here], targets[here], documents[here] = ids[:-1], ids[1:], document
                positions[here] -= at
                at += length
            documents[at:] = document + 1
            positions[at:] -= at
        return packed


def _full(shape: tuple[int, int], value: int) -> Ints:
    return np.full(shape, value, dtype=np.int64)


def row_table(stream: TokenStream, seq_len: int, packing: RowPacking, targets: int | None = None) -> RowTable:
    """The rows of the first targets of a stream (all n-1 if None); the document at the end of a part is cut there.

    Raises `DataError` for a stream that does not know where documents begin, has none, or whose index is damaged.
    """
    if stream.starts is None:
        raise DataError(
            f"{stream.name}: its files hold no eot, so where documents begin is not known; packing {packing} needs "
            f"that, use concat"
        )
    end, starts = len(stream) - 1, stream.starts
    last = end if targets is None else min(targets, end)
    if last < 1 or not len(starts):
        raise DataError(f"{stream.name}: holds no document, packing {packing} has no row to fill; prepare more text")
    if last < end:
        starts = starts[: np.searchsorted(starts, np.uint64(last))]
    return _table(
        _Index(hashlib.sha256(np.ascontiguousarray(starts).data).hexdigest(), last, stream.name, starts),
        seq_len,
        packing,
    )


@dataclass(frozen=True)
class _Index:
    """Where documents begin up to a last target, and the hash by which two are the same."""

    digest: str
    last: int
    name: str = field(compare=False)
    starts: npt.NDArray[np.uint64] = field(compare=False)

    def documents(self) -> Ints:
        """Where each document begins, and the place of the last target; (documents + 1,), ascending from 0."""
        bounds = np.append(self.starts.astype(np.int64), self.last)
        if bounds[0] != 0 or (np.diff(bounds) < 1).any():
            raise DataError(
                f"{self.name}: the index does not ascend from 0 within the split's ids; "
                f"quatrain inspect STORE --verify names the damaged file"
            )
        return bounds


@lru_cache(maxsize=TABLES_KEPT)
def _table(index: _Index, seq_len: int, packing: RowPacking) -> RowTable:
    bounds = index.documents()
    firsts, lengths = _pieces(bounds, seq_len)
    documents, cut = len(bounds) - 1, int((np.diff(bounds) > seq_len).sum())
    if packing == "pad":
        return RowTable(seq_len, documents, cut, firsts, lengths, np.arange(len(firsts) + 1))
    rows = _best_rows(lengths, seq_len)
    by_row = np.argsort(rows, kind="stable")  # within a row in the order of the stream
    row_bounds = np.concatenate([[0], np.cumsum(np.bincount(rows))])
    return RowTable(seq_len, documents, cut, firsts[by_row], lengths[by_row], row_bounds)


def _pieces(bounds: Ints, T: int) -> tuple[Ints, Ints]:
    """First input and targets of each piece, in the order of the stream: documents cut every T targets."""
    targets = np.diff(bounds)
    pieces = -(-targets // T)
    before = np.cumsum(pieces) - pieces  # pieces of earlier documents
    begun = np.arange(int(pieces.sum())) - np.repeat(before, pieces)  # pieces of the same document before this one
    lengths = np.minimum(np.repeat(targets, pieces) - begun * T, T)
    return np.repeat(bounds[:-1], pieces) + begun * T, lengths


class Move(NamedTuple):
    """So many rows with so much room each take `each` pieces of one length."""

    length: int
    room: int  # the row's whole length: a new row
    rows: int
    each: int


def best_fit(counts: Ints) -> Iterator[Move]:
    """Best-fit-decreasing over counts[l] pieces of l targets, l = 0 .. T: longest first, each where least room stays.

    Rows of equal room are alike, so they are moved together: a row that takes pieces of length l until no
    more fit keeps less than half of its room, which bounds the moves by O(T log T), however many pieces.

    >>> [tuple(move) for move in best_fit(np.array([0, 3, 0, 2, 0]))]
    [(3, 4, 2, 1), (1, 1, 2, 1), (1, 4, 1, 1)]
    """
    T = len(counts) - 1
    rooms: list[int] = []  # of the open rows, ascending, each once
    opened: dict[int, int] = defaultdict(int)  # rows by their room
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            at = bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else T
            each = min(room // length, left)
            rows = left // each if room == T else min(left // each, opened[room])
            yield Move(length, room, rows, each)
            left -= rows * each
            if room < T:
                opened[room] -= rows
                if not opened[room]:
                    del rooms[at]
            room -= each * length
            if room and not opened[room]:
                insort(rooms, room)
            opened[room] += rows


def _best_rows(lengths: Ints, T: int) -> Ints:
    """The row of each piece, (pieces,): the moves of `best_fit`, made with these pieces."""
    longest_first = np.argsort((T - lengths).astype(np.min_scalar_type(T)), kind="stable")
    rows = np.empty(len(lengths), dtype=np.int64)
    opened: dict[int, list[Ints]] = defaultdict(list)  # numbers of rows by their room
    done = made = 0
    for length, room, count, each in best_fit(np.bincount(lengths, minlength=T + 1)):
        if room == T:
            numbers = np.arange(made, made + count)
            made += count
        else:
            numbers = _take(opened[room], count)
        rows[longest_first[done : done + count * each]] = np.repeat(numbers, each)
        done += count * each
        opened[room - each * length].append(numbers)
    return _by_first_piece(rows, made)


def _take(chunks: list[Ints], count: int) -> Ints:
    """Remove so many numbers from the end of the chunks, the last one first."""
    taken = []
    while count:
        chunk = chunks.pop()
        if len(chunk) > count:
            chunks.append(chunk[:-count])
            chunk = chunk[-count:]
        taken.append(chunk[::-1])
        count -= len(chunk)
    return np.concatenate(taken)


def _by_first_piece(rows: Ints, count: int) -> Ints:
    """Number the rows anew, in the order of their first piece."""
    first = np.empty(count, dtype=np.int64)
    first[rows[::-1]] = np.arange(len(rows))[::-1]  # of several values for one place the last stays: the earliest piece
    rank = np.empty(count, dtype=np.int64)
    rank[np.argsort(first)] = np.arange(count)
    numbered: Ints = rank[rows]
    return numbered
