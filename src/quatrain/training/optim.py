"""The optimizer over a network's parameters, and its state as named tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quatrain.errors import DataError
from quatrain.model.gpt import GPT, VOCABULARY_TABLES, is_block_matrix
from quatrain.training.config import OptimConfig

ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
MUON_STATE = ("momentum_buffer",)


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW, or Muon for the matrices inside of the blocks and AdamW for all else.

    Every parameter is in exactly one group; those of two or more dimensions decay.
    """
    named = dict(model.named_parameters())
    by_muon = {name for name, one in named.items() if config.kind == "muon" and is_block_matrix(name, one.shape)}
    hidden = [parameter for name, parameter in named.items() if name in by_muon]
    others = [parameter for name, parameter in named.items() if name not in by_muon]
    adamw = _adamw(others, config)
    if not hidden:
        return adamw
    muon = torch.optim.Muon(
        hidden,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",  # updates as large as AdamW's, so that one rate serves both
    )
    return MuonWithAdamW(muon, adamw)


def _adamw(parameters: list[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    decayed = [parameter for parameter in parameters if parameter.dim() >= 2]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = all(parameter.device.type in ("cuda", "cpu", "mps") for parameter in parameters)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for some parameters and AdamW for the others, as one optimizer."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        placed = [id(parameter) for group in self.param_groups for parameter in group["params"]]
        assert len(placed) == len(set(placed)), "a parameter is in two groups"
        self.parts = (muon, adamw)
        muon.state = adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        assert closure is None
        for part in self.parts:
            part.step()  # type: ignore[no-untyped-call]  # torch has no types here


def optimizer_tensors(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by `parameter/key`, on the CPU, without the rows of the vocabulary's padding."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            kept = value[: model.config.vocab_size] if value.dim() and name in VOCABULARY_TABLES else value
            tensors[f"{name}/{key}"] = kept.detach().cpu().contiguous()
    return tensors


@torch.no_grad()
def restore_optimizer(model: GPT, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave after at least one step.

    Raises `DataError` unless every parameter has all of its state in its shape, and nothing else is there.
    """
    parameters = dict(model.named_parameters())
    kept = {id(p): _state_of(group) for group in optimizer.param_groups for p in group["params"]}
    wanted = {f"{name}/{key}" for name, parameter in parameters.items() for key in kept[id(parameter)]}
    if tensors.keys() != wanted:
        odd = sorted(tensors.keys() ^ wanted)
        raise DataError(f"optimizer state does not fit the model: {odd[0]} is missing or not known ({len(odd)} in all)")
    for place, value in tensors.items():
        name, key = place.rsplit("/", 1)
        parameter = parameters[name]
        if value.dim() == 0:  # the count of steps; a device tensor where the optimizer is fused
            optimizer.state[parameter][key] = value.to(parameter.device, copy=True)
            continue
        moments = torch.zeros_like(parameter)
        target = moments[: model.config.vocab_size] if name in VOCABULARY_TABLES else moments
        if value.shape != target.shape:
            raise DataError(f"optimizer state {place} has shape {tuple(value.shape)}, expected {tuple(target.shape)}")
        target.copy_(value)
        optimizer.state[parameter][key] = moments


def _state_of(group: dict[str, Any]) -> tuple[str, ...]:
    """What the optimizer keeps of each parameter of a group."""
    return MUON_STATE if "momentum" in group else ADAMW_STATE
