"""Where the ids of a stream's pieces come from: an array, or a file that is read in place of its map.

Pages of a map count as the process's memory once they are touched, and hundreds of kB around a window
with them; from a disk as much is read; and a file that was cut short ends the process. None of it is
so for `pread`.
"""

import contextlib
import os
import weakref
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError

AGAIN = "copy it again, or remove the folder and prepare again"

IntArray = npt.NDArray[np.integer[Any]]


class Source(Protocol):
    """The bytes of ids in one dtype, by the position of the ids."""

    def read(self, begin: int, length: int) -> bytes:
        """Ids begin .. begin + length - 1, which must be there."""

    def advise(self, begin: int, length: int) -> None:
        """These ids are read soon; returns at once."""


def source_of(piece: IntArray, dtype: np.dtype[Any]) -> Source:
    """A piece as bytes of a dtype that holds its ids.

    Of a map that nobody writes to the file is read, where the platform can read at a place.
    """
    if isinstance(piece, np.memmap) and piece.mode == "r" and piece.filename and hasattr(os, "pread"):
        file = _File(Path(str(piece.filename)), piece.offset, piece.itemsize)
        return file if piece.dtype == dtype else _Converted(file, piece.dtype, dtype)
    return _Array(np.asarray(piece), dtype)


class _Array:
    def __init__(self, ids: IntArray, dtype: np.dtype[Any]) -> None:
        self.ids = ids
        self.dtype = dtype

    def read(self, begin: int, length: int) -> bytes:
        return self.ids[begin : begin + length].astype(self.dtype, copy=False).tobytes()

    def advise(self, begin: int, length: int) -> None:
        pass


class _File:
    def __init__(self, path: Path, offset: int, size: int) -> None:
        self.path = path
        self.offset = offset  # bytes before the first id
        self.size = size  # bytes of an id

    def read(self, begin: int, length: int) -> bytes:
        """See `Source`. Raises `DataError` for a file that is gone or became shorter since it was mapped."""
        wanted = length * self.size
        data = os.pread(self._descriptor, wanted, self.offset + begin * self.size)
        return data if len(data) == wanted else self._in_parts(self.offset + begin * self.size, wanted)

    def advise(self, begin: int, length: int) -> None:
        if hasattr(os, "posix_fadvise"):
            where = self.offset + begin * self.size
            with contextlib.suppress(OSError):  # some file systems take no advice
                os.posix_fadvise(self._descriptor, where, length * self.size, os.POSIX_FADV_WILLNEED)

    def _in_parts(self, where: int, wanted: int) -> bytes:
        """One read gives at most 2 GB."""
        data = bytearray()
        while len(data) < wanted:
            part = os.pread(self._descriptor, wanted - len(data), where + len(data))
            if not part:
                end = where + len(data)
                raise DataError(f"{self.path}: ends at byte {end:,}, it was longer when it was opened; {AGAIN}")
            data += part
        return bytes(data)

    @cached_property
    def _descriptor(self) -> int:
        """Opened by the first read: most of those who open a store read few of its files."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}, it was there when it was opened; {AGAIN}") from error
        weakref.finalize(self, os.close, descriptor)
        return descriptor


class _Converted:
    """A file of narrower ids, or of another byte order."""

    def __init__(self, file: _File, stored: np.dtype[Any], dtype: np.dtype[Any]) -> None:
        self.file = file
        self.stored = stored
        self.dtype = dtype

    def read(self, begin: int, length: int) -> bytes:
        return np.frombuffer(self.file.read(begin, length), dtype=self.stored).astype(self.dtype).tobytes()

    def advise(self, begin: int, length: int) -> None:
        self.file.advise(begin, length)
