"""The blocked CPU attention against torch's own, in value, gradient and memory."""

import pytest
import torch
from torch.nn import functional as F

from quatrain.model import blocked, masks
from quatrain.model.blocked import BlockedAttention
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT


def drawn(T: int, n_kv_head: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, of bf16 numbers in any dtype."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, T, 16), (2, n_kv_head, T, 16), (2, n_kv_head, T, 16), (2, 4, T, 16)]
    return [2 * torch.randn(shape, generator=generator).bfloat16().to(dtype) for shape in shapes]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def values_and_gradients(attention, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    y = attention(*leaves)
    y.backward(tensors[3])
    return [tensor.detach().double() for tensor in (y, *(leaf.grad for leaf in leaves))]


def errors(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("T", [2, 128, 129, 300])
def test_in_fp32_it_is_attention(T, n_kv_head):
    expected = values_and_gradients(plain, drawn(T, n_kv_head, torch.float64))
    found = values_and_gradients(BlockedAttention.apply, drawn(T, n_kv_head, torch.float32))
    assert max(errors(found, expected)) < 2e-6


def test_one_position_sees_itself():
    q, k, v, _ = drawn(1, 2, torch.float32)
    assert torch.equal(BlockedAttention.apply(q, k, v), v.repeat_interleave(2, dim=1))


@pytest.mark.parametrize("n_kv_head", [4, 1])
def test_in_bf16_it_is_about_as_exact_as_torchs_kernel(n_kv_head):
    expected = values_and_gradients(plain, drawn(300, n_kv_head, torch.float64))
    of_torch = errors(values_and_gradients(plain, drawn(300, n_kv_head, torch.bfloat16)), expected)
    ours = errors(values_and_gradients(BlockedAttention.apply, drawn(300, n_kv_head, torch.bfloat16)), expected)
    assert all(mine < 1.5 * theirs for mine, theirs in zip(ours, of_torch, strict=True))


def test_no_position_sees_a_later_one(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 4)
    tensors = drawn(11, 4, torch.float32)
    for position in range(11):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
        BlockedAttention.apply(*leaves)[:, :, position].sum().backward()
        reached = sum(leaf.grad.abs().sum(dim=(0, 1, 3)) for leaf in leaves[1:])
        assert (reached[: position + 1] > 0).all()
        assert not reached[position + 1 :].any()


def test_nothing_of_the_size_of_the_scores_is_kept():
    q, k, v, _ = drawn(256, 4, torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda x: x):
        BlockedAttention.apply(q.requires_grad_(), k, v)
    assert kept
    assert max(kept) == q.numel() < 2 * 4 * 256 * 256


@pytest.mark.parametrize(("dropout", "dtype", "used"), [(0.0, "bf16", 2), (0.1, "bf16", 0), (0.0, "fp32", 0)])
def test_a_cpu_model_uses_it_in_bf16_without_dropout(dropout, dtype, used, monkeypatch):
    calls = []
    monkeypatch.setattr(masks.BlockedAttention, "apply", lambda *qkv: calls.append(1) or plain(*qkv))
    config = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=11, dropout=dropout)
    model = GPT(config, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        model(torch.zeros(1, 8, dtype=torch.int64))
    assert len(calls) == used
