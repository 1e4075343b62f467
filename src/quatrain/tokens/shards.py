"""The files of one split, written front to back: shards of ids and the index of document starts."""

import contextlib
import hashlib
import os
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quatrain.files import sync_folder, writing
from quatrain.text.fast import Offsets

LONG = 128  # ids of a document from which one copy a document is faster than one choice an id


class Piece(NamedTuple):
    """Consecutive documents of one split, each behind its eot."""

    ids: npt.NDArray[Any]  # eots included, in the shards' dtype
    starts: Offsets  # of each document's eot within ids
    text_bytes: int


def framed(ids: npt.NDArray[Any], offsets: Offsets, eot: int, text_bytes: int) -> Piece:
    """Documents end to end, cut at the offsets, with an eot before each."""
    count = len(offsets) - 1
    starts = offsets[:-1] + np.arange(count)
    marker = np.array([eot], dtype=ids.dtype)
    if len(ids) > LONG * count:
        borders = offsets.tolist()
        parts = [part for start, end in pairwise(borders) for part in (marker, ids[start:end])]
        return Piece(np.concatenate([marker[:0], *parts]), starts, text_bytes)
    framed = np.empty(len(ids) + count, dtype=ids.dtype)
    is_text = np.ones(len(framed), dtype=np.bool_)
    is_text[starts] = False
    framed[is_text] = ids
    framed[starts] = eot
    return Piece(framed, starts, text_bytes)


class SplitWriter:
    """Appends documents to the shards and the index of one split."""

    def __init__(self, folder: Path, stem: str, dtype: np.dtype[Any], eot: int, shard_size: int) -> None:
        self.folder = folder
        self.stem = stem
        self.shard_size = shard_size
        self.dtype = dtype
        self.eot = eot
        self.files = contextlib.ExitStack()  # closes what an error leaves open
        self.index = self.files.enter_context(HashedFile(folder / f"{stem}.idx"))
        self.shard: HashedFile | None = None
        self.room = 0  # ids that still fit into the open shard
        self.shards: list[dict[str, Any]] = []
        self.tokens = self.documents = self.text_bytes = 0

    def __enter__(self) -> "SplitWriter":
        return self

    def __exit__(self, *failure: object) -> None:
        self.files.close()

    def add(self, piece: Piece) -> None:
        """Append consecutive documents."""
        self.index.write((self.tokens + piece.starts).astype("<u8").data)
        self._append(piece.ids)
        self.documents += len(piece.starts)
        self.text_bytes += piece.text_bytes

    def close(self) -> dict[str, Any]:
        """Append the closing eot, finish the files, and return what store.json says of the split."""
        self._append(np.array([self.eot], dtype=self.dtype))
        self._finish_shard()
        self.index.finish()
        return {
            "shards": self.shards,
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.text_bytes,
            "idx": {"file": self.index.path.name, "sha256": self.index.sha256.hexdigest()},
        }

    def _append(self, ids: np.ndarray[Any, Any]) -> None:
        while len(ids):
            if self.shard is None or self.room == 0:
                self._finish_shard()
                path = self.folder / f"{self.stem}_{len(self.shards):06d}.bin"
                self.shard = self.files.enter_context(HashedFile(path))
                self.room = self.shard_size
            part = ids[: self.room]
            self.shard.write(part.data)
            self.room -= len(part)
            self.tokens += len(part)
            ids = ids[len(part) :]

    def _finish_shard(self) -> None:
        if self.shard is None:
            return
        self.shard.finish()
        self.shards.append(
            {
                "file": self.shard.path.name,
                "tokens": self.shard_size - self.room,
                "dtype": "uint16" if self.dtype.itemsize == 2 else "uint32",
                "offset": 0,
                "sha256": self.shard.sha256.hexdigest(),
            }
        )
        self.shard = None


class HashedFile:
    """A file written front to back under a temporary name, hashed on the way."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(path.name + ".tmp")
        self.sha256 = hashlib.sha256()
        self.size = 0  # bytes
        with writing(path):
            self.file = self.temporary.open("wb", buffering=1 << 20)

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, *failure: object) -> None:
        with contextlib.suppress(OSError):  # what cannot be flushed after an error has been told already
            self.file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self.size += memoryview(data).nbytes
        with writing(self.path, self.size):
            self.file.write(data)
        self.sha256.update(data)

    def finish(self) -> None:
        """Give the file its name: from now on it is whole."""
        with writing(self.path, self.size):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.temporary.replace(self.path)
            sync_folder(self.path.parent)
