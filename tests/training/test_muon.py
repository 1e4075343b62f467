"""Muon for the blocks' matrices: which parameters, which updates, and its state in a checkpoint."""

from itertools import product

import pytest
import torch
from torch import Tensor

from quatrain.errors import DataError
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.training.config import OptimConfig
from quatrain.training.optim import build_optimizer, optimizer_tensors, restore_optimizer
from quatrain.training.schedule import momentum
from quatrain.training.step import Step

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 50}
CONFIG = OptimConfig(kind="muon", lr=1e-2, weight_decay=0.1, momentum=0.9)
NEW = {"value_residual": True, "embedding_shortcut": True, "zero_init": True, "logit_softcap": 15.0}


def network(**switches) -> GPT:
    return GPT(ModelConfig(**SHAPE, **switches), torch.Generator().manual_seed(1))


def planted(model: GPT, seed: int) -> dict[str, Tensor]:
    """Put made-up gradients into the parameters, zero on the vocabulary's padding as real ones are."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        if name in ("transformer.wte.weight", "lm_head.weight"):
            parameter.grad[50:] = 0
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("position", "mlp", "tied", "new"),
    list(product(["learned", "rope"], ["gelu_tanh", "swiglu"], [True, False], [{}, NEW])),
)
def test_every_parameter_is_in_one_group_and_muon_has_the_blocks_matrices(position, mlp, tied, new):
    model = network(position=position, mlp=mlp, tied=tied, qk_norm=True, **new)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, CONFIG)
    placed = [(names[id(p)], "momentum" in group) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(name for name, _ in placed) == sorted(names.values())
    matrices = {name for name in names.values() if ".h." in name and name.endswith((".weight",)) and "c_" in name}
    assert {name for name, by_muon in placed if by_muon} == matrices
    for group in optimizer.param_groups:
        assert {parameter.dim() >= 2 for parameter in group["params"]} == {group["weight_decay"] > 0}


def orthogonal(matrix: Tensor) -> Tensor:
    """Jordan et al. 2024: five quintic Newton-Schulz steps in bf16."""
    x = matrix.bfloat16()
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return (wide if x.shape[0] <= x.shape[1] else wide.T).float()


def test_updates_are_orthogonal_as_large_as_adamws_and_decay_apart():
    model = network()
    optimizer = build_optimizer(model, CONFIG)
    name = "transformer.h.0.mlp.c_fc.weight"  # (64, 16)
    weight = model.get_parameter(name)
    buffer, expected = torch.zeros_like(weight), weight.detach().clone()
    for seed, beta in enumerate([0.85, 0.9, 0.9]):
        gradient = planted(model, seed)[name]
        for group in optimizer.param_groups:
            group.update({"momentum": beta} if "momentum" in group else {})
        optimizer.step()
        buffer = beta * buffer + (1 - beta) * gradient
        update = orthogonal((1 - beta) * gradient + beta * buffer)
        expected = expected * (1 - 1e-2 * 0.1) - 1e-2 * 0.2 * 64**0.5 * update
        singular = torch.linalg.svdvals(update)
        assert singular.min() > 0.5
        assert singular.max() < 1.3
        torch.testing.assert_close(weight.detach(), expected, atol=1e-3, rtol=0)  # bf16, in another order of sums


def test_adamw_has_the_rest_and_updates_it_as_without_muon():
    models = [network(), network()]
    for model, kind in zip(models, ["muon", "adamw"], strict=True):
        optimizer = build_optimizer(model, OptimConfig(**{**vars(CONFIG), "kind": kind}))
        planted(model, 0)
        optimizer.step()
    for name, parameter in models[0].named_parameters():
        of_adamw = models[1].get_parameter(name)
        muons = ".h." in name and parameter.dim() == 2
        assert torch.equal(parameter, of_adamw) != muons


def test_momentum_rises_over_its_warm_up_and_stays():
    config = OptimConfig(kind="muon", momentum=0.95, momentum_warmup=10)
    assert [round(momentum(step, config), 6) for step in (0, 5, 10, 1000)] == [0.85, 0.9, 0.95, 0.95]
    assert momentum(0, OptimConfig(momentum_warmup=0)) == 0.95
    assert momentum(0, OptimConfig(momentum=0.5, momentum_warmup=10)) == 0.5


def test_a_step_hands_its_momentum_to_muon():
    model = network()
    optimizer = build_optimizer(model, CONFIG)
    from quatrain.tokens.loader import Batch

    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    Step(model, optimizer, "fp32", 1.0, 0)(0, 1e-3, [Batch(ids[:, :-1], ids[:, 1:], 16)], 16, 0.875)
    assert {group.get("momentum") for group in optimizer.param_groups} == {0.875, None}
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3}


def test_state_comes_back_and_the_next_update_is_the_same_to_the_bit():
    model, other = network(**NEW), network(**NEW)
    optimizer = build_optimizer(model, CONFIG)
    for seed in range(2):
        planted(model, seed)
        optimizer.step()
    other.load_state_dict(model.state_dict())
    again = build_optimizer(other, CONFIG)
    restore_optimizer(other, again, optimizer_tensors(model, optimizer))
    for each, its_optimizer in ((model, optimizer), (other, again)):
        planted(each, 7)
        its_optimizer.step()
    assert all(torch.equal(weight, other.get_parameter(name)) for name, weight in model.named_parameters())


def test_case_35_a_missing_momentum_is_an_error():
    model = network()
    optimizer = build_optimizer(model, CONFIG)
    planted(model, 0)
    optimizer.step()
    tensors = optimizer_tensors(model, optimizer)
    del tensors["transformer.h.0.attn.c_attn.weight/momentum_buffer"]
    with pytest.raises(DataError, match=r"c_attn\.weight/momentum_buffer"):
        restore_optimizer(model, build_optimizer(model, CONFIG), tensors)
