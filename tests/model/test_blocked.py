"""Blocked attention against its definition in double precision, and against torch's kernel; where it is taken."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quatrain.model import blocked, masks
from quatrain.model.blocked import BlockedAttention
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.loss import loss_of
from quatrain.model.masks import Causal, Segments

HEADS = [(4, 4), (4, 2), (6, 1)]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return BlockedAttention.apply(q, k, v)


def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    T = q.shape[-2]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(dim=-1) @ v


def inputs(T: int, H: int, H_kv: int, dtype: torch.dtype = torch.float32, D: int = 16) -> list[Tensor]:
    draw = torch.Generator().manual_seed(T)
    return [torch.randn(2, heads, T, D, generator=draw).to(dtype) for heads in (H, H_kv, H_kv)]


def outcome(attention, parts: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The output and the gradients of q, k and v of a sum with random weights, fp64."""
    parts = [x.detach().to(dtype or x.dtype).requires_grad_() for x in parts]
    y = attention(*parts)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).bfloat16().to(y.dtype))
    return [y.detach().double(), *(x.grad.double() for x in parts)]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((one - other).norm() / other.norm()) for one, other in zip(found, expected, strict=True)]


@pytest.mark.parametrize("T", [1, 7, 8, 9, 31])
@pytest.mark.parametrize(("H", "H_kv"), HEADS)
def test_in_fp32_output_and_gradients_are_those_of_the_definition(T, H, H_kv, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 8)
    parts = inputs(T, H, H_kv)
    found, expected = outcome(attend, parts), outcome(definition, parts, torch.float64)
    if T == 1:  # one key: its weight is one whatever q and k are
        assert not any(gradient.any() for gradient in (*found[1:3], *expected[1:3]))
        found, expected = found[::3], expected[::3]
    assert max(errors(found, expected)) < 1e-6


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize(("H", "H_kv"), HEADS)
def test_in_bf16_it_errs_no_more_than_torchs_kernel(H, H_kv, block, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", block)
    parts = inputs(300, H, H_kv, torch.bfloat16)
    expected = outcome(definition, parts, torch.float64)
    ours, theirs = (errors(outcome(each, parts), expected) for each in (attend, kernel))
    assert all(one <= 1.5 * other for one, other in zip(ours, theirs, strict=True)), (ours, theirs)


def test_views_of_one_projection_and_strided_gradients_are_taken():
    draw = torch.Generator().manual_seed(0)
    packed = torch.randn(2, 12, 8 * 16, generator=draw)
    weights = torch.randn(2, 12, 4, 16, generator=draw)
    outcomes = []
    for attention, dtype in ((attend, torch.float32), (definition, torch.float64)):
        x = packed.detach().to(dtype, copy=True).requires_grad_()
        parts = x.split([64, 32, 32], dim=-1)
        q, k, v = (part.view(2, 12, -1, 16).transpose(1, 2) for part in parts)
        y = attention(q, k, v).transpose(1, 2)
        (y * weights.to(dtype)).sum().backward()
        outcomes.append([y.detach().double(), x.grad.double()])
    assert max(errors(*outcomes)) < 1e-6


@pytest.mark.parametrize("T", [5, 13])
def test_each_query_depends_on_exactly_the_keys_so_far(T, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK", 4)
    seen = torch.zeros(T, T, dtype=torch.bool)
    for query in range(T):
        q, k, v = (x.requires_grad_() for x in inputs(T, 2, 1))
        attend(q, k, v)[:, :, query].square().sum().backward()
        reached = [x.grad.ne(0).any(dim=-1).any(dim=1).any(dim=0) for x in (q, k, v)]
        assert reached[0].nonzero().flatten().tolist() in ([query], [] if query == 0 else [query])
        assert not reached[1][query + 1 :].any()
        seen[query] = reached[2]
    assert torch.equal(seen, torch.ones(T, T, dtype=torch.bool).tril())


@pytest.mark.parametrize(
    ("dtype", "dropout", "taken"),
    [(torch.bfloat16, 0.0, True), (torch.bfloat16, 0.1, False), (torch.float32, 0.0, False)],
)
def test_it_is_taken_on_a_cpu_in_bf16_without_dropout(dtype, dropout, taken, monkeypatch):
    calls: list[int] = []
    apply = BlockedAttention.apply
    monkeypatch.setattr(masks.BlockedAttention, "apply", lambda *qkv: calls.append(1) or apply(*qkv))
    config = ModelConfig(n_layer=3, n_head=2, n_kv_head=1, n_embd=16, block_size=8, vocab_size=11, dropout=dropout)
    gpt = GPT(config, torch.Generator().manual_seed(0)).train()
    ids = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss_of(gpt, ids[:, :-1], ids[:, 1:], None, None).backward()
    assert len(calls) == (3 if taken else 0)
    with torch.no_grad():  # with dropout too: it is for training
        gpt.eval()(ids[:, :-1])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        gpt(ids[:, :-1])
    assert len(calls) == (6 if taken else 3)


def test_documents_long_enough_are_attended_within_by_it(monkeypatch):
    monkeypatch.setattr(masks, "SHORT", 4)
    q, k, v = inputs(12, 4, 2, torch.bfloat16)
    mask = Segments([[5, 7], [12]])
    found = mask.attend(q, k, v)
    for row, start, end in ((0, 0, 5), (0, 5, 12), (1, 0, 12)):
        one = (x[row : row + 1, :, start:end] for x in (q, k, v))
        assert torch.equal(found[row : row + 1, :, start:end], attend(*one))


def saved_elements(attention) -> int:
    """The most elements of a tensor that is kept for backward."""
    kept: list[int] = []
    parts = [x.requires_grad_() for x in inputs(256, 2, 2, torch.bfloat16, D=8)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        attention(*parts).sum().backward()
    return max(kept)


def test_nothing_of_t_by_t_is_kept_for_backward():
    assert saved_elements(Causal().attend) == 2 * 2 * 256 * 8  # queries, keys, values
    assert saved_elements(definition) >= 2 * 2 * 256 * 256  # the fault
