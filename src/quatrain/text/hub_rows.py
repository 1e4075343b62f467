"""One column of a data set's files, each from any row on."""

from collections.abc import Iterator
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from quatrain.errors import DataError, did_you_mean
from quatrain.text.hub_library import endpoint, library

ROWS = 1000  # rows in a batch, and decoded at once
BLOCK = 16 << 20  # bytes asked of the Hub at once
BUFFER = 1 << 20  # bytes of a column decoded at once, however large the row groups are


class Shards(Protocol):
    """The files of a split in order (or what `datasets` takes for them)."""

    def __len__(self) -> int: ...

    def batches(self, index: int, first: int) -> Iterator[list[Any]]:
        """The values of one file from row `first` on; a string that is not UTF-8 comes as its bytes."""


class ParquetFiles:
    """Parquet, read in the calling thread: a row in the middle costs the file's index and one row group.

    The library's own reader would download the file again from its beginning, keep all of it in memory, and leave
    threads behind that can keep the process from ending.
    """

    def __init__(self, files: list[str], column: str) -> None:
        self._files, self._column = files, column
        if files:
            with self._opened(0) as file:
                self._index(file, 0)

    def __len__(self) -> int:
        return len(self._files)

    def batches(self, index: int, first: int) -> Iterator[list[Any]]:
        with self._opened(index) as file:
            parquet = self._index(file, index)
            groups = list(range(parquet.num_row_groups))
            while groups and first >= (rows := parquet.metadata.row_group(groups[0]).num_rows):
                first -= rows
                del groups[0]
            for batch in parquet.iter_batches(ROWS, row_groups=groups, columns=[self._column], use_threads=False):
                if first < len(batch):
                    yield values_of(batch.column(0)[first:])
                first = max(0, first - len(batch))

    def _index(self, file: BinaryIO, index: int) -> pq.ParquetFile:
        parquet = pq.ParquetFile(file, buffer_size=BUFFER, pre_buffer=False, page_checksum_verification=True)
        names = parquet.schema_arrow.names
        if self._column not in names:
            raise DataError(f"{self._files[index]}: {no_column(self._column, names)}")
        return parquet

    def _opened(self, index: int) -> BinaryIO:
        name = self._files[index]
        if not name.startswith("hf://"):
            return open(name, "rb")
        hub: BinaryIO = library("huggingface_hub").HfFileSystem(endpoint=endpoint()).open(name, block_size=BLOCK)
        return hub


class Streamed:
    """Any other kind of file, read by `datasets`: a row in the middle costs the file's beginning."""

    def __init__(self, builder: Any, split: str, column: str, place: str) -> None:
        rows = builder.as_streaming_dataset(split)
        names = rows.column_names or list(next(iter(rows), {}))  # JSON lines may name them with their first row only
        if column not in names:
            raise DataError(f"{place}: {no_column(column, names)}")
        self._rows, self._column = rows.select_columns([column]).with_format("arrow"), column

    def __len__(self) -> int:
        return int(self._rows.num_shards)

    def batches(self, index: int, first: int) -> Iterator[list[Any]]:
        shard = self._rows.shard(num_shards=len(self), index=index)
        for table in (shard.skip(first) if first else shard).iter(batch_size=ROWS):
            yield values_of(table.column(self._column))


def values_of(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The column's values; of a string that is not UTF-8 the bytes."""
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:
        return [_value_of(scalar) for scalar in column]


def _value_of(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return scalar.as_buffer().to_pybytes()


def no_column(column: str, known: list[str]) -> str:
    """The sentence about a column that is not there."""
    return (
        f"no column '{column}'{did_you_mean(column, known)}; found: {', '.join(known) or 'none'} "
        f"(choose one with --text-column)"
    )
