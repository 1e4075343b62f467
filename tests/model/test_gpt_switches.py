"""The switches that no class of transformers has, against their formulas."""

import pytest
import torch
from torch import Tensor

from quatrain.errors import ConfigError
from quatrain.model.attention import Attention
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.masks import Causal

SHAPE = {"n_layer": 3, "n_head": 2, "n_embd": 16, "block_size": 10, "vocab_size": 11}
IDS = torch.randint(0, 11, (2, 10), generator=torch.Generator().manual_seed(1))
ALL = {"logit_softcap": 2.0, "value_residual": True, "embedding_shortcut": True}


def build(**switches) -> GPT:
    """A model in fp64 whose every parameter is away from where it begins."""
    model = GPT(ModelConfig(**SHAPE, **switches), torch.Generator().manual_seed(0)).double().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def values_of(attention: Attention, x: Tensor) -> Tensor:
    """The values (B, H, T, D) as projected."""
    B, T, C = x.shape
    return attention.c_attn(x)[..., 2 * C :].view(B, T, attention.n_head, -1).transpose(1, 2)


def attended(attention: Attention, x: Tensor, values: Tensor) -> Tensor:
    """Causal attention with these values, written out."""
    B, T, C = x.shape
    q, k = (
        part.view(B, T, attention.n_head, -1).transpose(1, 2) for part in attention.c_attn(x)[..., : 2 * C].chunk(2, -1)
    )
    scores = q @ k.mT / (C // attention.n_head) ** 0.5
    scores = scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf)
    return attention.c_proj((scores.softmax(-1) @ values).transpose(1, 2).reshape(B, T, C))


def straight(model: GPT, ids: Tensor) -> Tensor:
    """The logits with all three switches, block by block as their papers write them."""
    parts, cap = model.transformer, model.config.logit_softcap
    embedded = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1]))
    x, first = embedded, None
    for block in parts["h"]:
        x = block.x_mix[0] * x + block.x_mix[1] * embedded
        normed = block.ln_1(x)
        values = values_of(block.attn, normed)
        first = values if first is None else first
        mixed = values if first is values else block.attn.v_mix[0] * values + block.attn.v_mix[1] * first
        x = x + attended(block.attn, normed, mixed)
        x = x + block.mlp(block.ln_2(x))
    logits = (parts["ln_f"](x) @ parts["wte"].weight.T)[..., :11]
    return cap * torch.tanh(logits / cap)


@torch.no_grad()
def test_with_all_of_them_the_logits_are_those_of_the_formulas():
    model = build(**ALL)
    torch.testing.assert_close(model(IDS), straight(model, IDS), atol=1e-10, rtol=0)


@pytest.mark.parametrize("switch", ALL)
@torch.no_grad()
def test_each_of_them_reaches_the_logits(switch):
    with_all = build(**ALL)
    without = GPT(ModelConfig(**SHAPE, **{**ALL, switch: type(ALL[switch])(0)})).double().eval()
    without.load_state_dict({name: w for name, w in with_all.state_dict().items() if name in without.state_dict()})
    assert (with_all(IDS) - without(IDS)).abs().max() > 1e-3


def test_with_all_of_them_no_position_sees_a_later_one():
    model = build(**ALL)
    embedded = model.transformer["wte"]
    seen = []
    embedded.register_forward_hook(lambda module, inputs, output: seen.append(output.requires_grad_()) or output)
    for position in range(10):
        seen.clear()
        (of_inputs,) = torch.autograd.grad(model(IDS[:1])[0, position].sum(), seen)
        assert (of_inputs[0, : position + 1].abs().sum(-1) > 0).all()
        assert not of_inputs[0, position + 1 :].any()


def test_the_mixtures_begin_as_half_of_each_values_and_as_the_stream_alone():
    model = GPT(ModelConfig(**SHAPE, **ALL))
    for block in model.transformer["h"]:
        assert block.attn.v_mix.tolist() == [0.5, 0.5]
        assert block.x_mix.tolist() == [1.0, 0.0]


def test_the_first_block_keeps_its_own_values():
    attention = build(**ALL).transformer["h"][0].attn
    x = torch.randn(1, 10, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        y, values = attention(x, None, Causal())
        assert torch.equal(values, values_of(attention, x))
        torch.testing.assert_close(y, attended(attention, x, values), atol=1e-12, rtol=0)


def test_zero_init_begins_as_embedding_norm_and_head():
    model = GPT(ModelConfig(**SHAPE, zero_init=True), torch.Generator().manual_seed(0))
    parts = model.transformer
    with torch.no_grad():
        expected = model.head(parts["ln_f"](parts["wte"](IDS) + parts["wpe"](torch.arange(10))))
        torch.testing.assert_close(model(IDS), expected)
    drawn = GPT(ModelConfig(**SHAPE), torch.Generator().manual_seed(0))
    assert not torch.equal(drawn.transformer["h"][0].mlp.c_proj.weight, model.transformer["h"][0].mlp.c_proj.weight)


@torch.no_grad()
def test_a_soft_cap_bounds_the_logits_and_keeps_their_order():
    model = build(logit_softcap=0.5)
    free = build()
    assert model(IDS).abs().max() <= 0.5 < free(IDS).abs().max()
    assert torch.equal(model(IDS).argsort(-1), free(IDS).argsort(-1))


def test_a_soft_cap_below_zero_is_refused():
    with pytest.raises(ConfigError, match=r"logit_softcap is -1\.0, it must be above 0, or 0 for none"):
        ModelConfig(logit_softcap=-1.0)
