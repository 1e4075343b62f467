"""What counting in the prompt alone predicts: the baseline beside every in-context probe.

The longest end of the prompt that stood in it before says what follows; shorter ends, down to the empty one and then
a uniform guess over the vocabulary, have the rest of the chance. This is the interpolated Witten-Bell estimate
(Witten and Bell 1991; PPM's method C, Moffat 1990) of unbounded order, with the prompt as its only text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TIED = 1 - 1e-9  # shares of the best chance that differ by rounding alone


class Said(NamedTuple):
    """What a model or the baseline says of the ids that a row asks for, both (asked,)."""

    losses: Floats  # nats
    greedy: Floats  # the chance that a greedy choice is the id: 1 / n where it is one of n equals


def counted(ids: Sequence[int], asked: Sequence[tuple[int, int]], vocab_size: int) -> Said:
    """The baseline's word on each (place, id that may follow it), from the ids up to that place."""
    row = np.array(ids, dtype=np.int64)
    known: dict[int, tuple[Ints, Floats, float]] = {}
    losses, greedy = [], []
    for place, wanted in asked:
        if place not in known:
            known[place] = next_id(row[: place + 1], vocab_size)
        seen, chances, unseen = known[place]
        chance = float(chances[seen == wanted].sum()) or unseen
        best = chances.max()
        losses.append(-np.log(chance))
        greedy.append(float(chance >= TIED * best) / int((chances >= TIED * best).sum()))
    return Said(np.array(losses), np.array(greedy))


def next_id(prompt: Ints, vocab_size: int) -> tuple[Ints, Floats, float]:
    """Of the ids of a prompt (at least one): these, sorted, the chance of each, and that of any other id.

    With c(x) of x behind earlier copies of the prompt's last k ids, n in all and d different ones:
    P_k(x) = (c(x) + d P_k-1(x)) / (n + d), and P_-1 = 1 / vocab_size.
    """
    seen, places = np.unique(prompt, return_inverse=True)  # (n,), (T,)
    chances, unseen = np.full(len(seen), 1 / vocab_size), 1 / vocab_size
    ends = np.arange(-1, len(prompt) - 1)  # of the copies of the last k ids; the empty one ends anywhere
    order = 0
    while len(ends):
        counts = np.bincount(places[ends + 1], minlength=len(seen))
        kinds = int((counts > 0).sum())
        chances = (counts + kinds * chances) / (len(ends) + kinds)
        unseen = kinds * unseen / (len(ends) + kinds)
        ends = ends[ends >= order]
        ends = ends[places[ends - order] == places[-1 - order]]
        order += 1
    return seen, chances, unseen
