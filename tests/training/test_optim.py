"""AdamW against the paper's formulas, its two groups, and its state as named tensors."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quatrain.errors import DataError
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.training.config import OptimConfig
from quatrain.training.optim import build_optimizer, optimizer_tensors, restore_optimizer

CONFIG = OptimConfig(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
VOCAB = 50  # 64 rows in memory


def network(tied: bool = True) -> GPT:
    config = ModelConfig(n_layer=2, n_head=2, n_embd=8, block_size=8, vocab_size=VOCAB, tied=tied)
    return GPT(config, torch.Generator().manual_seed(1))


def gradients(model: GPT, updates: int) -> Iterator[dict[str, Tensor]]:
    """Made-up gradients, zero on the vocabulary's padding as real ones are."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(updates):
        made = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
        for name in made.keys() & {"transformer.wte.weight", "lm_head.weight"}:
            made[name][VOCAB:] = 0
        yield made


def update(model: GPT, optimizer: torch.optim.Optimizer, gradient: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = gradient[name].clone()
    optimizer.step()


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_exactly_one_group_and_decays_only_from_two_dimensions_on(tied: bool) -> None:
    model = network(tied)
    groups = build_optimizer(model, CONFIG).param_groups
    placed = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(placed) == sorted(id(parameter) for parameter in model.parameters())
    for group in groups:
        assert {parameter.dim() >= 2 for parameter in group["params"]} == {group["weight_decay"] > 0}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1}


def hand_written(
    start: dict[str, Tensor], all_gradients: list[dict[str, Tensor]], rates: list[float]
) -> dict[str, Tensor]:
    """Loshchilov and Hutter 2019, algorithm 2, in fp64."""
    (beta1, beta2), eps = CONFIG.betas, CONFIG.eps
    weights = {name: weight.double() for name, weight in start.items()}
    first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    second = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for t, (gradient, lr) in enumerate(zip(all_gradients, rates, strict=True), start=1):
        for name, weight in weights.items():
            g = gradient[name].double()
            first[name] = beta1 * first[name] + (1 - beta1) * g
            second[name] = beta2 * second[name] + (1 - beta2) * g**2
            direction = (first[name] / (1 - beta1**t)) / ((second[name] / (1 - beta2**t)).sqrt() + eps)
            decay = CONFIG.weight_decay if weight.dim() >= 2 else 0.0
            weights[name] = weight - lr * direction - lr * decay * weight
    return weights


def test_updates_are_those_of_the_paper_under_a_changing_rate() -> None:
    model = network()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, CONFIG)
    rates = [1e-3, 1e-2, 3e-2, 1e-2, 1e-3, 1e-4]
    made = list(gradients(model, len(rates)))
    for lr, gradient in zip(rates, made, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        update(model, optimizer, gradient)
    expected = hand_written(start, made, rates)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-7)


def test_a_zero_gradient_shrinks_matrices_and_leaves_vectors() -> None:
    model = network()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    update(model, build_optimizer(model, CONFIG), {name: torch.zeros_like(value) for name, value in start.items()})
    for name, parameter in model.named_parameters():
        kept = 1 - CONFIG.lr * CONFIG.weight_decay if parameter.dim() >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), start[name] * kept)


@pytest.mark.parametrize("tied", [True, False])
def test_case_35_case_63_live_equals_resumed_and_not_cold(tied: bool) -> None:
    """The state goes through named tensors while gradients are there, and the next update is the same to the bit."""
    live = network(tied)
    optimizer = build_optimizer(live, CONFIG)
    *before, last = gradients(live, 4)
    for gradient in before:
        update(live, optimizer, gradient)
    tensors = {name: value.clone() for name, value in optimizer_tensors(live, optimizer).items()}
    resumed, cold = network(tied), network(tied)
    for model in (resumed, cold):
        model.load_state_dict(live.state_dict())
    restored = build_optimizer(resumed, CONFIG)
    restore_optimizer(resumed, restored, tensors)
    assert all(torch.equal(value, tensors[key]) for key, value in optimizer_tensors(resumed, restored).items())
    update(live, optimizer, last)
    update(resumed, restored, last)
    update(cold, build_optimizer(cold, CONFIG), last)
    for (name, one), other, colder in zip(
        live.named_parameters(), resumed.parameters(), cold.parameters(), strict=True
    ):
        assert torch.equal(one, other), name
        assert not torch.equal(one, colder), name


@pytest.mark.parametrize("tied", [True, False])
def test_named_tensors_hold_the_true_vocabulary_and_padding_comes_back_as_zeros(tied: bool) -> None:
    model = network(tied)
    optimizer = build_optimizer(model, CONFIG)
    update(model, optimizer, next(gradients(model, 1)))
    tensors = optimizer_tensors(model, optimizer)
    names = {name for name, _ in model.named_parameters()}
    assert tensors.keys() == {f"{name}/{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
    restored = build_optimizer(model, CONFIG)
    restore_optimizer(model, restored, tensors)
    for name in names & {"transformer.wte.weight", "lm_head.weight"}:
        assert tensors[f"{name}/exp_avg"].shape == (VOCAB, 8)
        moment = restored.state[model.get_parameter(name)]["exp_avg"]
        assert moment.shape == (64, 8)
        assert moment[VOCAB:].count_nonzero() == 0
        assert moment[:VOCAB].count_nonzero() > 0


def test_case_35_missing_or_unknown_state_is_an_error() -> None:
    model = network()
    optimizer = build_optimizer(model, CONFIG)
    update(model, optimizer, next(gradients(model, 1)))
    tensors = optimizer_tensors(model, optimizer)
    without = {place: value for place, value in tensors.items() if not place.startswith("transformer.wpe.weight/")}
    with pytest.raises(DataError, match=r"transformer\.wpe\.weight"):
        restore_optimizer(model, build_optimizer(model, CONFIG), without)
    with pytest.raises(DataError, match=r"transformer\.wqe"):
        restore_optimizer(model, build_optimizer(model, CONFIG), tensors | {"transformer.wqe/exp_avg": torch.zeros(2)})
