"""Where the network computes, and in which precision."""

import contextlib
import ctypes
import importlib.util
import os
import platform
import shutil
from pathlib import Path
from typing import Literal

import torch

from quatrain.errors import ConfigError, UsageError

Precision = Literal["auto", "fp32", "bf16", "fp16"]
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto` is cuda, then mps, then cpu. Raises `UsageError` for one that is not there."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind in available if available[kind]))
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if not available.get(device.type, False):
        here = ", ".join(kind for kind in available if available[kind])
        raise UsageError(f"device '{name}' is not on this machine; there is {here} (or auto)")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device '{name}': this machine has {torch.cuda.device_count()} CUDA devices, counted from 0")
    return device


def pick_precision(wanted: Precision, device: torch.device) -> Precision:
    """The precision that `auto` means on this device: bf16 where the hardware multiplies it, else fp32."""
    if wanted == "fp16" and device.type == "cpu":
        raise UsageError("train.precision fp16 gains nothing on a CPU and loses range; use fp32 or bf16")
    if wanted != "auto":
        return wanted
    return "bf16" if _multiplies_bf16(device) else "fp32"


def _multiplies_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":  # a CPU without these instructions emulates bf16, and slowly
        capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return False


def can_compile(device: torch.device) -> bool:
    """Whether the programs that torch.compile calls are on this machine."""
    compilers = ("cc", "gcc", "clang") if device.type == "cuda" else ("c++", "g++", "clang++", "cl")
    has_triton = device.type != "cuda" or importlib.util.find_spec("triton") is not None
    return has_triton and any(shutil.which(compiler) for compiler in compilers)


def pick_compile(wanted: bool | Literal["auto"], device: torch.device) -> bool:
    """Whether the step is compiled; `auto`: on CUDA, where it can be. Raises `ConfigError` if true is impossible."""
    if wanted is True and not can_compile(device):
        raise ConfigError(["train.compile is true, and this machine has no compiler that torch.compile can call"])
    return wanted is True or (wanted == "auto" and device.type == "cuda" and can_compile(device))


def fit_threads() -> None:
    """Compute with no more threads than a container's quota grants cores, which torch does not look at.

    A thread beyond them is stopped in the middle of an operation, and all others wait for it. OMP_NUM_THREADS wins.
    """
    quota = _granted_cores()
    if "OMP_NUM_THREADS" not in os.environ and quota is not None:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), int(quota))))


def _granted_cores(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The quota of this process's control group in cores, or None where there is none."""
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # versions 2 and 1
        try:
            quota, period = " ".join((root / name).read_text() for name in names).split()
        except (OSError, ValueError):
            continue
        return None if quota in ("max", "-1") else int(quota) / int(period)
    return None


def keep_freed_memory() -> None:
    """Let this process keep the memory that its tensors leave: without it each CPU step pays for the same pages anew.

    glibc hands every large block back to the system at once, and the kernel clears its pages again when the next step
    asks for them: 0.3 of the time of a 124M step (bench/step.py). Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager[object]:
    """The context in which a forward runs in this (resolved) precision."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, DTYPES[precision])
