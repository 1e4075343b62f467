"""The switches that GPT-2 does not know, against an implementation of their formulas written out."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT

TINY = {"n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 11}
NEW = {"value_residual": True, "embedding_shortcut": True, "logit_softcap": 2.0}
ALL_ON = NEW | {"position": "rope", "norm": "rmsnorm", "mlp": "relu2", "qk_norm": True, "tied": False, "bias": False}
IDS = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(1))


def build(**switches) -> GPT:
    return GPT(ModelConfig(**{**TINY, **switches}), torch.Generator().manual_seed(0))


def lively(model: GPT) -> GPT:
    """Every parameter moved, so that each shows in the logits."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def straight(weights: dict[str, Tensor], config: ModelConfig, ids: Tensor) -> Tensor:
    """GPT-2 with grouped heads, value residual, embedding shortcut and soft-cap, in double precision, by formulas."""
    w = {name.removeprefix("transformer."): weight.double() for name, weight in weights.items()}
    T, D = ids.shape[1], config.head_dim
    later = torch.ones(T, T, dtype=torch.bool).triu(1)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    x0 = x = w["wte.weight"][ids] + w["wpe.weight"][:T]
    for layer in range(config.n_layer):
        h = f"h.{layer}"
        if config.embedding_shortcut:
            on, back = w[f"{h}.x_mix"]
            x = on * x + back * x0
        qkv = linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn")
        q, k, v = qkv.split([config.n_embd, config.kv_heads * D, config.kv_heads * D], dim=-1)
        if layer == 0:
            v0 = v
        elif config.value_residual:
            own, first = w[f"{h}.attn.v_mix"]
            v = own * v + first * v0
        heads = []
        for head in range(config.n_head):
            shared = head // (config.n_head // config.kv_heads)
            mine, theirs = slice(head * D, head * D + D), slice(shared * D, shared * D + D)
            scores = (q[..., mine] @ k[..., theirs].mT / math.sqrt(D)).masked_fill(later, -torch.inf)
            heads.append(scores.softmax(-1) @ v[..., theirs])
        x = x + linear(torch.cat(heads, -1), f"{h}.attn.c_proj")
        u = linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc")
        gelu = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        x = x + linear(gelu, f"{h}.mlp.c_proj")
    logits = norm(x, "ln_f") @ w["wte.weight"][: config.vocab_size].T
    cap = config.logit_softcap
    return cap * torch.tanh(logits / cap) if cap else logits


SETS = [{name: value} for name, value in NEW.items()] + [NEW]


@pytest.mark.parametrize("switches", SETS, ids="-".join)
def test_logits_are_those_of_the_formulas_and_each_switch_reaches_them(switches):
    model = lively(build(**switches))
    weights, config = dict(model.named_parameters()), model.config
    with torch.no_grad():
        logits = model(IDS)
        torch.testing.assert_close(logits.double(), straight(weights, config, IDS), atol=1e-5, rtol=0)
        for name in switches:
            without = ModelConfig(**{**TINY, **switches, name: 0.0 if name == "logit_softcap" else False})
            assert (logits - straight(weights, without, IDS)).abs().max() > 0.1, name


@pytest.mark.parametrize("switch", ["value_residual", "embedding_shortcut"])
def test_a_mixture_starts_as_designed_and_the_shortcut_at_nothing(switch):
    mixtures = {name: p.tolist() for name, p in build(**{switch: True}).named_parameters() if "_mix" in name}
    if switch == "value_residual":  # the first block has nothing to mix with
        assert mixtures == {f"transformer.h.{layer}.attn.v_mix": [0.5, 0.5] for layer in (1, 2)}
    else:
        assert mixtures == {f"transformer.h.{layer}.x_mix": [1.0, 0.0] for layer in (0, 1, 2)}
    assert torch.equal(build(**{switch: True})(IDS), build()(IDS)) == (switch == "embedding_shortcut")


def test_logits_stay_within_the_cap_and_keep_their_order():
    model = build(logit_softcap=2.0)
    with torch.no_grad():
        raw = torch.linspace(-50, 50, 1001, dtype=torch.float64)
        capped = model.capped(raw)
        assert capped.abs().max() <= 2
        assert (capped.diff() >= 0).all()
        small = torch.linspace(-0.01, 0.01, 11, dtype=torch.float64)
        torch.testing.assert_close(model.capped(small), small, rtol=1e-5, atol=0)
        model.transformer["wte"].weight.mul_(1000)
        assert 1.9 < model(IDS).abs().max() <= 2


@pytest.mark.parametrize("switches", [{}, ALL_ON, {"mlp": "swiglu", "n_kv_head": 1}], ids=["gpt2", "all on", "swiglu"])
def test_a_model_whose_projections_start_at_zero_begins_as_embedding_norm_and_head(switches):
    model = build(zero_init=True, **switches)
    zero = {name for name, parameter in model.named_parameters() if not parameter.any() and "bias" not in name}
    assert zero == {f"transformer.h.{i}.{part}.c_proj.weight" for i in range(3) for part in ("attn", "mlp")}
    with torch.no_grad():
        x = model.transformer["wte"](IDS)
        if "wpe" in model.transformer:
            x = x + model.transformer["wpe"].weight[:8]
        logits = F.linear(model.transformer["ln_f"](x), model.head_weight)[..., :11]
        assert torch.equal(model(IDS), model.capped(logits))
        assert not torch.equal(build(**switches)(IDS), model(IDS))


@pytest.mark.parametrize("zero_init", [False, True])
def test_with_all_switches_logits_depend_on_exactly_the_inputs_so_far(zero_init):
    model = build(zero_init=zero_init, **ALL_ON)
    model = lively(model) if zero_init else model  # as after a step
    inputs: list[Tensor] = []
    model.transformer["wte"].register_forward_hook(
        lambda module, ids, output: inputs.append(output.detach().requires_grad_()) or inputs[0]
    )
    logits = model(IDS[:1].expand(8, 8))  # the same row; row i is asked about its logits at i
    (logits[range(8), range(8)] * torch.linspace(-1, 1, 11)).sum().backward()
    assert torch.equal(inputs[0].grad.ne(0).any(dim=-1), torch.ones(8, 8, dtype=torch.bool).tril())


def test_with_all_switches_a_packed_row_gives_each_document_the_logits_that_it_has_alone():
    model = lively(build(**ALL_ON))
    documents = torch.tensor([[0] * 3 + [1] * 5])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        packed = model(IDS[:1], documents, positions)
        alone = torch.cat([model(IDS[:1, :3]), model(IDS[:1, 3:])], dim=1)
        assert (packed - model(IDS[:1])).abs().max() > 0.1
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)
