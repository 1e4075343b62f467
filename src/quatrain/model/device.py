"""Where the network computes, and in which precision."""

import contextlib
from typing import Literal

import torch

from quatrain.errors import UsageError

Precision = Literal["auto", "fp32", "bf16", "fp16"]
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
    """The precision that `auto` means on this device: bf16 where CUDA has it in hardware, else fp32."""
    if wanted == "fp16" and device.type == "cpu":
        raise UsageError("train.precision fp16 gains nothing on a CPU and loses range; use fp32 or bf16")
    if wanted != "auto":
        return wanted
    has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return "bf16" if has_bf16 else "fp32"


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager[object]:
    """The context in which a forward runs in this (resolved) precision."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, DTYPES[precision])
