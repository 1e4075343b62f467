import copy
import math
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from quatrain.errors import ConfigError
from quatrain.model import attention as attention_module
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.masks import Causal
from quatrain.model.pretrained import disk_shapes

TINY = {"n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 8, "vocab_size": 11}
RICH = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "n_kv_head": 2, "qk_norm": True, "tied": False}


def build(seed: int = 0, **switches) -> GPT:
    return GPT(ModelConfig(**{**TINY, **switches}), torch.Generator().manual_seed(seed))


def random_ids(*shape: int, below: int = 11) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("switches", [{}, RICH, {"mlp": "relu2", "tied": False}], ids=["gpt2", "rich", "relu2"])
def test_initial_weights_have_the_std_of_their_kind(switches):
    model = build(n_layer=3, n_embd=128, block_size=64, vocab_size=100, **switches)
    kinds = set()
    for name, parameter in model.named_parameters():
        kind = name.split(".", 3)[-1] if ".h." in name else name
        kinds.add(kind)
        weight = parameter[:100] if name in ("transformer.wte.weight", "lm_head.weight") else parameter
        if name.endswith("bias"):
            assert not weight.any(), name
        elif weight.dim() == 1:
            assert (weight == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 3) if kind in ("attn.c_proj.weight", "mlp.c_proj.weight") else 0.02
            assert weight.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * weight.numel())), name
            assert abs(weight.mean().item()) < 4 * std / math.sqrt(weight.numel()), name
    assert {"transformer.wte.weight", "attn.c_attn.weight", "mlp.c_fc.weight", "ln_1.weight"} <= kinds
    assert ("lm_head.weight" in kinds) == (not model.config.tied)


def test_initial_weights_come_from_the_generator_alone():
    one, same, other = build(3), build(3), build(4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.transformer["wte"].weight, other.transformer["wte"].weight)


def stream_std(n_layer: int, scaled: bool = True, **switches) -> tuple[float, float]:
    """Std of the residual stream before the first block and behind the last."""
    model = build(n_layer=n_layer, n_embd=48, block_size=16, vocab_size=64, **switches)
    if not scaled:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("c_proj.weight"):
                    parameter *= math.sqrt(2 * n_layer)
    seen = []
    for module in (model.transformer["h"][0], model.transformer["ln_f"]):
        module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].std().item()))
    with torch.no_grad():
        model(random_ids(4, 16, below=64))
    return seen[0], seen[1]


@pytest.mark.parametrize("switches", [{}, RICH], ids=["gpt2", "rich"])
def test_the_residual_stream_keeps_its_std_at_any_depth(switches):
    depths = (12, 24, 48)
    first, last = zip(*(stream_std(n_layer, **switches) for n_layer in depths), strict=True)
    assert max(last) < 1.1 * min(last)
    assert all(end < 1.5 * begin for begin, end in zip(first, last, strict=True))
    unscaled = [stream_std(n_layer, scaled=False, **switches)[1] for n_layer in depths]  # the fault
    assert unscaled[2] > 1.5 * unscaled[0] > 2 * last[0]


