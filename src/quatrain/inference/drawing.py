"""The next id from logits: pure functions of the logits and of draws in [0, 1)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SHORTLIST = 512  # likeliest ids that are sorted first: mostly the draw falls among them


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

    The id at which the cumulative probability passes the draw, over the ids sorted by probability (ties: the
    smaller id first), so that top_k, top_p and min_p are prefixes. Computed in fp64 on the CPU: logits that differ
    by rounding give another id only where the draw falls within that rounding of a border.
    """
    if temperature == 0 or top_p == 0:
        return logits.argmax(dim=-1)
    # Subtracting the maximum first keeps the division finite at any temperature.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values).cpu().double() / temperature
    probabilities, draws = scaled.softmax(dim=-1), draws.double().cpu()  # (B, V)
    cuts = top_k, top_p, min_p
    if probabilities.shape[1] > 2 * SHORTLIST:
        chosen, certain = _among_likeliest(probabilities, draws, *cuts)
        if certain.all():
            return chosen
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    place, _ = _place(ordered, draws, nucleus(ordered, *cuts))
    return order.gather(1, place).squeeze(1)


def _among_likeliest(
    probabilities: Tensor, draws: Tensor, top_k: int | None, top_p: float, min_p: float
) -> tuple[Tensor, Tensor]:
    """The same from the likeliest ids alone (B,), and for which rows this is certain: a whole sort costs more."""
    found = probabilities.topk(SHORTLIST, dim=-1)
    order, by_id = found.indices.sort(dim=-1)
    ordered, by_size = found.values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    order = order.gather(1, by_size)
    whole = torch.cat([ordered, (1 - ordered.sum(dim=-1, keepdim=True)).clamp(min=0)], dim=-1)  # the last: all others
    least = ordered[:, -1:]
    # top_p looks at what is before, so that all others may stand as one; min_p would take their sum for one id's.
    kept = nucleus(whole, None if top_k is None else min(top_k, SHORTLIST), top_p, min_p)
    kept[:, -1:] &= least >= min_p * ordered[:, :1]
    place, cut_short = _place(whole, draws, kept)
    at = whole.gather(1, place)
    # Of ids as likely as the last of the list, smaller ones may have been left out.
    certain = (place < SHORTLIST) & (at > least)
    if top_k is not None and top_k > SHORTLIST:
        certain &= False
    elif top_p < 1 or min_p:
        certain &= ~kept[:, -1:] & (cut_short > least)
    chosen = order.gather(1, place.clamp(max=SHORTLIST - 1))
    return chosen.squeeze(1), certain.squeeze(1)


def _place(ordered: Tensor, draws: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulative probability of what is kept passes the draw (B, 1), and the least kept (B, 1)."""
    cumulative = (ordered * kept).cumsum(dim=-1)
    place = (cumulative <= draws.unsqueeze(1) * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    last = kept.sum(dim=-1, keepdim=True) - 1
    return torch.minimum(place, last), ordered.gather(1, last)


def nucleus(probabilities: Tensor, top_k: int | None, top_p: float, min_p: float = 0.0) -> Tensor:
    """Which of the sorted probabilities (B, V) may be drawn, bool (B, V): at least the first.

    top_p is a share of what top_k leaves, as in transformers; min_p is a share of the likeliest id's probability.
    """
    among = torch.ones_like(probabilities, dtype=torch.bool)
    if top_k is not None:
        among[:, top_k:] = False
    drawable = probabilities * among
    before = drawable.cumsum(dim=-1) - drawable  # what the likelier ids hold together
    kept = among & (before < top_p * drawable.sum(dim=-1, keepdim=True))
    kept &= probabilities >= min_p * probabilities[:, :1]
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
