"""Documents from files: .txt, .jsonl and .parquet, plain or .gz/.zst, and the built-in sonnets.

Every file is read to its declared end: a compressed file that stops early, a line that is not JSON,
a text that is not a string is an error that names file and line or row, never a shorter corpus.
Streams from a hub become one more kind of `Source`.
"""

import glob
import hashlib
import io
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from quatrain.errors import DataError, did_you_mean

KINDS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".zst")
CHUNK = 1 << 20  # bytes read from disk at once
PARQUET_ROWS = 256  # rows decoded at once: a few MB of web text

BUILT_IN = {"corpus:sonnets": "sonnets.txt"}


class Document(NamedTuple):
    """One text and where it stands, for messages: `file.jsonl:17`."""

    text: str
    place: str


@dataclass(frozen=True)
class Source:
    """One input file (or built-in corpus) and how to read it."""

    path: Path
    kind: str  # ".txt", ".jsonl", ".parquet", or "poems" for a built-in corpus
    compression: str  # "", ".gz" or ".zst"

    @property
    def name(self) -> str:
        """The file's base name, the only part of its path that a store keeps; U+FFFD for bytes that are not UTF-8."""
        return os.fsencode(self.path.name).decode("utf-8", errors="replace")

    @property
    def stem(self) -> str:
        """The base name without the endings that say how to read it."""
        kind = ".txt" if self.kind == "poems" else self.kind
        return self.name[: len(self.name) - len(kind) - len(self.compression)]


def find_sources(words: list[str]) -> tuple[list[Source], list[Path]]:
    """Files that the words name, in order, and the files of unknown kind found in folders.

    A word is a file, a folder (searched whole, sorted), a glob (sorted), or `corpus:sonnets`.
    An existing path wins over a glob. A named file of unknown kind, a word that matches
    nothing and a corpus without any file raise `DataError`.
    """
    found: list[Source] = []
    passed_over: list[Path] = []
    for word in words:
        if word.startswith("hub:"):
            raise DataError(
                f"{word}: hub streams are not read yet; download the data set's files and name their folder"
            )
        if word.startswith("corpus:"):
            found.append(_built_in(word))
        elif os.path.isdir(word):
            for path in _files_below(Path(word)):
                source = _recognise(path)
                if source is None:
                    passed_over.append(path)
                else:
                    found.append(source)
        else:
            found.extend(_named(path) for path in _matches(word))
    _check_named_once(found)
    if not found:
        raise DataError(f"no document files in {', '.join(words)}; expected {', '.join(KINDS)}, each also .gz or .zst")
    return found, passed_over


def _check_named_once(sources: list[Source]) -> None:
    seen: dict[tuple[int, int], Path] = {}
    for source in sources:
        try:
            found = source.path.stat()
        except OSError:
            continue  # reading it will say what is wrong
        first = seen.setdefault((found.st_dev, found.st_ino), source.path)
        if first is not source.path:
            raise DataError(
                f"{source.path} is the same file as {first}; name it once, or its documents would count twice"
            )


def _built_in(word: str) -> Source:
    if word not in BUILT_IN:
        raise DataError(f"no built-in corpus '{word}'{did_you_mean(word, BUILT_IN)}; there is {', '.join(BUILT_IN)}")
    return Source(Path(str(resources.files("quatrain.text") / BUILT_IN[word])), "poems", "")


def _files_below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}; expected a folder that can be read") from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent) / name for name in sorted(names) if not name.startswith("."))


def _matches(word: str) -> list[Path]:
    if os.path.exists(word):
        return [Path(word)]
    matched = [Path(name) for name in sorted(glob.glob(word, recursive=True)) if os.path.isfile(name)]
    if not matched:
        raise DataError(f"{word}: no such file or folder, and no file matches it as a pattern")
    return matched


def _named(path: Path) -> Source:
    source = _recognise(path)
    if source is None:
        raise DataError(f"{path}: unknown kind of file; expected {', '.join(KINDS)}, each also .gz or .zst")
    return source


def _recognise(path: Path) -> Source | None:
    name = path.name.lower()
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    name = name.removesuffix(compression)
    kind = next((ending for ending in KINDS if name.endswith(ending)), "")
    return Source(path, kind, compression) if kind else None


