"""Model FLOPs utilization: the share of a device's peak that a run's arithmetic takes."""

import math
import time

import torch
from torch.nn import functional as F

from quatrain.model.config import ModelConfig
from quatrain.model.device import DTYPES, Precision
from quatrain.model.pretrained import true_shapes
from quatrain.training.machines import MACHINES, named_like


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """6 N + 12 L T C for forward and backward (Chowdhery et al. 2022, PaLM, appendix B).

    N leaves out the position embedding and, where the head is untied, the token embedding: neither is a
    matrix product. The causal half of attention is not taken off.
    """
    products = {name: math.prod(shape) for name, shape in true_shapes(config).items()}
    for name in ("transformer.wpe.weight", *(() if config.tied else ("transformer.wte.weight",))):
        products.pop(name, None)
    return 6 * sum(products.values()) + 12 * config.n_layer * seq_len * config.n_embd


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """The device's peak in this precision: of the data sheet on CUDA, measured on a CPU; None where it is not known."""
    if device.type == "cpu":
        return measured_peak(precision)
    kind = named_like(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return MACHINES[kind].peaks[precision] if kind else None


def measured_peak(precision: Precision, size: int = 1024, tries: int = 8) -> float:
    """FLOP/s of a product of two square matrices on this CPU with torch's threads: the best of several, about 50 ms."""
    dtype = DTYPES.get(precision, torch.float32)
    a, b = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    best = math.inf
    for _ in range(tries):
        started = time.perf_counter()
        F.linear(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
