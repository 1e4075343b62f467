""".gz and .zst read to their declared end: what stops early is an error, never a shorter file."""

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from quatrain.errors import DataError

JUDGED_FROM = 64 << 20  # bytes out: a short run of zeros is no bomb
# Bytes in at once, so that one call gives at most about 100 MB: a zstd block of a few bytes stands for 128 KB.
STEP = {".gz": 1 << 16, ".zst": 1 << 12}


class Truncated(DataError):
    """A file stops before the end that it declares."""


def decompress(path: Path, compression: str, raw: Iterable[bytes], max_ratio: float) -> Iterator[bytes]:
    """The plain bytes of a compressed file that is read in pieces.

    Raises `Truncated`, or `DataError` for damaged data and for more than `max_ratio` times the bytes read.
    """
    came_in = went_out = 0
    for given, plain in _frames(path, compression, _steps(raw, STEP[compression])):
        came_in += given
        went_out += len(plain)
        if went_out > max(JUDGED_FROM, max_ratio * came_in):
            raise DataError(
                f"{path}: its first {came_in:,} bytes give over {went_out:,}, more than {max_ratio:g} times as many; "
                f"if that is right, allow it with --max-ratio"
            )
        yield plain


def _steps(raw: Iterable[bytes], size: int) -> Iterator[bytes]:
    for data in raw:
        yield from (data[start : start + size] for start in range(0, len(data), size))


def _frames(path: Path, compression: str, steps: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Bytes read and what they give, frame after frame: the libraries' own readers pass over a missing end."""
    frame: Any = None
    frames = 0
    for data in steps:
        given = len(data)
        while data:
            if frame is None:
                if frames and compression == ".gz":
                    data = data.lstrip(b"\0")  # gzip allows zero padding between and after members
                    if not data:
                        break
                frames += 1
                frame = _new_frame(compression)
            try:
                yield given, frame.decompress(data)
            except (zlib.error, zstandard.ZstdError) as error:
                raise DataError(f"{path}: damaged {compression} data ({error})") from error
            given = 0
            if not frame.eof:
                break
            data = frame.unused_data
            frame = None
    if not frames or frame is not None:
        raise Truncated(f"{path}: truncated: its {compression} data stops before its end; copy it again")


def _new_frame(compression: str) -> Any:
    if compression == ".gz":
        return zlib.decompressobj(wbits=31)
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