def content_hash(source: Source) -> str:
    """sha256 of the file as it lies on disk."""
    with _open(source.path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_documents(source: Source, column: str = "text") -> Iterator[Document]:
    """The documents of one source in order, empty ones included.

    `column` is the JSON key or parquet column that holds the text. Line ends are kept as they
    are; a byte-order mark is dropped. Raises `DataError` that names the file and the line or row.
    """
    readers = {".txt": _read_text, ".jsonl": _read_json_lines, ".parquet": _read_parquet, "poems": _read_poems}
    with _open(source.path) as file:
        yield from readers[source.kind](source, file, column)


def _open(path: Path) -> io.BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a file that can be read") from error


def _read_text(source: Source, file: BinaryIO, column: str) -> Iterator[Document]:
    data = b"".join(_chunks(source, file))
    yield Document(_decode(data, str(source.path)), str(source.path))


def _read_poems(source: Source, file: BinaryIO, column: str) -> Iterator[Document]:
    # The blocks between blank lines; the final newline of the file belongs to none of them.
    blocks = file.read().decode().strip("\n").split("\n\n")
    yield from (Document(block, f"{source.name}, poem {number}") for number, block in enumerate(blocks, 1))


def _read_json_lines(source: Source, file: BinaryIO, column: str) -> Iterator[Document]:
    for number, line in enumerate(_lines(_chunks(source, file)), 1):
        if not line.strip():
            continue
        place = f"{source.path}:{number}"
        try:
            # The standard library's parser is strict: a raw control character is an error.
            row = json.loads(_decode(line, place))
        except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
            raise DataError(f"{place}: not a line of JSON ({error})") from error
        yield Document(_text_of(row, column, place), place)


def _text_of(row: Any, column: str, place: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected a JSON object, found {_kind_of(row)}")
    if column not in row:
        raise DataError(f"{place}: {_no_column(column, list(row))}")
    return _string(row[column], column, place)


def _read_parquet(source: Source, file: BinaryIO, column: str) -> Iterator[Document]:
    with tempfile.TemporaryFile() as plain:
        if source.compression:  # parquet is read from its end: it needs a file that can seek
            for chunk in _chunks(source, file):
                plain.write(chunk)
            file = plain
        try:
            yield from _parquet_rows(source, pq.ParquetFile(file, page_checksum_verification=True), column)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{source.path}: not a readable parquet file ({error})") from error


def _parquet_rows(source: Source, parquet: pq.ParquetFile, column: str) -> Iterator[Document]:
    names = parquet.schema_arrow.names
    if column not in names:
        raise DataError(f"{source.path}: {_no_column(column, names)}")
    number = 0
    for batch in parquet.iter_batches(batch_size=PARQUET_ROWS, columns=[column]):
        for value in batch.column(0):
            number += 1
            place = f"{source.path}, row {number}"
            try:
                text = value.as_py()
            except UnicodeDecodeError as error:
                raise DataError(f"{place}: not valid UTF-8 ({error.reason} at byte {error.start})") from error
            yield Document(_string(text, column, place), place)


def _string(value: Any, column: str, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place}: column '{column}' holds {_kind_of(value)}, expected a string")
    return value


def _no_column(column: str, known: list[str]) -> str:
    return (
        f"no column '{column}'{did_you_mean(column, known)}; found: {', '.join(known) or 'none'} "
        f"(choose one with --text-column)"
    )


def _kind_of(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def _decode(data: bytes, place: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{place}: this is UTF-16; expected UTF-8 (convert it with: iconv -f UTF-16 -t UTF-8)")
    try:
        return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not valid UTF-8 ({error.reason} at byte {error.start})") from error


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Split on the newline byte alone: other line separators are legal inside a JSON string."""
    rest = io.BytesIO()
    for chunk in chunks:
        first, *more = chunk.split(b"\n")
        rest.write(first)
        if more:
            yield rest.getvalue()
            yield from more[:-1]
            rest = io.BytesIO()
            rest.write(more[-1])
    if rest.tell():
        yield rest.getvalue()


def _chunks(source: Source, file: BinaryIO) -> Iterator[bytes]:
    raw = iter(lambda: file.read(CHUNK), b"")
    return _decompress(source, raw) if source.compression else raw


def _decompress(source: Source, raw: Iterator[bytes]) -> Iterator[bytes]:
    """Frame after frame, so that one without its end is seen (the libraries' own readers pass it over)."""
    frame: Any = None
    frames = 0
    for data in raw:
        while data:
            if frame is None:
                if frames and source.compression == ".gz":
                    data = data.lstrip(b"\0")  # gzip allows zero padding between and after members
                    if not data:
                        break
                frames += 1
                frame = _new_frame(source.compression)
            try:
                yield frame.decompress(data)
            except (zlib.error, zstandard.ZstdError) as error:
                raise DataError(f"{source.path}: damaged {source.compression} data ({error})") from error
            if not frame.eof:
                break
            data = frame.unused_data
            frame = None
    if not frames or frame is not None:
        raise DataError(f"{source.path}: truncated: its {source.compression} data stops before its end; copy it again")


def _new_frame(compression: str) -> Any:
    if compression == ".gz":
        return zlib.decompressobj(wbits=31)
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
