"""Rows of a split as tensors on a device. The loader has no state: a row number alone gives its window."""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quatrain.tokens.config import DataConfig, Packing
from quatrain.tokens.order import window_starts, windows_per_epoch
from quatrain.tokens.packing import document_ids, positions
from quatrain.tokens.store import TokenStream

Windows = npt.NDArray[np.int64]  # (B, T+1)


@dataclass(frozen=True)
class Batch:
    """B windows. With `document` packing it also says which document each input belongs to."""

    inputs: torch.Tensor  # int64 (B, T)
    targets: torch.Tensor  # int64 (B, T); packing.IGNORED where no loss counts it
    valid: int  # targets that count, known without asking the device
    documents: torch.Tensor | None = None  # int64 (B, T), grows at each eot
    positions: torch.Tensor | None = None  # int64 (B, T), restarts at each eot


class Loader:
    """Rows of one split in the order of a `DataConfig`."""

    def __init__(self, stream: TokenStream, config: DataConfig, eot: int, device: torch.device | str = "cpu") -> None:
        """Raises `DataError` if the split is shorter than one window."""
        self.stream = stream
        self.config = config
        self.eot = eot
        self.device = torch.device(device)
        self.rows_per_epoch = windows_per_epoch(len(stream), config.seq_len, "train")

    def batch(self, first_row: int, count: int) -> Batch:
        """Rows first_row .. first_row + count - 1, on the device."""
        windows = self._windows(first_row, count)  # (B, T+1)
        return batch_of(windows, self.config.packing, self.eot, self.device)

    def hash_of(self, first_row: int, count: int) -> str:
        """sha256 of the windows of these rows: a checkpoint keeps it for the batch that comes next."""
        return hashlib.sha256(self._windows(first_row, count).astype("<i8").tobytes()).hexdigest()

    def _windows(self, first_row: int, count: int) -> Windows:
        config = self.config
        rows = np.arange(first_row, first_row + count, dtype=np.int64)
        starts = window_starts(config.order, len(self.stream), config.seq_len, config.seed, rows)
        return self.stream.gather(starts, config.seq_len + 1)


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


def _to_device(array: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    # From pinned memory the copy runs beside the computation; torch keeps the buffer until it is done.
    return tensor.pin_memory().to(device, non_blocking=True)