@pytest.mark.parametrize("switches", [{}, RICH], ids=["gpt2", "rich"])
def test_padded_rows_are_zero_without_gradient_and_stay_zero_under_adamw(switches):
    model = build(vocab_multiple=16, **switches)
    ids = random_ids(4, 9)
    tables = [model.transformer["wte"].weight, model.head_weight]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        logits = model(ids[:, :-1])
        assert logits.shape == (4, 8, 11)  # the true vocabulary
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        for table in tables:
            assert table.shape == (16, 16)
            assert table.grad[:11].any()
            assert not table.grad[11:].any()
        optimizer.step()
        assert not any(table[11:].any() for table in tables)

    padded = F.linear(model.hidden(ids[:, :-1]), model.head_weight)  # the fault: a softmax over padding too
    model.zero_grad()
    F.cross_entropy(padded.flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert model.head_weight.grad[11:].all()


@pytest.mark.parametrize("vocab_multiple", [1, 11, 64])
def test_padding_changes_no_logit(vocab_multiple):
    model, padded = build(vocab_multiple=1), build(seed=9, vocab_multiple=vocab_multiple)
    weights = model.state_dict()
    with torch.no_grad():
        for name, parameter in padded.named_parameters():
            parameter[: len(weights[name])] = weights[name]
    ids = random_ids(2, 8)
    torch.testing.assert_close(padded(ids), model(ids), atol=1e-7, rtol=0)


def test_gpt2_has_the_names_shapes_and_number_of_parameters_of_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        theirs = GPT2LMHeadModel(GPT2Config())
    expected = {name: tuple(weight.shape) for name, weight in theirs.state_dict().items()}
    assert expected.pop("lm_head.weight") == expected["transformer.wte.weight"]  # tied: files hold it once
    shapes = disk_shapes(ModelConfig(vocab_size=50257))
    assert shapes == expected
    assert sum(math.prod(shape) for shape in shapes.values()) == 124_439_808


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ({"n_layer": 24, "n_head": 16, "n_embd": 1024}, 354_823_168),
        ({"n_layer": 36, "n_head": 20, "n_embd": 1280}, 774_030_080),
        ({"n_layer": 48, "n_head": 25, "n_embd": 1600}, 1_557_611_200),
    ],
)
def test_the_larger_gpt2_have_their_published_sizes(shape, parameters):
    assert sum(map(math.prod, disk_shapes(ModelConfig(vocab_size=50257, **shape)).values())) == parameters


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({"mlp": "swiglu"}, {"mlp.c_gate.weight": (64, 16), "mlp.c_gate.bias": (64,), "mlp.c_proj.weight": (16, 64)}),
        ({"n_kv_head": 1}, {"attn.c_attn.weight": (16 + 2 * 4, 16), "attn.c_attn.bias": (24,)}),
        ({"qk_norm": True}, {"attn.q_norm.weight": (4,), "attn.k_norm.weight": (4,)}),
        ({"norm": "rmsnorm"}, {"ln_1.weight": (16,), "ln_1.bias": None}),
        ({"bias": False}, {"ln_1.bias": None, "attn.c_attn.bias": None, "mlp.c_fc.bias": None}),
    ],
)
def test_what_gpt2_does_not_have_is_named_as_designed(switches, expected):
    shapes = {name: tuple(parameter.shape) for name, parameter in build(**switches).named_parameters()}
    assert {name: shapes.get(f"transformer.h.1.{name}") for name in expected} == expected


def test_rope_has_no_position_table_and_an_untied_head_has_no_bias():
    names = {name for name, _ in build(**RICH).named_parameters()}
    assert "transformer.wpe.weight" not in names
    assert "lm_head.weight" in names
    assert "lm_head.bias" not in names
    assert set(build(**RICH).state_dict()) == names  # the rotation is computed, never stored


def normed(x: torch.Tensor, norm: torch.nn.Module, kind: str) -> torch.Tensor:
    if kind == "rmsnorm":
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + (0 if norm.bias is None else norm.bias)


