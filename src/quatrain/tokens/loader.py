"""Rows of a split as tensors on a device. The loader has no state: a row number alone gives its ids."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quatrain.tokens.config import DataConfig, Packing
from quatrain.tokens.order import window_starts, windows_per_epoch
from quatrain.tokens.packing import IGNORED, document_ids, positions
from quatrain.tokens.pieces import IntArray
from quatrain.tokens.rows import PackedRows, has_table, row_table
from quatrain.tokens.store import TokenStream

Windows = IntArray  # (B, T+1), as narrow as the ids are stored

STARTS_AT_ONCE = 4096  # rows; the order of one row costs as much as that of a few hundred
HASHED_AT_ONCE = 256  # rows


@dataclass(frozen=True)
class Batch:
    """B rows. But for `concat` packing they also say which document each input belongs to."""

    inputs: torch.Tensor  # int64 (B, T)
    targets: torch.Tensor  # int64 (B, T); packing.IGNORED where no loss counts it
    valid: int  # targets that count, known without asking the device
    documents: torch.Tensor | None = None  # int64 (B, T), grows at each document
    positions: torch.Tensor | None = None  # int64 (B, T), restarts at each document

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of the fields that are there and are tensors."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The same batch with every tensor changed."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)


class Loader:
    """Rows of one split in the order of a `DataConfig`."""

    def __init__(self, stream: TokenStream, config: DataConfig, eot: int, device: torch.device | str = "cpu") -> None:
        """Raises `DataError` if the split is shorter than one window, or cannot tell the documents that rows need."""
        self.stream = stream
        self.config = config
        self.eot = eot
        self.device = torch.device(device)
        self.table = row_table(stream, config.seq_len, config.packing) if has_table(config.packing) else None
        self.rows_per_epoch = self.table.rows if self.table else windows_per_epoch(len(stream), config.seq_len, "train")
        self._known = 0, np.empty(0, dtype=np.int64)  # a first row, and the starts from it on

    def batch(self, first_row: int, count: int, device: torch.device | None = None) -> Batch:
        """Rows first_row .. first_row + count - 1, on the loader's device or another."""
        if self.table is not None:
            return batch_of_rows(self._packed(first_row, count), device or self.device)
        windows = self._windows(first_row, count)  # (B, T+1)
        return batch_of(windows, self.config.packing, self.eot, device or self.device)

    def valid(self, first_row: int, count: int) -> int:
        """How many targets of these rows count in the loss, known without reading them."""
        if self.table is not None:
            return self.table.targets_of(self.table_rows(first_row, count))
        return count * self.config.seq_len

    def advise(self, first_row: int, count: int) -> None:
        """Have the system read these rows ahead of their `batch`; returns at once."""
        if self.table is not None:
            starts = self.table.firsts_of(self.table_rows(first_row, count))
        else:
            starts = self._starts(first_row, count)
        self.stream.advise(starts, self.config.seq_len + 1)

    def hash_of(self, first_row: int, count: int) -> str:
        """sha256 of what these rows hold: a checkpoint keeps it for the batch that comes next."""
        digest = hashlib.sha256()
        read = self._windows if self.table is None else self._packed
        for first in range(first_row, first_row + count, HASHED_AT_ONCE):
            rows = read(first, min(HASHED_AT_ONCE, first_row + count - first))
            digest.update(np.asarray(rows, dtype="<i8").data)
        return digest.hexdigest()

    def table_rows(self, first_row: int, count: int) -> npt.NDArray[np.int64]:
        """Which rows of the table these are."""
        assert self.table is not None
        rows = np.arange(first_row, first_row + count, dtype=np.int64)
        # k rows are in the same order as k windows of one target: a permutation, and no phase.
        return window_starts(self.config.order, self.table.rows + 1, 1, self.config.seed, rows)

    def told(self) -> str:
        """What an epoch holds and what it does not, for a person."""
        T, k, targets = self.config.seq_len, self.rows_per_epoch, len(self.stream) - 1
        if self.table is None:
            return f"{k:,} windows of {T} an epoch, {targets % T} of {targets:,} targets left out by its phase"
        return (
            f"{k:,} rows of {T} an epoch hold all {targets:,} targets, {self.table.padding / (k * T):.1%} of their "
            f"positions are padding, {self.table.cut:,} of {self.table.documents:,} documents are longer and cut"
        )

    def _packed(self, first_row: int, count: int) -> PackedRows:
        assert self.table is not None
        return self.table.read(self.stream, self.table_rows(first_row, count), self.eot)

    def _windows(self, first_row: int, count: int) -> Windows:
        return self.stream.gather(self._starts(first_row, count), self.config.seq_len + 1, self.stream.dtype)

    def _starts(self, first_row: int, count: int) -> npt.NDArray[np.int64]:
        """Where the windows of these rows begin, (count,); rows that follow are computed along and remembered."""
        known_from, known = self._known
        if not known_from <= first_row <= known_from + len(known) - count:
            ahead = max(count, min(STARTS_AT_ONCE, self.rows_per_epoch))
            rows = np.arange(first_row, first_row + ahead, dtype=np.int64)
            config = self.config
            known_from, known = (
                first_row,
                window_starts(config.order, len(self.stream), config.seq_len, config.seed, rows),
            )
            self._known = known_from, known  # one assignment: a feed's thread reads it too
        return known[first_row - known_from : first_row - known_from + count]


def batch_of(windows: Windows, packing: Packing, eot: int, device: torch.device) -> Batch:
    """Windows of T+1 ids as inputs and targets on a device, with documents and positions where packing asks."""
    inputs, targets = windows[:, :-1], windows[:, 1:]
    if packing == "concat":
        return Batch(_to_device(inputs, device), _to_device(targets, device), targets.size)
    return Batch(
        _to_device(inputs, device),
        _to_device(targets, device),
        targets.size,
        _to_device(document_ids(inputs, eot), device),
        _to_device(positions(inputs, eot), device),
    )


def batch_of_rows(rows: PackedRows, device: torch.device) -> Batch:
    """Packed rows on a device; those without a target count nothing."""
    inputs, targets, documents, positions = (_to_device(array, device) for array in rows)
    return Batch(inputs, targets, int(np.count_nonzero(rows.targets != IGNORED)), documents, positions)


def _to_device(array: IntArray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array.astype(np.int64, order="C"))
    if device.type != "cuda":
        return tensor.to(device)
    # From pinned memory the copy runs beside the computation; torch keeps the buffer until it is done.
    return tensor.pin_memory().to(device, non_blocking=True)
