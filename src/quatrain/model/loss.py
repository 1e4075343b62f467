"""Cross-entropy in nats per target, over the true vocabulary alone."""

from torch import Tensor, nn
from torch.nn import functional as F

from quatrain.tokens.loader import Batch
from quatrain.tokens.packing import IGNORED


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of the losses of all valid targets, an fp32 scalar; divide by `batch.valid` for the mean."""
    return loss_of(model, batch.inputs, batch.targets, batch.documents, batch.positions)


def loss_of(
    model: nn.Module, inputs: Tensor, targets: Tensor, documents: Tensor | None, positions: Tensor | None
) -> Tensor:
    """The same from tensors: forward and loss are one function, so that they are compiled as one."""
    logits = model(inputs, documents, positions)  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
