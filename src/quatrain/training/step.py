"""One optimizer step: gradients of the global mean over micro-batches, clipping, update."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from quatrain.errors import Diverged
from quatrain.mixing import derive
from quatrain.model.device import Precision, autocast
from quatrain.model.loss import loss_of
from quatrain.tokens.loader import Batch


class StepResult(NamedTuple):
    """What one step says of itself."""

    loss: float  # nats per valid target of the global step
    grad_norm: float  # before clipping


def accumulate(
    model: nn.Module,
    batches: Iterable[Batch],
    valid: int,
    precision: Precision = "fp32",
    before: Callable[[int], None] = lambda micro_step: None,
    scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss,
    loss_of: Callable[..., torch.Tensor] = loss_of,
) -> torch.Tensor:
    """Add the gradient of sum(losses) / valid over the micro-batches; returns that mean, detached.

    Dividing the *sum* by the valid targets of the whole step, known beforehand, makes the gradient
    that of one large batch however it is cut. `before` runs ahead of each forward.
    """
    total = torch.zeros((), device=next(model.parameters()).device)
    for micro_step, batch in enumerate(batches):
        before(micro_step)
        with autocast(batch.inputs.device, precision):
            loss = loss_of(model, batch.inputs, batch.targets, batch.documents, batch.positions) / valid
        torch.autograd.backward(scale(loss))
        total += loss.detach()
    return total


class Step:
    """The update of one network by one optimizer in one precision."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        clip: float,
        seed: int,
        compiled: bool = False,
    ) -> None:
        self.model = model  # stays as it is: what is compiled is the function from it to the loss
        self.loss_of = torch.compile(loss_of) if compiled else loss_of
        self.optimizer = optimizer
        self.precision = precision
        self.clip = clip
        self.seed = seed
        # fp16 gradients underflow unless the loss is scaled; the other precisions have fp32's range.
        device = next(model.parameters()).device.type
        self.scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")

    def __call__(
        self, step: int, lr: float, batches: Iterable[Batch], valid: int, momentum: float = 0.95
    ) -> StepResult:
        """Run step number `step` (0-based). Raises `Diverged` before the update if anything is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            if "momentum" in group:
                group["momentum"] = momentum
        self.optimizer.zero_grad(set_to_none=True)

        def reseed(micro_step: int) -> None:
            torch.manual_seed(derive(self.seed, step, micro_step))

        loss = accumulate(self.model, batches, valid, self.precision, reseed, self.scaler.scale, self.loss_of)
        self.scaler.unscale_(self.optimizer)
        result = StepResult(float(loss), self._clip())
        self._check_finite(step, result)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1:
            raise Diverged(
                f"step {step + 1}: fp16 gradients overflow at every scale; stopped, many steps updated nothing. "
                f"Use train.precision bf16 or fp32, or lower optim.lr"
            )
        return result

    def _clip(self) -> float:
        """Bring the gradient's norm down to `clip`; returns what it was. A smaller gradient is not touched."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        found = float(norm)
        if self.clip and found > self.clip:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.clip, norm)
        return found

    def _check_finite(self, step: int, result: StepResult) -> None:
        # Under fp16 an overflowing gradient is expected now and then: the scaler skips that update.
        if math.isfinite(result.loss) and (math.isfinite(result.grad_norm) or self.scaler.is_enabled()):
            return
        what = f"loss is {result.loss}, gradient norm {result.grad_norm}"
        raise Diverged(
            f"step {step + 1}: {what}; stopped before the update, the last checkpoint is as good as it was. "
            f"Lower optim.lr, lengthen optim.warmup, or look at the data of this step"
        )
