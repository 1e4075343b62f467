"""The rows of a task: from a file that is given, or from the Hub at a pinned revision, checked by their hashes."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quatrain.errors import DataError
from quatrain.inference.items import Row
from quatrain.text.hub_address import HubAddress
from quatrain.text.hub_files import fetch
from quatrain.text.parquet import read_rows
from quatrain.text.reading import read_objects
from quatrain.text.sources import find_sources


@dataclass(frozen=True)
class Published:
    """Where a data set is published. A commit names its content; `sha256` holds what is known of single files."""

    repo: str
    revision: str
    files: str  # a pattern
    sha256: tuple[tuple[str, str], ...] = ()


def read_published(published: Published) -> list[Row]:
    """Its rows, fetched once into the Hub's cache. Raises `DataError`, also for content that is not the pinned one."""
    address = HubAddress(published.repo, revision=published.revision)
    folder, files = fetch(address, published.files)
    known = dict(published.sha256)
    for file in files:
        expected = known.get(file.relative_to(folder).as_posix())
        if expected is not None and _sha256(file) != expected:
            raise DataError(
                f"{address}: {file.name} has another sha256 than the pinned {expected[:16]}; remove it from the Hub's "
                f"cache ({file}) and give the command again"
            )
    return read_file(files)


def read_file(files: Sequence[Path]) -> list[Row]:
    """The rows of .jsonl or .parquet files, plain, .gz or .zst, or folders of them. Raises `DataError`."""
    rows = list(_rows(files))
    if not rows:
        raise DataError(f"{files[0]}: holds no row; expected one question a line")
    return rows


def _rows(files: Sequence[Path]) -> Iterator[Row]:
    for source in find_sources([str(file) for file in files])[0]:
        if source.kind == ".jsonl":
            yield from read_objects(source)
        elif source.kind == ".parquet":
            yield from read_rows(source.path)
        else:
            raise DataError(f"{source.path}: expected questions as .jsonl or .parquet")


def rows_hash(rows: Sequence[Row], fields: Sequence[str]) -> str:
    """sha256 of these fields of all rows in order: the same whatever kind of file they came in."""
    digest = hashlib.sha256()
    for row in rows:
        chosen = [row.get(field) for field in fields]
        digest.update(json.dumps(chosen, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass"))
        digest.update(b"\n")
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
