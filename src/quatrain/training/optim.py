"""The optimizer over a network's parameters, and its state as named tensors."""

import torch
from torch import Tensor, nn

from quatrain.errors import DataError
from quatrain.model.gpt import GPT, VOCABULARY_TABLES
from quatrain.training.config import OptimConfig

STATE = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of each parameter


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
            kept = value[: model.config.vocab_size] if value.dim() and name in VOCABULARY_TABLES else value
            tensors[f"{name}/{key}"] = kept.detach().cpu().contiguous()
    return tensors


@torch.no_grad()
def restore_optimizer(model: GPT, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave after at least one step.

    Raises `DataError` unless every parameter has all of its state in its shape, and nothing else is there.
    """
    parameters = dict(model.named_parameters())
    wanted = {f"{name}/{key}" for name in parameters for key in STATE}
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
