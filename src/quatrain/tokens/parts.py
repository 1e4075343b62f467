"""Tokenized documents on disk, until it is decided which of them go where: the progress of a preparation.

A part is one file: ids end to end, each document behind its eot, a table of the documents, a record in JSON, and a
footer with a checksum, under its own name only when it is whole. What a killed process left behind is known by that.
"""

import contextlib
import itertools
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from quatrain.errors import DataError
from quatrain.files import writing
from quatrain.text.tokenizers import whole_characters
from quatrain.tokens.encoding import DOCUMENT, Documents, Tokenized

FOOTER = struct.Struct("<QQQQ8s")  # bytes of ids, documents, bytes of the record, XXH3 of all three, MAGIC
MAGIC = b"QTPART02"
EXAMPLES = 5  # of each kind of what is left out
NAME = "{unit:06d}_{number:06d}.part"


@dataclass
class Record:
    """What a part knows beside its documents; JSON."""

    last: bool = False  # nothing of the unit follows
    resume: list[Any] = field(default_factory=lambda: [0, None])  # span of the unit and the state in it
    read: dict[str, int] = field(default_factory=dict)  # documents by span, all that were there
    empty: int = 0
    surrogates: int = 0
    bad: dict[str, int] = field(default_factory=dict)  # by kind
    bad_examples: list[list[Any]] = field(default_factory=list)  # span, row, kind, sentence

    def count(self, span: int, tokenized: Tokenized) -> None:
        """Add what came of a chunk."""
        self.read[str(span)] = self.read.get(str(span), 0) + tokenized.read
        self.empty += tokenized.empty
        self.surrogates += tokenized.surrogates
        for bad in tokenized.bad:
            self.bad[bad.kind] = self.bad.get(bad.kind, 0) + bad.lost
            if sum(kind == bad.kind for _, _, kind, _ in self.bad_examples) < EXAMPLES:
                self.bad_examples.append([span, bad.row, bad.kind, whole_characters(bad.sentence)[0]])


class PartWriter:
    """A part that is being written: ids go to disk at once, the table is kept until the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(path.name + ".tmp")
        self.record = Record()
        self.tables: list[Documents] = []
        self.checksum = xxh3_64()
        self.size = self.text = 0  # bytes, and bytes of the texts
        with writing(path):
            self.file = self.temporary.open("wb")

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, *failure: object) -> None:
        with contextlib.suppress(OSError):  # what cannot be flushed after an error has been told already
            self.file.close()

    def add(self, span: int, tokenized: Tokenized) -> None:
        """Append the documents of a chunk of the unit's span."""
        self.tables.append(tokenized.documents)
        self.record.count(span, tokenized)
        self.text += int(tokenized.documents["bytes"].sum())
        self._write(tokenized.ids.data)

    def finish(self) -> None:
        """Give the part its name: from now on it counts."""
        # No fsync: a part that a power cut spoils is found by its checksum and made again.
        documents = np.concatenate(self.tables) if self.tables else np.empty(0, dtype=DOCUMENT)
        record = json.dumps(vars(self.record)).encode()
        ids_size = self.size
        self._write(documents.view(np.uint8).data)
        self._write(memoryview(record))
        self._write(memoryview(FOOTER.pack(ids_size, len(documents), len(record), self.checksum.intdigest(), MAGIC)))
        with writing(self.path, self.size):
            self.file.close()
            self.temporary.replace(self.path)

    def _write(self, data: memoryview) -> None:
        self.size += data.nbytes
        with writing(self.path, self.size):
            self.file.write(data)
        self.checksum.update(data)


@dataclass(frozen=True)
class Part:
    """A whole part."""

    path: Path
    ids_size: int  # bytes
    count: int  # documents
    record: Record

    @classmethod
    def open(cls, path: Path, check: bool = False) -> "Part":
        """A part by its footer. Raises `DataError` if it is not whole; with `check`, every byte is read."""
        try:
            with path.open("rb") as file:
                file.seek(-FOOTER.size, 2)
                end = file.tell()
                ids_size, count, length, checksum, magic = FOOTER.unpack(file.read())
                if magic != MAGIC or ids_size + count * DOCUMENT.itemsize + length != end:
                    raise ValueError("its footer does not fit its size")
                file.seek(end - length)
                record = json.loads(file.read(length))
                if check:
                    _check(file, end, checksum)
        except (OSError, ValueError, struct.error) as error:
            raise DataError(f"{path}: not a whole part of a preparation ({error})") from error
        return cls(path, ids_size, count, Record(**record))

    def table(self) -> Documents:
        """The table of its documents, read from disk."""
        return np.fromfile(self.path, dtype=DOCUMENT, count=self.count, offset=self.ids_size)

    def read_ids(self, start: int, into: npt.NDArray[Any]) -> None:
        """Fill an array of the shards' dtype with the ids from `start` on."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(start * into.itemsize)
            read, wanted = 0, into.nbytes
            while read < wanted:
                read += _some(file.readinto(into.view(np.uint8)[read:].data), self.path)


def _some(count: int | None, path: Path) -> int:
    if not count:
        raise DataError(f"{path}: shorter than it was; give the same command again")
    return count


def _check(file: Any, end: int, checksum: int) -> None:
    file.seek(0)
    found = xxh3_64()
    while end and (piece := file.read(min(end, 1 << 24))):
        found.update(piece)
        end -= len(piece)
    if found.intdigest() != checksum:
        raise ValueError("its checksum differs")


def whole_parts(folder: Path, unit: int) -> list[Part]:
    """The parts of a unit that an earlier process finished, in order; what follows a spoiled one is removed."""
    found: list[Part] = []
    paths = sorted(folder.glob(f"{unit:06d}_*.part*"))
    for path in paths:
        expected = folder / NAME.format(unit=unit, number=len(found))
        if path == expected and not (found and found[-1].record.last):
            with contextlib.suppress(DataError):
                found.append(Part.open(path, check=True))
                continue
        path.unlink()
    return found


def finished_parts(folder: Path, units: int, check: bool = False) -> tuple[list[tuple[int, Part]], list[int]]:
    """Every whole part with its unit, in the order of the documents; and the units that are not complete.

    With `check` every byte is read, and a part that is not as it was written does not count.
    """
    found: list[tuple[int, Part]] = []
    missing: list[int] = []
    for unit in range(units):
        for number in itertools.count():
            path = folder / NAME.format(unit=unit, number=number)
            try:
                part = Part.open(path, check)
            except DataError:
                missing.append(unit)
                break
            found.append((unit, part))
            if part.record.last:
                break
    return found, missing
