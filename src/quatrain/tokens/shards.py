"""The files of one split, written front to back: shards of ids and the index of document starts."""

import contextlib
import hashlib
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quatrain.files import sync_folder, writing
from quatrain.text.fast import Offsets

HASHED_AT_ONCE = 1 << 14  # bytes below which a write is hashed sooner than it is handed over
HASHED_LATER = 8  # writes that wait for it: bounds the memory


class Piece(NamedTuple):
    """Consecutive documents of one split, each behind its eot."""

    ids: npt.NDArray[Any]  # eots included, in the shards' dtype
    starts: Offsets  # of each document's eot within ids
    text_bytes: int


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
        self.full: tuple[HashedFile, Future[None]] | None = None  # on its way to the disk beside the open one
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
        self._begin_to_finish()
        self._settle()
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
                self._begin_to_finish()
                path = self.folder / f"{self.stem}_{len(self.shards) + bool(self.full):06d}.bin"
                self.shard = self.files.enter_context(HashedFile(path))
                self.room = self.shard_size
            part = ids[: self.room]
            self.shard.write(part.data)
            self.room -= len(part)
            self.tokens += len(part)
            ids = ids[len(part) :]

    def _begin_to_finish(self) -> None:
        self._settle()
        if self.shard:
            self.full = self.shard, self.shard.thread.submit(self.shard.finish)
            self.shard = None

    def _settle(self) -> None:
        """Wait for the shard that is on its way to the disk."""
        if self.full:
            shard, finished = self.full
            finished.result()
            shard.close()
            self.shards.append(
                {
                    "file": shard.path.name,
                    "tokens": shard.size // self.dtype.itemsize,
                    "dtype": "uint16" if self.dtype.itemsize == 2 else "uint32",
                    "offset": 0,
                    "sha256": shard.sha256.hexdigest(),
                }
            )
            self.full = None


class HashedFile:
    """A file written front to back under a temporary name, and hashed on the way by a thread of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(path.name + ".tmp")
        self.sha256 = hashlib.sha256()  # complete once the file is finished
        self.thread = ThreadPoolExecutor(1)
        self.ahead: deque[Future[None]] = deque()  # writes that are not hashed yet
        self.size = 0  # bytes
        with writing(path):
            self.file = self.temporary.open("wb", buffering=1 << 20)

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread, and let go of the file."""
        self.thread.shutdown(cancel_futures=True)
        with contextlib.suppress(OSError):  # what cannot be flushed after an error has been told already
            self.file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes, which must not change any more."""
        size = memoryview(data).nbytes
        self.size += size
        with writing(self.path, self.size):
            self.file.write(data)
        self._wait(0 if size < HASHED_AT_ONCE else HASHED_LATER - 1)
        if size < HASHED_AT_ONCE:
            self.sha256.update(data)
        else:
            self.ahead.append(self.thread.submit(self.sha256.update, data))

    def _wait(self, left: int) -> None:
        while len(self.ahead) > left:
            self.ahead.popleft().result()

    def finish(self) -> None:
        """Give the file its name: from now on it is whole."""
        self._wait(0)
        with writing(self.path, self.size):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.temporary.replace(self.path)
            sync_folder(self.path.parent)
