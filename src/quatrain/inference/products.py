"""Products with fixed weights in fp32, 16 bit or int8: for each device the fastest way that gives the right numbers.

Decoding reads every weight for each id, so the bytes of the weights are its time. On a CPU oneDNN's own layout is read
up to four times as fast as the plain one (bench/generate.py). All kernels are tried on a small product at load: one
that is missing, fails, or saturates (int8 without VNNI) is passed over.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from quatrain.model.device import pick_precision

Dtype = Literal["auto", "fp32", "bf16", "fp16", "int8"]
Product = Callable[[Tensor], Tensor]  # (rows, in) to (rows, out)
FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEAST_ROWS = 32  # cuBLAS multiplies int8 for more than 16 rows


def product_of(weight: Tensor, bias: Tensor | None, dtype: Dtype) -> Product:
    """X -> x weight^T + bias for a weight (out, in); the input is cast, the output fp32 (int8) or the weight's."""
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    kind = fastest(dtype, weight.device.type)
    made: Product = kind(weight, bias, dtype)
    return made


def resolved(dtype: Dtype, device: torch.device) -> Dtype:
    """The dtype that products really have there: bf16 where int8 does not run, and what `auto` means."""
    if dtype == "auto":
        dtype = pick_precision(dtype, device)
    return "bf16" if dtype == "int8" and fastest(dtype, device.type) is Plain else dtype


@lru_cache
def fastest(dtype: Dtype, device: str) -> Callable[..., Product]:
    """The first way that multiplies rightly on this kind of device."""
    return next((kind for kind in WAYS[dtype] if _is_right(kind, dtype, device)), Plain)


class Plain:
    """torch's own product; int8 falls back to bf16."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: Dtype) -> None:
        self.dtype = FLOATS.get(dtype, torch.bfloat16)
        self.weight, self.bias = weight.to(self.dtype), None if bias is None else bias.to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.dtype), self.weight, self.bias)


class Packed(Plain):
    """oneDNN on a CPU, the weight in the layout of its kernels."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: Dtype) -> None:
        if weight.device.type != "cpu":
            raise NotImplementedError
        super().__init__(weight, bias, dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, 1)
        self.multiply: Any = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self.multiply(x.to(self.dtype), self.weight, self.bias, "none", [], "")
        return y


class Int8:
    """int8 weights with a scale for each output channel, activations with one for each row: rows stay independent.

    Sums are whole numbers, so a row's result is the same in any batch.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: Dtype) -> None:
        scale = weight.float().abs().amax(dim=1).clamp_min(1e-30) / 127  # (out,)
        self.quantized = (weight.float() / scale[:, None]).round().to(torch.int8)
        self.scale = scale
        self.bias = torch.zeros_like(scale) if bias is None else bias.float()
        self.pack()

    def pack(self) -> None:
        """Bring the weights into the layout of the kernel."""
        self.transposed = self.quantized.t()

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float()
        steps = _steps(x)
        rows = (x / steps).round_().to(torch.int8)
        missing = max(0, LEAST_ROWS - len(rows)) if x.device.type == "cuda" else 0
        sums = torch._int_mm(F.pad(rows, (0, 0, 0, missing)), self.transposed)[: len(rows)]
        return torch.addcmul(self.bias, sums * self.scale, steps)


class Int8Packed(Int8):
    """The same by oneDNN on a CPU, which multiplies unsigned by signed: rows are shifted by 128."""

    def pack(self) -> None:
        if self.quantized.device.type != "cpu":
            raise NotImplementedError
        self.weight = torch.ops.onednn.qlinear_prepack(self.quantized, None)
        self.zeros = torch.zeros(len(self.scale), dtype=torch.int64)
        self.shift = torch.full(
            (self.quantized.shape[1],), 128.5
        )  # the conversion cuts off, which rounds what is half above
        self.multiply: Any = torch.ops.onednn.qlinear_pointwise.default
        del self.quantized

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float()
        steps = _steps(x)
        rows = torch.addcmul(self.shift, x, steps.reciprocal()).to(torch.uint8)
        y: Tensor = self.multiply(
            rows, 1.0, 128, self.weight, self.scale, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return torch.addcmul(self.bias, y, steps)


WAYS: dict[Dtype, tuple[Callable[..., Product], ...]] = {
    "fp32": (Packed, Plain),
    "bf16": (Packed, Plain),
    "fp16": (Plain,),
    "int8": (Int8Packed, Int8),
}


def _steps(x: Tensor) -> Tensor:
    """What 1 stands for in each row of int8, (rows, 1): 1/127 of the largest number, never zero.

    abs and amax take a fraction of the time of norm or aminmax over short rows.
    """
    return x.abs().amax(dim=-1, keepdim=True).mul_(1 / 127).clamp_min_(1e-30)


def _is_right(kind: Callable[..., Product], dtype: Dtype, device: str) -> bool:
    """Whether a way runs and multiplies numbers that it can hold exactly; the largest ones show saturation."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 2, (32, 64), generator=generator).float() * 254 - 127
    weight[::2] = 127
    x = torch.randint(0, 2, (3, 64), generator=generator).float() * 254 - 127
    x[0] = 127
    try:
        with torch.inference_mode():
            y = kind(weight.to(device), None, dtype)(x.to(device)).float().cpu()
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):
        return False
    return torch.allclose(y, F.linear(x, weight), rtol=1e-2, atol=1e-2)
