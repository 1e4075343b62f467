"""Log-probabilities of endings given a context: the context is computed once, the head where an ending asks for it.

A question's endings lie behind its context in one row. Each sees the context and itself, and counts its positions
from the context's end, so that every number is that of the ending in a row of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quatrain.inference.forward import Forward
from quatrain.inference.predictions import predictions
from quatrain.inference.ranks import ALONE, Ranks
from quatrain.model.masks import Causal, Dense, Mask

PAIRS_AT_ONCE = 1 << 26  # positions of a dense mask


class Question(NamedTuple):
    """Ids: a context of at least one, and endings."""

    context: tuple[int, ...]
    endings: tuple[tuple[int, ...], ...]


class Answer(NamedTuple):
    """Of each ending of a question: its log-probability in nats, and whether greedy decoding would give it."""

    logprobs: tuple[float, ...]
    greedy: tuple[bool, ...]


class Row(NamedTuple):
    """A context and one or more endings behind it, and where these stand: (question, ending)."""

    context: tuple[int, ...]
    endings: tuple[tuple[int, ...], ...]
    owners: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """Ids that the model reads: the last id of an ending predicts nothing that is asked for."""
        return len(self.context) + sum(len(ending) - 1 for ending in self.endings)


class Kept(NamedTuple):
    """Where the answers of batches are kept, so that what was computed is not computed again."""

    known: Callable[[int], list[tuple[float, bool]] | None]  # by the number of the batch
    keep: Callable[[int, list[tuple[float, bool]]], None]


NOTHING_KEPT = Kept(lambda number: None, lambda number, found: None)


def answer(
    forward: Forward,
    questions: Sequence[Question],
    kept: Kept = NOTHING_KEPT,
    done: Callable[[int], None] = lambda count: None,
    should_stop: Callable[[], bool] = lambda: False,
    ranks: Ranks = ALONE,
) -> list[Answer] | None:
    """The answers in the order of the questions; None if told to stop. `done` hears of the endings of each batch.

    Where context and ending are longer than block_size + 1, the context loses its first ids, as in lm-eval.
    Draws nothing. Ranks share the batches, and all have all answers, to the same bits however many they are.
    """
    firsts = np.cumsum([0, *(len(question.endings) for question in questions)])
    table = np.zeros((firsts[-1], 2))  # log-probability, and 1 where greedy decoding goes elsewhere
    every = _rows(questions, forward.config.block_size)
    for number, part in enumerate(batches([row.length for row in every], forward.device)):
        if not ranks.has(number):
            continue
        rows = every[part]
        if should_stop():
            return None
        found = kept.known(number)
        if found is None:
            found = _batch(forward, rows)
            kept.keep(number, found)
        owners = [owner for row in rows for owner in row.owners]
        for (question, ending), (logprob, likeliest) in zip(owners, found, strict=True):
            table[firsts[question] + ending] = logprob, not likeliest
        done(len(owners))
    logprobs, elsewhere = ranks.sum(table).T.tolist()
    places = [slice(*borders) for borders in pairwise(firsts.tolist())]
    return [Answer(tuple(logprobs[place]), tuple(flag == 0 for flag in elsewhere[place])) for place in places]


def ids_at_once(device: torch.device) -> int:
    """How many ids one forward reads, padding counted: a CPU gains nothing from more."""
    return 1 << 16 if device.type == "cuda" else 1 << 9


def truncated(question: Question, block_size: int) -> bool:
    """Whether the model cannot see the whole question at once."""
    return len(question.context) + max(map(len, question.endings)) > block_size + 1


def _rows(questions: Sequence[Question], block_size: int) -> list[Row]:
    """All endings in rows, longest first: what does not fit in memory fails at once, and estimates err upwards."""
    rows = []
    for number, (context, endings) in enumerate(questions):
        asked = [(place, ending) for place, ending in enumerate(endings) if ending]
        if asked and not truncated(Question(context, endings), block_size):
            places, whole = zip(*asked, strict=True)
            rows.append(Row(context, whole, tuple((number, place) for place in places)))
            continue
        for place, ending in asked:
            row = (context + ending)[-(block_size + 1) :]
            kept = max(1, len(row) - len(ending))
            rows.append(Row(row[:kept], (row[kept:],), ((number, place),)))
    return sorted(rows, key=lambda row: (-row.length, row.owners))


def batches(lengths: Sequence[int], device: torch.device) -> Iterator[slice]:
    """Rows of falling lengths cut into what one forward reads."""
    at_once = ids_at_once(device)
    first = 0
    while first < len(lengths):
        length = lengths[first]
        count = max(1, min(at_once // length, PAIRS_AT_ONCE // length**2))
        yield slice(first, first + count)
        first += count


@torch.inference_mode()
def _batch(forward: Forward, rows: list[Row]) -> list[tuple[float, bool]]:
    """Log-probability and greediness of every ending of the rows, in order."""
    device, T = forward.device, rows[0].length
    ids, positions, branches = (np.zeros((len(rows), T), dtype=np.int64) for _ in range(3))
    before: list[int] = []  # where each target is predicted in the flattened rows
    targets: list[int] = []
    sizes: list[int] = []
    for number, row in enumerate(rows):
        end = len(row.context)
        ids[number, :end], positions[number, :end] = row.context, np.arange(end)
        for branch, ending in enumerate(row.endings, start=1):
            part, more = slice(end, end + len(ending) - 1), len(ending) - 1
            ids[number, part], branches[number, part] = ending[:-1], branch
            positions[number, part] = np.arange(len(row.context), len(row.context) + more)
            before += [number * T + len(row.context) - 1, *range(number * T + end, number * T + end + more)]
            targets += ending
            sizes.append(len(ending))
            end += more
    hidden = forward.hidden(
        torch.from_numpy(ids).to(device),
        torch.from_numpy(positions).to(device),
        _mask(rows, torch.from_numpy(branches).to(device)),
    )  # (B T, C)
    asked = hidden[torch.tensor(before, device=device)]  # (N, C)
    losses, greedy = predictions(forward, asked, torch.tensor(targets, device=device))
    firsts = np.cumsum([0, *sizes[:-1]])
    logprobs = -np.add.reduceat(losses.cpu().numpy().astype(np.float64), firsts)
    all_greedy = np.logical_and.reduceat(greedy.cpu().numpy(), firsts)
    return list(zip(logprobs.tolist(), all_greedy.tolist(), strict=True))


def _mask(rows: list[Row], branches: Tensor) -> Mask:
    """Each position sees those before it in the context (branch 0) and in its own ending; branches are (B, T)."""
    if all(len(row.endings) == 1 for row in rows):
        return Causal()
    T = branches.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool, device=branches.device).tril()
    seen = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])  # (B, query, key)
    return Dense((causal & seen).unsqueeze(1))
