"""Writing files so that each is whole or absent, whatever stops the process."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from quatrain.errors import QuatrainError


@contextlib.contextmanager
def writing(path: Path, size: int | None = None) -> Iterator[None]:
    """Turn a failed write inside the block into one message with the path and, where known, its bytes."""
    try:
        yield
    except OSError as error:
        amount = f" {size:,} bytes" if size is not None else ""
        raise QuatrainError(
            f"{path}: cannot write{amount}: {error.strerror}; make room or choose another place, then give the same "
            f"command again: what is complete stays complete"
        ) from error


def replace_file(path: Path, content: bytes) -> None:
    """Write the file under a temporary name, fsync it and rename it: the old content or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with writing(path, len(content)):
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder (renames, new files) survive a power cut."""
    if os.name != "posix":  # Windows cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
