"""Cross-entropy in nats per target, over the true vocabulary alone, without all logits in fp32 at once."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from quatrain.model.gpt import GPT
from quatrain.tokens.loader import Batch
from quatrain.tokens.packing import IGNORED

CHUNK = 1 << 27  # logits in one matrix product
BLOCK = 1 << 19  # of these, what one CPU thread turns into a softmax at a time: stays in its cache


def summed_loss(model: GPT, batch: Batch) -> Tensor:
    """The sum of the losses of all valid targets, an fp32 scalar; divide by `batch.valid` for the mean."""
    return loss_of(model, batch.inputs, batch.targets, batch.documents, batch.positions)


def loss_of(model: GPT, inputs: Tensor, targets: Tensor, documents: Tensor | None, positions: Tensor | None) -> Tensor:
    """The same from tensors: forward and loss are one function, so that they are compiled as one."""
    hidden = model.hidden(inputs, documents, positions).flatten(0, 1)  # (B T, C)
    weight, config = model.head_weight, model.config
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss: Tensor = HeadLoss.apply(  # type: ignore[no-untyped-call]  # torch has no types here
        hidden, weight, targets.flatten(), config.vocab_size, config.logit_softcap, wanted
    )
    return loss


class HeadLoss(torch.autograd.Function):
    """Sum over the N targets of the cross-entropy of `hidden weight^T`, fp32.

    `hidden` is (N, C), `weight` (padded V, C), `targets` int64 (N,). Logits are computed a chunk of targets at
    a time, softmax and loss in fp32, and turned in place into their own gradient while they are at hand (as in
    Liger Kernel, Hsu et al. 2024), so that forward holds one chunk of logits, and backward multiplies two finished
    gradients by a number.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float, wanted: bool
    ) -> Tensor:
        """Sets aside the gradients of `hidden` and `weight` if `wanted`."""
        rows = max(1, CHUNK // len(weight))
        losses = hidden.new_empty((len(targets), 1), dtype=torch.float32)
        of_hidden = torch.empty_like(hidden) if wanted else None
        of_weight: Tensor | None = None
        counted = (targets != IGNORED)[:, None]  # (N, 1)
        places = targets[:, None].where(counted, 0)  # (N, 1)
        for start in range(0, len(targets), rows):
            chunk = slice(start, start + rows)
            logits = F.linear(hidden[chunk], weight)  # (rows, padded V)
            losses[chunk] = _losses(logits, places[chunk], vocab_size, softcap, wanted)
            if of_hidden is not None:
                torch.mm(logits, weight, out=of_hidden[chunk])
                of_weight = _added(of_weight, logits, hidden[chunk] * counted[chunk], len(targets) <= rows)
        losses *= counted
        if of_hidden is not None:
            of_hidden *= counted
        ctx.of_hidden = of_hidden
        ctx.of_weight = of_weight if of_weight is None else of_weight.to(weight.dtype)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        of_hidden, of_weight = ctx.of_hidden, ctx.of_weight
        ctx.of_hidden = ctx.of_weight = None
        return of_hidden.mul_(factor), of_weight.mul_(factor), None, None, None, None


def _losses(logits: Tensor, places: Tensor, vocab_size: int, softcap: float, to_gradient: bool) -> Tensor:
    """The loss of each row (rows, 1), fp32; `to_gradient` the logits (rows, padded V) become its gradient by them."""
    losses = torch.empty(places.shape, dtype=torch.float32, device=logits.device)
    for start in range(0, len(logits), block := _block(logits)):
        rows = slice(start, start + block)
        wide, slope = logits[rows].float(), None
        if softcap:
            squashed = torch.tanh(wide / softcap)
            wide, slope = softcap * squashed, 1 - squashed.square()
        wide[:, vocab_size:] = -torch.inf
        logs = torch.log_softmax(wide, dim=-1)
        losses[rows] = -logs.gather(1, places[rows])
        if not to_gradient:
            continue
        gradient = logs.exp_()  # softmax, less one at the target
        gradient.scatter_add_(1, places[rows], torch.full_like(losses[rows], -1.0))
        logits[rows] = gradient if slope is None else gradient * slope
    return losses


def _block(logits: Tensor) -> int:
    """Rows that are turned at once: all, but on a CPU no more than its caches hold."""
    if logits.device.type != "cpu" or torch.compiler.is_compiling():
        return len(logits)
    threads = torch.get_num_threads()
    return max(threads, threads * BLOCK // logits.shape[1])


def _added(total: Tensor | None, of_logits: Tensor, hidden: Tensor, alone: bool) -> Tensor:
    """The weight's gradient with a chunk's; several are added in fp32."""
    if alone:
        return of_logits.t() @ hidden
    part = (of_logits.t() @ hidden).float()
    return part if total is None else total.add_(part)
