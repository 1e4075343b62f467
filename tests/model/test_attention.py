import copy
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from quatrain.model import attention as attention_module
from quatrain.model import masks
from quatrain.model.attention import Attention, rotate, rotation_table
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.masks import WAYS, Causal, Dense
from quatrain.tokens.loader import batch_of
from quatrain.tokens.packing import packed_mask

EOT = 16
CPU = torch.device("cpu")


def lively(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """The model with weights so large that every part of it shows in the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.25)
    return model.eval()


def tiny(**switches) -> GPT:
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 17, **switches}
    return lively(GPT(ModelConfig(**shape), torch.Generator().manual_seed(0)))


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, EOT, shape, generator=torch.Generator().manual_seed(seed))


def turned(x: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """RoPE by complex numbers in double precision: channel i is the real part, i + D/2 the imaginary one."""
    D = x.shape[-1]
    angles = positions.double()[:, None] * theta ** (-2 * torch.arange(D // 2).double() / D)
    z = torch.complex(x[..., : D // 2].double(), x[..., D // 2 :].double()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([z.real, z.imag], dim=-1)


def softmax_attention(attention: Attention, x: torch.Tensor, positions, allowed: torch.Tensor) -> torch.Tensor:
    """The definition, head by head, in double precision; `allowed` is bool (B, T, T)."""
    twin = copy.deepcopy(attention).double()
    H, G, C = twin.n_head, twin.n_kv_head, x.shape[-1]
    D = C // H
    q, k, v = (x.double() @ twin.c_attn.weight.T + (twin.c_attn.bias if twin.c_attn.bias is not None else 0)).split(
        [C, G * D, G * D], dim=-1
    )
    heads = []
    for head in range(H):
        shared = head // (H // G)
        query = q[..., head * D : (head + 1) * D]  # (B, T, D)
        key, value = (part[..., shared * D : (shared + 1) * D] for part in (k, v))
        if hasattr(twin.q_norm, "weight"):
            query = query / (query.square().mean(-1, keepdim=True) + 1e-6).sqrt() * twin.q_norm.weight
            key = key / (key.square().mean(-1, keepdim=True) + 1e-6).sqrt() * twin.k_norm.weight
        if positions is not None:
            query, key = turned(query, positions), turned(key, positions)
        scores = (query @ key.mT / D**0.5).masked_fill(~allowed, -torch.inf)
        heads.append(scores.softmax(dim=-1) @ value)
    return twin.c_proj(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("way", ["causal", "dense", "segments"])
@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize(
    ("n_kv_head", "qk_norm", "bias"), [(0, False, True), (2, True, True), (1, False, False), (4, True, False)]
)
def test_sdpa_is_softmax_attention_written_out(n_kv_head, qk_norm, bias, position, way):
    B, T = 3, 12
    config = ModelConfig(n_head=4, n_embd=32, n_kv_head=n_kv_head, qk_norm=qk_norm, bias=bias, position=position)
    attention = lively(Attention(config))
    x = torch.randn(B, T, 32, generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 12, [0] * 5 + [1] * 7, [3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 7, 8]])
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    allowed = causal & (documents[:, :, None] == documents[:, None, :]) if way != "causal" else causal.expand(B, T, T)
    rotation = rotation_table(T, 8, 10000.0) if position == "rope" else None

    with torch.no_grad():
        y = attention(x, rotation, WAYS[way](documents) if way != "causal" else Causal())[0]
        expected = softmax_attention(attention, x, torch.arange(T) if rotation else None, allowed)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=0)


def test_the_document_mask_is_that_of_packed_mask():
    rows = np.random.default_rng(0).integers(0, 4, size=(8, 15))
    packed = batch_of(np.pad(rows, ((0, 0), (0, 1))), "document", 3, CPU)
    mask = Dense.over(packed.documents).allowed
    assert mask.shape == (8, 1, 15, 15)
    assert torch.equal(mask[:, 0], torch.from_numpy(np.stack([packed_mask(row, 3)[0] for row in rows])))


def test_case_43_the_last_of_any_prefix_attends_to_all_of_it(monkeypatch):
    model, ids = tiny(position="rope"), random_ids(2, 20)

    def largest_difference() -> float:
        with torch.no_grad():
            whole = model(ids)
            prefixes = torch.stack([model(ids[:, : t + 1])[:, -1] for t in range(20)], dim=1)
        return (whole - prefixes).abs().max().item()

    assert largest_difference() < 1e-5
    sdpa = F.scaled_dot_product_attention

    def top_left(q, k, v, **options):
        y = sdpa(q, k, v, **options)
        if q.shape[-2] < 20:  # the last query by itself, as with a cache: is_causal then shows it only key 0
            y[..., -1:, :] = sdpa(q[..., -1:, :], k, v, is_causal=True)
        return y

    monkeypatch.setattr(attention_module.F, "scaled_dot_product_attention", top_left)
    assert largest_difference() > 0.1


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 10000.0), (16, 10000.0), (16, 500000.0)])
def test_rope_is_half_split_multiplication_by_complex_numbers(head_dim, theta):
    x = torch.randn(2, 3, 50, head_dim, generator=torch.Generator().manual_seed(0))
    found = rotate(x, *rotation_table(50, head_dim, theta))
    torch.testing.assert_close(found.double(), turned(x, torch.arange(50), theta), atol=2e-5, rtol=0)


def test_rope_is_that_of_llama_in_transformers_at_all_1024_positions():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=1024)
    q, k = torch.randn(2, 1, 4, 1024, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(1024)[None])
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    table = rotation_table(1024, 16, 10000.0)
    for ours, expected in zip((rotate(q, *table), rotate(k, *table)), theirs, strict=True):
        torch.testing.assert_close(ours, expected, atol=5e-5, rtol=0)  # an ulp of the angle at position 1,023 is 6e-5


def test_under_bf16_autocast_the_rotation_stays_fp32_and_tells_all_1024_positions_apart():
    with torch.autocast("cpu", torch.bfloat16):  # built and run inside
        model = tiny(n_layer=1, position="rope", block_size=1024)
        seen = []
        model.transformer["h"][0].register_forward_pre_hook(lambda block, inputs: seen.extend(inputs[1]))
        with torch.no_grad():
            assert model(random_ids(1, 1024)).dtype == torch.bfloat16
    cos, sin = seen
    assert cos.dtype == sin.dtype == torch.float32
    assert len(torch.cat([cos, sin], dim=-1).unique(dim=0)) == 1024
    assert len(torch.arange(1024).to(torch.bfloat16).unique()) == 513  # the fault: positions counted in bf16


DOCUMENTS = (5, 7, 1, 6)  # lengths with their eot; the row of 19 ends in the last one
VARIANTS = [
    {"n_kv_head": n_kv_head, "qk_norm": qk_norm, "norm": norm}
    for n_kv_head, qk_norm, norm in product((0, 2), (False, True), ("layernorm", "rmsnorm"))
]


def packed_row(first_document: int = 0):
    """Documents behind each other in one row, and each of them alone; the seed of the first may differ."""
    alone = [random_ids(1, length, seed=i + (first_document if i == 0 else 0)) for i, length in enumerate(DOCUMENTS)]
    for ids in alone:
        ids[0, 0] = EOT
    window = torch.cat([*alone, torch.tensor([[EOT]])], dim=1)
    return batch_of(window.numpy(), "document", EOT, CPU), alone


@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("way", ["dense", "segments"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant.values())))
def test_a_packed_row_gives_each_document_the_logits_that_it_has_alone(position, variant, way, monkeypatch):
    monkeypatch.setattr(masks, "fastest_way", lambda *facts: way)
    model = tiny(position=position, **variant)
    batch, alone = packed_row()
    with torch.no_grad():
        expected = torch.cat([model(ids) for ids in alone], dim=1)
        restarted = model(batch.inputs, batch.documents, batch.positions)
        running_on = model(batch.inputs, batch.documents)
    torch.testing.assert_close(restarted, expected, atol=1e-5, rtol=0)
    if position == "rope":  # only distances count
        torch.testing.assert_close(running_on, expected, atol=1e-5, rtol=0)
    else:
        assert (running_on - expected)[:, DOCUMENTS[0] :].abs().amax(dim=-1).min() > 0.1


@pytest.mark.parametrize("way", ["dense", "segments"])
@pytest.mark.parametrize("position", ["learned", "rope"])
def test_case_41_42_another_first_document_leaves_the_others_logits_bit_equal(position, way, monkeypatch):
    monkeypatch.setattr(masks, "fastest_way", lambda *facts: way)
    model = tiny(position=position)
    (one, _), (other, _) = packed_row(), packed_row(first_document=100)
    assert not torch.equal(one.inputs, other.inputs)

    def leak(**without: None) -> float:
        arguments = [
            {"ids": batch.inputs, "documents": batch.documents, "positions": batch.positions} | without
            for batch in (one, other)
        ]
        with torch.no_grad():
            difference = model(**arguments[0]) - model(**arguments[1])
        return difference[:, DOCUMENTS[0] :].abs().max().item()

    assert leak() == 0
    assert leak(positions=None) == 0
    assert leak(documents=None) > 0.1  # case_42: positions restart, attention still crosses
    ones = torch.ones(19, 19, dtype=torch.bool).tril()
    monkeypatch.setitem(masks.WAYS, way, lambda documents: Dense(ones))
    assert leak() > 0.1  # case_41: the mask says nothing
