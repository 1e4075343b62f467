"""The loss of single targets, from hidden states: the head is computed where a target asks for it, and nowhere else."""

from typing import NamedTuple

import torch
from torch import Tensor

from quatrain.model.gpt import GPT

LOGITS_AT_ONCE = 1 << 24  # bounds the memory of the head


class Predictions(NamedTuple):
    """What a model said of N targets."""

    losses: Tensor  # nats, fp32 (N,)
    greedy: Tensor  # whether each target is the likeliest id, bool (N,)


def predictions(model: GPT, hidden: Tensor, targets: Tensor) -> Predictions:
    """Of targets int64 (N,) from the hidden states (N, C) before them; softmax over the true vocabulary, in fp32."""
    losses = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    greedy = torch.empty(len(targets), dtype=torch.bool, device=hidden.device)
    rows = max(1, LOGITS_AT_ONCE // len(model.head_weight))
    for start in range(0, len(targets), rows):
        chunk = slice(start, start + rows)
        logits = model.head(hidden[chunk]).float()  # (rows, V)
        wanted = logits.gather(1, targets[chunk, None]).squeeze(1)
        losses[chunk] = logits.logsumexp(dim=-1) - wanted
        greedy[chunk] = logits.argmax(dim=-1) == targets[chunk]
    return Predictions(losses, greedy)