ACTIVATIONS = {
    "gelu_tanh": lambda mlp, x: (
        0.5 * mlp.c_fc(x) * (1 + torch.tanh((2 / math.pi) ** 0.5 * (mlp.c_fc(x) + 0.044715 * mlp.c_fc(x) ** 3)))
    ),
    "relu2": lambda mlp, x: mlp.c_fc(x).clamp(min=0) ** 2,
    "swiglu": lambda mlp, x: mlp.c_gate(x) * torch.sigmoid(mlp.c_gate(x)) * mlp.c_fc(x),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("mlp", ACTIVATIONS)
def test_a_block_is_its_formula(mlp, kind, bias):
    block = build(mlp=mlp, norm=kind, bias=bias).transformer["h"][0].double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += torch.randn(parameter.shape, generator=generator)
        x = 0.01 * torch.randn(2, 8, 16, generator=generator, dtype=torch.float64)  # small: an epsilon shows
        after = x + block.attn(normed(x, block.ln_1, kind), None, Causal())[0]
        expected = after + block.mlp.c_proj(ACTIVATIONS[mlp](block.mlp, normed(after, block.ln_2, kind)))
        torch.testing.assert_close(block(x, None, Causal())[0], expected, atol=1e-9, rtol=1e-9)


REST = list(product((0, 1, 2), (False, True), (False, True), (False, True)))  # kv heads, qk_norm, bias, tied


def reach(model: GPT, T: int = 6) -> torch.Tensor:
    """Whether the logits at i depend on the embedding of input j, by gradients: bool (T, T)."""
    inputs = []
    model.transformer["wte"].register_forward_hook(
        lambda module, ids, output: inputs.append(output.detach().requires_grad_()) or inputs[0]
    )
    logits = model(random_ids(1, T).expand(T, T))  # the same row T times; row i is asked about its logits at i
    (logits[range(T), range(T)] * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
    return inputs[0].grad.ne(0).any(dim=-1)


@pytest.mark.parametrize("mlp", ["gelu_tanh", "swiglu", "relu2"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("position", ["learned", "rope"])
def test_logits_depend_on_exactly_the_inputs_so_far_for_every_combination_of_switches(position, norm, mlp):
    expected = torch.ones(6, 6, dtype=torch.bool).tril()
    for n_kv_head, qk_norm, bias, tied in REST:
        switches = {"n_kv_head": n_kv_head, "qk_norm": qk_norm, "bias": bias, "tied": tied}
        model = build(position=position, norm=norm, mlp=mlp, **switches)
        assert torch.equal(reach(model), expected), switches


def test_a_look_into_the_future_is_noticed(monkeypatch):
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(
        attention_module.F, "scaled_dot_product_attention", lambda *qkv, is_causal, **options: sdpa(*qkv, **options)
    )
    assert reach(build()).all()


@pytest.mark.parametrize("position", ["learned", "rope"])
def test_more_ids_than_block_size_are_an_error_with_both_numbers(position):
    model = build(position=position)
    assert model(random_ids(1, 8)).shape == (1, 8, 11)
    with pytest.raises(ValueError, match=r"9 ids.*block_size 8"):
        model(random_ids(1, 9))


def test_a_model_without_a_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="vocab_size is not set"):
        GPT(ModelConfig())


def test_dropout_acts_in_training_alone_and_is_decided_by_the_seed():
    model, ids = build(dropout=0.5), random_ids(2, 8)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(ids)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    model.eval()
    assert torch.equal(run(1), run(2))
    assert torch.equal(run(1), build()(ids))


class UsualHead(torch.nn.Module):
    """The field's way to tie: one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.lm_head = torch.nn.Embedding(11, 16), torch.nn.Linear(16, 11, bias=False)
        self.lm_head.weight = self.wte.weight


def assigned(model):
    model.load_state_dict({name: weight.clone() for name, weight in model.state_dict().items()}, assign=True)
    return model


CHANGES = {
    "nothing": lambda model: model,
    "to bf16": lambda model: model.to(torch.bfloat16),
    "load_state_dict(assign=True)": assigned,
    "assigned, then to bf16": lambda model: assigned(model).to(torch.bfloat16),
    "meta and to_empty": lambda model: model.to("meta").to_empty(device="cpu"),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("change", CHANGES)
def test_case_60_tied_weights_are_one_object_whatever_is_done_to_the_model(change):
    model = CHANGES[change](build())
    assert model.head_weight is model.transformer["wte"].weight
    assert "lm_head.weight" not in model.state_dict()


def test_case_60_the_usual_head_unties_without_a_word():
    model = assigned(UsualHead())
    assert model.lm_head.weight is not model.wte.weight


def test_untied_weights_are_two():
    model = build(tied=False)
    assert not torch.equal(model.head_weight, model.transformer["wte"].weight)
