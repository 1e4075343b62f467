"""Cross-entropy in nats per target, over the true vocabulary alone."""

from torch import Tensor, nn
from torch.nn import functional as F

from quatrain.tokens.loader import Batch
from quatrain.tokens.packing import IGNORED


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of the losses of all valid targets, an fp32 scalar; divide by `batch.valid` for the mean."""
    logits = model(batch.inputs, batch.documents, batch.positions)  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")


def target_losses(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of each target, fp32 (B, T); 0 where it is ignored."""
    logits = model(batch.inputs, batch.documents, batch.positions)
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view_as(batch.targets)
