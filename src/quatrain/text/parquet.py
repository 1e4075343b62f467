"""Parquet: row groups are found by the file's metadata and decoded in the threads that need them."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from quatrain.errors import DataError
from quatrain.files import writing
from quatrain.text.compressed import JUDGED_FROM
from quatrain.text.rows import CHUNK, Chunk, Reading, Rows, State, no_column, no_string, not_utf8
from quatrain.text.sources import opened

IN_A_THREAD = 16 << 20  # bytes of a row group above which it is decoded in pieces while reading
# A whole row group is read at once, which is fastest; of a large one a buffer at a time, for it may have gigabytes.
WHOLE: dict[str, Any] = {"page_checksum_verification": True, "pre_buffer": False}
PIECEWISE: dict[str, Any] = WHOLE | {"buffer_size": 1 << 20}
ROWS_AT_ONCE = 256  # of a large row group: a few MB of web text


class NoColumn(DataError):
    """A file lacks the column of the text, and with it so many documents."""

    def __init__(self, message: str, rows: int) -> None:
        super().__init__(message)
        self.rows = rows


def metadata(path: Path) -> pq.FileMetaData:
    """The footer of a file. Raises `DataError`."""
    with _opened(path) as file:
        return file.metadata


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Every row of a small file with all its columns. Raises `DataError`."""
    with _opened(path) as file:
        for number in range(file.num_row_groups):
            yield from file.read_row_group(number).to_pylist()


def check_sizes(path: Path, size: int, found: pq.FileMetaData, wanted: tuple[int, int], how: Reading) -> None:
    """Raise `DataError` for a row group that declares more rows or bytes than a file of that size can be meant to hold.

    pyarrow makes room for as many rows as a damaged file declares.
    """
    for number in range(*wanted):
        rows, declared = found.row_group(number).num_rows, _bytes_of(found, number)
        if max(rows, declared) > max(JUDGED_FROM, how.max_ratio * size):
            raise DataError(
                f"{path}: a row group declares {rows:,} rows and {declared:,} bytes, in a file of {size:,} bytes; if "
                f"that is right, allow it with --max-ratio"
            )


def rows_of(found: pq.FileMetaData, start: int, stop: int) -> int:
    """Rows of a range of row groups."""
    return sum(found.row_group(number).num_rows for number in range(start, stop))


def groups(found: pq.FileMetaData, size: int) -> Iterator[tuple[int, int, int]]:
    """Ranges of row groups of about so many bytes in memory each, and their bytes."""
    start = together = 0
    for number in range(found.num_row_groups):
        together += _bytes_of(found, number)
        if together >= size or number == found.num_row_groups - 1:
            yield start, number + 1, together
            start, together = number + 1, 0
    if found.num_row_groups == 0:
        yield 0, 0, 0


def chunks(path: Path, groups_wanted: tuple[int, int], how: Reading, state: State) -> Iterator[Chunk]:
    """The chunks of a range of row groups, small groups together and large ones in pieces."""
    found = metadata(path)
    with _opened(path, found, PIECEWISE) as file:
        _check_column(path, file, how.column, rows_of(found, *groups_wanted))
        check_sizes(path, path.stat().st_size, found, groups_wanted, how)
        row = 0
        for start, stop in _small_together(found, groups_wanted):
            count = rows_of(found, start, stop)
            size = sum(_bytes_of(found, number) for number in range(start, stop))
            if row + count > state["row"]:
                if size <= IN_A_THREAD:
                    parse = partial(_parse_groups, path, found, (start, stop), count, how)
                    yield Chunk(row, count, size, parse, {"row": row + count})
                else:
                    yield from _in_pieces(path, file, (start, stop), row, count, how, state)
            row += count


def chunks_of_stream(plain: Iterator[bytes], path: Path, how: Reading, state: State) -> Iterator[Chunk]:
    """The chunks of a compressed parquet file: it is read from its end, so it is unpacked into a temporary file."""
    with tempfile.TemporaryFile() as unpacked:
        for piece in plain:
            with writing(Path(tempfile.gettempdir()), unpacked.tell() + len(piece)):
                unpacked.write(piece)
        size = unpacked.tell()
        with _readable(path), pq.ParquetFile(unpacked, **PIECEWISE) as file:
            _check_column(path, file, how.column, file.metadata.num_rows)
            check_sizes(path, size, file.metadata, (0, file.metadata.num_row_groups), how)
            first = 0
            for number in range(file.metadata.num_row_groups):
                count = file.metadata.row_group(number).num_rows
                if first + count > state["row"]:
                    yield from _in_pieces(path, file, (number, number + 1), first, count, how, state)
                first += count


