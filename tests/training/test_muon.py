"""Muon for the blocks' matrices and AdamW for the rest: groups, formulas, momentum, and the state as named tensors."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from quatrain.errors import ConfigError, DataError
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.loss import loss_of
from quatrain.training.config import OptimConfig
from quatrain.training.optim import build_optimizer, optimizer_tensors, restore_optimizer
from quatrain.training.schedule import momentum
from switches import FASTER

CONFIG = OptimConfig(kind="muon", lr=1e-2, weight_decay=0.1)
VOCAB = 50  # 64 rows in memory
MATRICES = {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight", "mlp.c_gate.weight"}


def network(**switches: object) -> GPT:
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": VOCAB}
    return GPT(ModelConfig(**shape | switches), torch.Generator().manual_seed(1))


def backward(model: GPT, seed: int = 0) -> None:
    ids = torch.randint(0, VOCAB, (4, 9), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    loss_of(model, ids[:, :-1], ids[:, 1:], None, None).backward()


def updated(model: GPT, updates: int) -> torch.optim.Optimizer:
    optimizer = build_optimizer(model, CONFIG)
    for seed in range(updates):
        backward(model, seed)
        optimizer.step()
    return optimizer


CHOICES: dict[str, tuple[object, ...]] = {
    "position": ("learned", "rope"),
    "norm": ("layernorm", "rmsnorm"),
    "mlp": ("gelu_tanh", "swiglu", "relu2"),
} | dict.fromkeys(("bias", "qk_norm", "tied", "value_residual", "embedding_shortcut"), (False, True))
SWITCHES = [dict(zip(CHOICES, values, strict=True)) for values in product(*CHOICES.values())]


def test_for_every_switch_each_parameter_is_in_one_group_and_the_blocks_matrices_alone_are_muons() -> None:
    for switches in SWITCHES:
        model = network(n_embd=4, **switches)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = build_optimizer(model, CONFIG).param_groups
        placed = [names[id(parameter)] for group in groups for parameter in group["params"]]
        assert sorted(placed) == sorted(names.values()), switches
        muon = {names[id(p)] for group in groups if "momentum" in group for p in group["params"]}
        assert muon == {name for name in placed if name.split(".", 3)[-1] in MATRICES}, switches
        decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
        assert decayed == {name for name, p in model.named_parameters() if p.dim() >= 2}, switches


@pytest.mark.parametrize("switches", [FASTER, {"value_residual": True, "n_layer": 1}], ids=["all on", "one block"])
def test_every_parameter_has_a_gradient_and_so_a_state(switches: dict[str, object]) -> None:
    model = network(**switches)
    backward(model)
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def orthogonal(update: Tensor) -> Tensor:
    """Newton-Schulz (Jordan et al. 2024): five quintic steps in bf16, of the wide one of G and its transpose."""
    tall = update.shape[0] > update.shape[1]
    x = rounded(update.T if tall else update)
    x = rounded(x / rounded(x.norm()))
    for _ in range(5):
        gram = rounded(x @ x.T)
        x = rounded(3.4445 * x + rounded(-4.7750 * gram + 2.0315 * gram @ gram) @ x)
    return x.T if tall else x


@pytest.mark.parametrize("mlp", ["relu2", "swiglu"])
def test_updates_of_matrices_are_those_of_the_formula_under_changing_rate_and_momentum(mlp: str) -> None:
    model = network(**FASTER | {"mlp": mlp})
    optimizer = build_optimizer(model, CONFIG)
    buffers: dict[str, Tensor] = {}
    for seed, (lr, mu) in enumerate([(1e-2, 0.85), (3e-2, 0.9), (1e-3, 0.95)]):
        backward(model, seed)
        for group in optimizer.param_groups:
            group["lr"] = lr
            if "momentum" in group:
                group["momentum"] = mu
        before = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
        optimizer.step()
        for name, parameter in model.named_parameters():
            if name.split(".", 3)[-1] not in MATRICES:
                continue
            gradient = parameter.grad.double()
            buffers[name] = mu * buffers.get(name, torch.zeros_like(gradient)) + (1 - mu) * gradient
            update = (1 - mu) * gradient + mu * buffers[name]  # Nesterov's
            if not update.any():  # behind a projection that is still zero
                assert seed == 0
                continue
            size = lr * 0.2 * math.sqrt(max(parameter.shape))
            change = (before[name] * (1 - lr * CONFIG.weight_decay) - parameter.detach().double()) / size
            expected = orthogonal(update)
            assert (change - expected).norm() < 0.02 * expected.norm(), name  # the order of sums in bf16


def test_an_update_is_nearly_orthogonal_and_as_large_as_adamws() -> None:
    """Singular values near one, so that the mean square of an update is about 0.2 lr for any shape."""
    model = network(n_embd=64, mlp="swiglu")
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    backward(model)
    for name, parameter in model.named_parameters():  # of full rank, which those of 32 targets are not
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    build_optimizer(model, OptimConfig(kind="muon", lr=1e-2, weight_decay=0.0)).step()
    for name, parameter in model.named_parameters():
        if name.split(".", 3)[-1] in MATRICES:
            change = parameter.detach() - start[name]
            values = torch.linalg.svdvals(change) / (1e-2 * 0.2 * math.sqrt(max(change.shape)))
            assert values.min() > 0.3, name
            assert values.max() < 1.3, name
            assert 0.6 < values.median() < 1.3, name
            assert change.square().mean().sqrt() == pytest.approx(0.2 * 1e-2, rel=0.25), name


def test_decay_is_decoupled_from_the_scaled_update() -> None:
    model = network(**FASTER)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer(model, CONFIG).step()
    for name, parameter in model.named_parameters():
        kept = 1 - CONFIG.lr * CONFIG.weight_decay if parameter.dim() >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), start[name] * kept)


def test_adamw_of_the_others_is_what_it_is_alone() -> None:
    mixed, plain = network(), network()
    optimizers = [build_optimizer(mixed, CONFIG), build_optimizer(plain, OptimConfig(lr=1e-2, weight_decay=0.1))]
    for model, optimizer in zip((mixed, plain), optimizers, strict=True):
        for seed in range(3):
            draw = torch.Generator().manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            optimizer.step()
    for (name, one), other in zip(mixed.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other) == (name.split(".", 3)[-1] not in MATRICES), name


@pytest.mark.parametrize("switches", [{}, FASTER], ids=["gpt2", "all on"])
def test_case_35_live_equals_resumed_and_not_cold(switches: dict[str, object]) -> None:
    live, resumed, cold = (network(**switches) for _ in range(3))
    optimizer = updated(live, 3)
    tensors = {name: value.clone() for name, value in optimizer_tensors(live, optimizer).items()}
    restored = build_optimizer(resumed, CONFIG)
    restore_optimizer(resumed, restored, tensors)
    before = {name: weight.clone() for name, weight in live.state_dict().items()}
    for model, its in ((live, optimizer), (resumed, restored), (cold, build_optimizer(cold, CONFIG))):
        model.load_state_dict(before)
        backward(model, 9)
        its.step()
    for (name, one), other, colder in zip(
        live.named_parameters(), resumed.parameters(), cold.parameters(), strict=True
    ):
        assert torch.equal(one, other), name
        assert not torch.equal(one, colder), name


@pytest.mark.parametrize("switches", [{}, FASTER], ids=["gpt2", "all on"])
def test_the_state_is_a_buffer_a_matrix_and_moments_over_the_true_vocabulary(switches: dict[str, object]) -> None:
    model = network(**switches)
    tensors = optimizer_tensors(model, updated(model, 1))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    keys = {name: {place.rsplit("/")[1] for place in tensors if place.startswith(f"{name}/")} for name in shapes}
    for name, shape in shapes.items():
        if name.split(".", 3)[-1] in MATRICES:
            assert keys[name] == {"momentum_buffer"}
            assert tensors[f"{name}/momentum_buffer"].shape == shape
        else:
            assert keys[name] == {"step", "exp_avg", "exp_avg_sq"}
    for name in shapes.keys() & {"transformer.wte.weight", "lm_head.weight"}:
        assert tensors[f"{name}/exp_avg"].shape == (VOCAB, 16)


def test_case_35_missing_foreign_or_misshapen_state_is_an_error() -> None:
    model = network()
    tensors = optimizer_tensors(model, updated(model, 1))
    place = "transformer.h.1.mlp.c_fc.weight/momentum_buffer"

    def refused(changed: dict[str, Tensor], words: str) -> None:
        with pytest.raises(DataError, match=words):
            restore_optimizer(model, build_optimizer(model, CONFIG), changed)

    refused({name: value for name, value in tensors.items() if name != place}, place)
    refused(tensors | {place: tensors[place][:5]}, rf"{place} has shape \(5, 16\), expected \(64, 16\)")
    adamw = build_optimizer(model, OptimConfig())
    adamw.step()
    refused(optimizer_tensors(model, adamw), r"exp_avg is missing or not known|momentum_buffer is missing")


def test_momentum_rises_from_085_and_is_a_function_of_the_step_alone() -> None:
    optim = OptimConfig(kind="muon", momentum=0.95, momentum_warmup=300)
    assert [momentum(step, optim) for step in (0, 150, 300, 10**9)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    rising = [momentum(step, optim) for step in range(310)]
    assert rising == sorted(rising) == [momentum(step, optim) for step in range(310)]
    assert momentum(0, OptimConfig(momentum=0.95, momentum_warmup=0)) == 0.95
    assert {momentum(step, OptimConfig(momentum=0.5)) for step in (0, 100, 300)} == {0.5}  # never above what is wanted


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "moun"}, r"kind is 'moun', expected one of: adamw, muon \(did you mean 'muon'\?\)"),
        ({"momentum": 1.0}, r"momentum is 1\.0, it must be at least 0 and below 1"),
        ({"momentum": -0.1}, r"momentum is -0\.1"),
        ({"momentum_warmup": -1}, r"momentum_warmup is -1, it must be at least 0"),
    ],
)
def test_what_muon_cannot_use_is_told(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OptimConfig(**values)
