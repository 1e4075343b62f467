"""The process that trains: how it is set up for a device, and what it says when memory runs out."""

import contextlib
from collections.abc import Iterator

import torch

from quatrain.errors import QuatrainError
from quatrain.model.device import fit_threads, keep_freed_memory


def settle(where: torch.device, deterministic: bool) -> None:
    """Set this process up to train on the device."""
    torch.use_deterministic_algorithms(deterministic)
    if where.type == "cpu":
        keep_freed_memory()
        fit_threads()
    if where.type == "cuda":
        torch.cuda.set_device(where.index or 0)  # pinned buffers belong to it
        torch.set_float32_matmul_precision("high")  # TF32 for what stays fp32


@contextlib.contextmanager
def enough_memory(device: torch.device, micro_batch: int) -> Iterator[None]:
    """Turn running out of the device's memory into a message that says what to change."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, its parent on a CPU
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise QuatrainError(
            f"{device} has not enough memory for this model and micro_batch {micro_batch}; give the same command "
            f"with a smaller --train.micro-batch (the rows of each step stay the same) or a smaller model"
        ) from error