def _in_pieces(
    path: Path, file: pq.ParquetFile, wanted: tuple[int, int], first: int, count: int, how: Reading, state: State
) -> Iterator[Chunk]:
    row = first
    for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=list(range(*wanted)), columns=[how.column]):
        if row >= state["row"]:
            column = batch.column(batch.schema.names.index(how.column))
            yield Chunk(row, len(column), column.nbytes, partial(parse_array, column, how), {"row": row + len(column)})
        row += len(batch)
    _check_rows(path, row - first, count)


def _parse_groups(path: Path, found: pq.FileMetaData, wanted: tuple[int, int], count: int, how: Reading) -> Rows:
    # A reader of its own: one is not made for several threads.
    with _opened(path, found) as file:
        table = file.read_row_groups(list(range(*wanted)), columns=[how.column], use_threads=False)
        _check_rows(path, len(table), count)
        # By name: "a" reads the column "a.b" as well.
        column = table.column(table.schema.names.index(how.column))
        return parse_array(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks(), how)


def _check_rows(path: Path, read: int, declared: int) -> None:
    if read != declared:
        raise DataError(f"{path}: damaged: {declared:,} rows are declared, and there are {read:,}; copy it again")


def parse_array(column: pa.Array, how: Reading) -> Rows:
    """The texts of an Arrow array of strings; nulls, other types and bytes that are no text are bad rows."""
    rows = Rows()
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not _is_text(kind):
        for number, present in enumerate(column.is_valid().to_pylist()):
            found = _in_words(kind) if present else "null"
            rows.spoil(number, "text is no string", no_string(how.column, found))
        return rows
    if isinstance(column, pa.ChunkedArray):  # more than 2 GB, or of several dictionaries
        column = pa.concat_arrays(column.cast(pa.large_string()).chunks)
    elif kind != column.type or pa.types.is_string_view(kind):
        column = column.cast(pa.large_string())
    if column.null_count == 0 and _is_utf8(column):
        large = pa.types.is_large_string(column.type)
        rows.add_all_utf8(column.cast(pa.large_binary() if large else pa.binary()).to_pylist(), how.max_document)
    else:
        _one_by_one(rows, column, how)
    return rows


def _one_by_one(rows: Rows, column: pa.Array, how: Reading) -> None:
    for number, value in enumerate(column):
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:
            rows.spoil(number, "not UTF-8", not_utf8(error))
            continue
        if text is None:
            rows.spoil(number, "text is no string", no_string(how.column, "null"))
        else:
            rows.add(number, text, how.max_document)


def _is_text(kind: pa.DataType) -> bool:
    return any(of_kind(kind) for of_kind in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _in_words(kind: pa.DataType) -> str:
    # By the type, for not every value has one in Python.
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "a number"
    if pa.types.is_nested(kind):
        return "an object" if pa.types.is_struct(kind) or pa.types.is_map(kind) else "a list"
    return "a boolean" if pa.types.is_boolean(kind) else f"values of type {kind}"


def _is_utf8(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _small_together(found: pq.FileMetaData, wanted: tuple[int, int]) -> Iterator[tuple[int, int]]:
    start, together = wanted[0], 0
    for number in range(*wanted):
        together += _bytes_of(found, number)
        if together >= CHUNK or number == wanted[1] - 1:
            yield start, number + 1
            start, together = number + 1, 0


def _bytes_of(found: pq.FileMetaData, number: int) -> int:
    # Of all columns: pyarrow ends the process where the metadata of one column is damaged and asked for.
    size: int = found.row_group(number).total_byte_size
    return size


def _check_column(path: Path, file: pq.ParquetFile, column: str, rows: int) -> None:
    names = file.schema_arrow.names
    if column not in names:
        raise NoColumn(f"{path}: {no_column(column, names)}", rows)


@contextlib.contextmanager
def _opened(
    path: Path, found: pq.FileMetaData | None = None, how: Mapping[str, Any] = WHOLE
) -> Iterator[pq.ParquetFile]:
    with contextlib.ExitStack() as files, _readable(path):
        file: Any = path
        try:
            os.fspath(path).encode()
        except UnicodeEncodeError:  # a name that is no text, which Arrow cannot open
            file = files.enter_context(opened(path))
        yield files.enter_context(pq.ParquetFile(file, metadata=found, **how))


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last for a column's name
        raise DataError(f"{path}: not a readable parquet file ({error})") from error
