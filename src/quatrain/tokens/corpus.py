"""All parts of a preparation as one sequence of documents, numbered in the order of the sources."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quatrain.text.fast import Offsets
from quatrain.tokens.parts import EXAMPLES, Part
from quatrain.tokens.tokenizing import Unit

Numbers = npt.NDArray[np.int64]


@dataclass
class Corpus:
    """The documents that have text. About 60 bytes of memory a document; ids stay on disk."""

    units: list[Unit]
    parts: list[tuple[int, Part]]  # with the unit of each, in order
    dtype: np.dtype[Any]

    @cached_property
    def bounds(self) -> Numbers:
        """The number of the first document of each part, and of all documents."""
        return np.cumsum([0, *(part.count for _, part in self.parts)], dtype=np.int64)

    @cached_property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """The text hash of every document."""
        return self._column("hash", np.uint64)

    @cached_property
    def text_bytes(self) -> Numbers:
        """Bytes of text of every document."""
        return self._column("bytes", np.int64)

    @cached_property
    def tokens(self) -> Numbers:
        """Ids of every document, eot not counted."""
        return self._column("tokens", np.int64)

    @cached_property
    def contaminated(self) -> npt.NDArray[np.bool_]:
        """Whether a document shares a passage with a benchmark."""
        return self._column("contaminated", np.bool_)

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def _column(self, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        columns = [np.empty(0, dtype=dtype), *(part.table()[name].astype(dtype) for _, part in self.parts)]
        return np.concatenate(columns)

    @cached_property
    def sources(self) -> npt.NDArray[np.int32]:
        """The place of every document's source in the list of sources."""
        found = [np.empty(0, dtype=np.int32)]
        for unit, part in self.parts:
            found.append(np.array(self.units[unit].sources, dtype=np.int32)[part.table()["span"]])
        return np.concatenate(found)

    def indices(self) -> Numbers:
        """The place of every document among all that were read, the empty and the skipped ones included."""
        base: dict[tuple[int, int], int] = {}
        total = 0
        for place, count in self._read():
            base.setdefault(place, total)
            total += count
        found = [np.empty(0, dtype=np.int64)]
        for unit, part in self.parts:
            table = part.table()
            bases = np.array([base.get((unit, span), 0) for span in range(len(self.units[unit].spans))])
            found.append(table["index"].astype(np.int64) + bases[table["span"]])
        return np.concatenate(found)

    def rows(self, count: int) -> list[int]:
        """Documents read from each of the `count` sources, the empty and the skipped ones included."""
        rows = [0] * count
        for (unit, span), documents in self._read():
            rows[self.units[unit].sources[span]] += documents
        return rows

    def _read(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Documents by unit and span, in order; a span that several parts share comes several times."""
        for unit, part in self.parts:
            for span, count in sorted((int(span), count) for span, count in part.record.read.items()):
                yield (unit, span), count

    def total(self, what: str) -> int:
        """A count of the parts' records (empty, surrogates), summed."""
        return sum(getattr(part.record, what) for _, part in self.parts)

    def bad(self) -> dict[str, int]:
        """How many rows could not be read, by kind."""
        counts: dict[str, int] = {}
        for _, part in self.parts:
            for kind, count in part.record.bad.items():
                counts[kind] = counts.get(kind, 0) + count
        return dict(sorted(counts.items()))

    def bad_examples(self) -> list[dict[str, Any]]:
        """A few of the rows that could not be read, of each kind."""
        found: list[dict[str, Any]] = []
        for unit, part in self.parts:
            for span, row, kind, sentence in part.record.bad_examples:
                if sum(kind == one["reason"] for one in found) < EXAMPLES:
                    place = self.units[unit].spans[span].place(row, short=True)
                    found.append({"kind": "skipped", "place": place, "reason": kind, "text": sentence})
        return found

    def place(self, document: int) -> str:
        """Where a document stands in its source, by the base name."""
        number = int(np.searchsorted(self.bounds, document, side="right")) - 1
        unit, part = self.parts[number]
        row = part.table()[document - int(self.bounds[number])]
        return self.units[unit].spans[int(row["span"])].place(int(row["row"]), short=True)

    def gather(self, documents: Numbers) -> tuple[npt.NDArray[Any], Offsets]:
        """Ids of documents end to end, each behind its eot, in the order given, and the offsets between them.

        Safe in threads.
        """
        lengths = self.tokens[documents] + 1
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.empty(int(offsets[-1]), dtype=self.dtype)
        # Consecutive documents of a part are one read.
        numbers = np.searchsorted(self.bounds, documents, side="right") - 1
        breaks = np.flatnonzero((np.diff(documents) != 1) | (np.diff(numbers) != 0)) + 1
        for first, last in zip([0, *breaks.tolist()], [*breaks.tolist(), len(documents)], strict=True):
            if last > first:
                part = self.parts[int(numbers[first])][1]
                part.read_ids(int(self.starts[documents[first]]), ids[int(offsets[first]) : int(offsets[last])])
        return ids, offsets

    def bare(self, documents: Numbers) -> tuple[npt.NDArray[Any], Offsets]:
        """`gather` without the eots."""
        ids, offsets = self.gather(documents)
        return np.delete(ids, offsets[:-1]), offsets - np.arange(len(offsets))

    @cached_property
    def starts(self) -> Numbers:
        """Where the eot of every document stands in its part."""
        before = np.concatenate([[0], np.cumsum(self.tokens + 1)])
        starts: Numbers = before[:-1] - np.repeat(before[self.bounds[:-1]], np.diff(self.bounds))
        return starts

    def blocks(self, documents: Numbers, size: int) -> Iterator[Numbers]:
        """Documents in their order, in blocks of about so many ids."""
        ends = np.cumsum(self.tokens[documents])
        start = 0
        while start < len(documents):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + size, side="right")))
            yield documents[start:stop]
            start = stop
