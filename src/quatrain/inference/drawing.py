"""The next id from logits: pure functions of the logits and of draws in [0, 1)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SHORTLIST = 512  # likeliest ids that are sorted first: mostly cuts fall among them


class TokenLogprob(NamedTuple):
    """What the model thought of an id that was chosen: natural logarithms, before temperature, penalty and cuts."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest ids and theirs, in falling order


def choose(
    logits: Tensor,
    draws: Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """The next id of each row, int64 (B,), from fp32 logits (B, V) and draws in [0, 1) (B,).

    Of the ids that top_k, top_p and min_p leave, in the order of their numbers, the one at which the cumulative
    probability passes the draw. Computed in fp64 on the CPU: logits that differ by rounding give another id only
    where the draw falls within that rounding of a border. (In the order of probability it would not be so: two ids
    that are nearly as likely as each other would change places.)
    """
    if temperature == 0 or top_p == 0:
        return logits.argmax(dim=-1)
    # Subtracting the maximum first keeps the division finite at any temperature.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values).cpu().double() / temperature
    probabilities = scaled.softmax(dim=-1)  # (B, V)
    if top_k is not None or top_p < 1 or min_p:
        probabilities *= drawable(probabilities, top_k, top_p, min_p)
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # The product with a draw just below 1 may be rounded up to the total, which no id passes.
    border = torch.minimum(draws.double().cpu().unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative <= border).sum(dim=-1)


def drawable(probabilities: Tensor, top_k: int | None, top_p: float, min_p: float) -> Tensor:
    """The ids that may be drawn, bool (B, V): of equally likely ones at a cut the smaller."""
    V = probabilities.shape[1]
    for count in (max(SHORTLIST, (top_k or 0) + 1), V):
        ordered, order = _likeliest(probabilities, count)
        others = 1 - ordered.sum(dim=-1, keepdim=True)
        kept = nucleus(ordered, top_k, top_p, min_p, others)
        # Of ids as likely as the last of the list, smaller ones may have been left out.
        if count >= V or not (kept & (ordered == ordered[:, -1:])).any():
            break
    return torch.zeros_like(probabilities, dtype=torch.bool).scatter_(1, order, kept)


def _likeliest(probabilities: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The likeliest and their ids, (B, count) or all; of equals the smaller id first. A whole sort costs more."""
    if count >= probabilities.shape[1]:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        return ordered, order
    found = probabilities.topk(count, dim=-1)
    order, by_id = found.indices.sort(dim=-1)
    ordered, by_size = found.values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return ordered, order.gather(1, by_size)


def nucleus(
    ordered: Tensor, top_k: int | None, top_p: float, min_p: float = 0.0, others: Tensor | float = 0.0
) -> Tensor:
    """Which of the sorted probabilities (B, N) may be drawn, bool (B, N): at least the first.

    `others` is what the ids beyond the list hold. top_p is a share of what top_k leaves, as in transformers; min_p is
    a share of the likeliest id's probability.
    """
    among = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        among[:, top_k:] = False
    left = ordered * among
    before = left.cumsum(dim=-1) - left  # what the likelier ids hold together
    kept = among & (before < top_p * (left.sum(dim=-1, keepdim=True) + (others if top_k is None else 0.0)))
    kept &= ordered >= min_p * ordered[:, :1]
    kept[:, 0] = True
    return kept


def penalised(logits: Tensor, ids: Sequence[int], penalty: float) -> Tensor:
    """Logits (V,) with those of ids that were there before divided by the penalty, or multiplied if below zero.

    The repetition penalty of Keskar et al. 2019 (CTRL), as in transformers: an id counts once.
    """
    if penalty == 1 or not ids:
        return logits
    seen = torch.tensor(sorted(set(ids)), device=logits.device)
    before = logits[seen]
    return logits.index_copy(0, seen, torch.where(before > 0, before / penalty, before * penalty))


def logprob_of(logits: Tensor, token: int, count: int) -> TokenLogprob:
    """The log-probability of an id and of the `count` likeliest, from logits (V,); of equals the smaller id first."""
    logprobs = logits.cpu().double().log_softmax(dim=-1)
    border = logprobs.topk(min(count, len(logprobs))).values[-1:] if count else logprobs[:0]
    among = (logprobs >= border).nonzero().flatten() if count else torch.zeros(0, dtype=torch.int64)
    order = logprobs[among].sort(descending=True, stable=True).indices[:count]
    top = tuple((int(other), float(logprobs[other])) for other in among[order])
    return TokenLogprob(token, float(logprobs[token]), top)
