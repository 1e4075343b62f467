"""Devices that a run can be planned for: the figures of their makers, and this machine's own."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["h100", "h200", "a100", "4090", "cpu"]
NODE = 8  # GPUs in one machine
GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """One device, and how fast it speaks to others of its kind; None where it is not known."""

    name: str
    memory: int | None  # bytes
    usable: float  # share of it that is left to tensors
    peaks: dict[str, float]  # FLOP/s by precision, dense
    link: float | None  # bytes/s each way to another device of the same machine
    network: float | None  # bytes/s each way for each device, to another machine


# A CUDA context, workspaces of libraries and holes in the allocator's blocks take a tenth.
USABLE = 0.9
# NVIDIA's data sheets: H100 SXM 80 GB, H200 SXM, A100 SXM 80 GB, GeForce RTX 4090. fp32 is TF32, which `train` sets.
# Links: NVLink 4 and 3, half of "900" and "600 GB/s"; PCIe 4.0 x16. Networks: 400 Gb/s a GPU in a DGX H100, 200 in a
# DGX A100.
MACHINES: dict[str, Machine] = {
    "h100": Machine(
        "NVIDIA H100 80GB", 80 * GIB, USABLE, {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 494.7e12}, 450e9, 50e9
    ),
    "h200": Machine(
        "NVIDIA H200 141GB", 140 * GIB, USABLE, {"bf16": 989.4e12, "fp16": 989.4e12, "fp32": 494.7e12}, 450e9, 50e9
    ),
    "a100": Machine(
        "NVIDIA A100 80GB", 80 * GIB, USABLE, {"bf16": 312e12, "fp16": 312e12, "fp32": 156e12}, 300e9, 25e9
    ),
    "4090": Machine(
        "NVIDIA RTX 4090", 24 * GIB, USABLE, {"bf16": 165.2e12, "fp16": 165.2e12, "fp32": 82.6e12}, 32e9, None
    ),
}


def this_cpu(peaks: dict[str, float]) -> Machine:
    """The processor of this machine, with its memory and the peaks that were measured."""
    return Machine("this machine's CPU", _own_memory(), 0.95, peaks, None, None)


def named_like(name: str) -> str | None:
    """The planned device that a CUDA device of this name is, or None."""
    return next((kind for kind in MACHINES if kind.upper() in name.upper()), None)


def _own_memory() -> int | None:
    """Bytes of memory, or what a container is granted of them."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # Windows has no sysconf
        return None
    try:
        return min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no control group, or "max"
        return memory
