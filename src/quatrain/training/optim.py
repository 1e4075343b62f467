"""The optimizer over a network's parameters, and its state as named tensors."""

import torch
from torch import Tensor, nn

from quatrain.errors import DataError
from quatrain.model.gpt import GPT
from quatrain.model.pretrained import has_vocabulary_rows
from quatrain.training.config import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW with decay on parameters of two or more dimensions only; every parameter is in exactly one group."""
    parameters = list(model.parameters())
    decayed = [parameter for parameter in parameters if parameter.dim() >= 2]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    assert len({id(parameter) for parameter in decayed + others}) == len(parameters)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    fused = all(parameter.device.type in ("cuda", "cpu", "mps") for parameter in parameters)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def optimizer_tensors(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by `parameter/key`, on the CPU, without the rows of the vocabulary's padding."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            kept = value[: model.config.vocab_size] if value.dim() and has_vocabulary_rows(name) else value
            tensors[f"{name}/{key}"] = kept.detach().cpu().contiguous()
    return tensors


@torch.no_grad()
def restore_optimizer(model: GPT, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave; raises `DataError` unless every parameter has its state."""
    parameters = dict(model.named_parameters())
    for place, value in tensors.items():
        name, key = place.rsplit("/", 1)
        if name not in parameters:
            raise DataError(f"optimizer state of '{name}', which the model does not have")
        restored = value.to(parameters[name].device) if value.dim() else value.clone()
        if value.dim():
            whole = torch.zeros_like(parameters[name])
            whole[: len(restored)] = restored
            restored = whole
        optimizer.state[parameters[name]][key] = restored
    without = [name for name, parameter in parameters.items() if not optimizer.state[parameter]]
    if tensors and without:  # a run that stopped before its first step has no state at all
        raise DataError(f"no optimizer state for {without[:3]}")
