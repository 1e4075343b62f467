"""Causal attention in bf16 on a CPU, made of matrix products over blocks of queries.

PyTorch's flash kernel for CPUs is slow in bf16, above all backward: at 256 to 512 positions this takes about 0.6 of
its time (bench/step.py). As there, scores and softmax are fp32, and backward computes them again, so that nothing
of T x T is kept.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 128  # queries; the scores of more fall out of the caches, those of fewer make small products


class BlockedAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(D)) v over the keys so far, for q (B, H, T, D) and k, v (B, H_kv, T, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = _grouped(q, k.shape[1]), k.contiguous(), v.contiguous()  # q: (B, H_kv, R, T, D)
        y = torch.empty_like(q)
        for start, end in _blocks(q):
            p = _probabilities(q, k, start, end)  # (B, H_kv, R, end - start, end)
            y[..., start:end, :] = _times(p, v[..., :end, :])
        ctx.save_for_backward(q, k, v)
        return y.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        of_y = _grouped(of_y, k.shape[1])
        of_q = torch.empty_like(q)
        of_k, of_v = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        for start, end in _blocks(q):
            block, seen = (..., slice(start, end), slice(None)), (..., slice(end), slice(None))
            p = _probabilities(q, k, start, end)
            of_v[seen] += _flat(p).mT @ _flat(of_y[block])
            of_p = _times(of_y[block], v[seen].mT)
            of_s = torch._softmax_backward_data(of_p, p, -1, p.dtype).mul_(scale)
            of_q[block] = _times(of_s, k[seen])
            of_k[seen] += _flat(of_s).mT @ _flat(q[block])
        return of_q.flatten(1, 2), of_k.to(k.dtype), of_v.to(v.dtype)


def _blocks(q: Tensor) -> list[tuple[int, int]]:
    T = q.shape[-2]
    return [(start, min(start + BLOCK, T)) for start in range(0, T, BLOCK)]


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Heads (B, H, T, D) by the keys that they share: (B, groups, R, T, D)."""
    B, _, T, D = x.shape
    return x.reshape(B, groups, -1, T, D).contiguous()


def _flat(x: Tensor) -> Tensor:
    """The positions of all heads of a group behind each other: (B, groups, R n, ...)."""
    return x.flatten(2, 3)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """Each head's x (B, groups, R, n, m) by what its group shares, y (B, groups, m, l): (B, groups, R, n, l)."""
    return (_flat(x) @ y).view(*x.shape[:-1], -1)


def _probabilities(q: Tensor, k: Tensor, start: int, end: int) -> Tensor:
    """Attention of the queries start .. end to the keys 0 .. end, (B, H_kv, R, end - start, end), dtype of q."""
    n = end - start
    scores = _times(q[..., start:end, :].float(), k[..., :end, :].float().mT)
    scores[..., start:] += torch.full((n, n), -torch.inf).triu(1)
    return torch.softmax(scores.mul_(q.shape[-1] ** -0.5), dim=-1).to(q.dtype)
