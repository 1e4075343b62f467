"""Windows of a split as text, with the borders between their documents."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from quatrain.tokens.order import window_starts
from quatrain.tokens.store import SplitName, TokenStore, TokenStream

SEED = 1337  # of the choice of windows: a store always shows the same
LONGEST = 1 << 14  # ids of a window: more is not looked at, only decoded
CANDIDATES = 256  # windows among which one with a border is looked for


@dataclass(frozen=True)
class Part:
    """The ids of one document that stand in a window, as text."""

    document: int  # counted from 1
    begins: bool  # in this window; else it began before
    text: str


@dataclass(frozen=True)
class Excerpt:
    """One window: the ids at positions start .. start + ids - 1 of a split."""

    split: SplitName
    start: int
    ids: int
    parts: list[Part]


def nth_excerpt(store: TokenStore, name: SplitName, T: int, number: int) -> list[Excerpt]:
    """Window `number` of the same order (it has no end), whatever it holds, in a list; none of a split of one id."""
    starts, stream = store.document_starts(name), store.split(name)
    T = min(T, len(stream) - 1, LONGEST - 1)
    if T < 1:
        return []
    start = int(window_starts("random", len(stream), T, SEED, np.array([number], dtype=np.int64))[0])
    return [Excerpt(name, start, T + 1, _parts(store, stream, starts, start, start + T + 1))]


def excerpts(store: TokenStore, name: SplitName, T: int, count: int) -> list[Excerpt]:
    """Windows of T+1 ids (of up to `LONGEST`, and of a shorter split all) in order `random`; one holds a border.

    Without a border among the windows drawn, one around the beginning of a document takes the last place; a split
    of a single document has none.
    """
    starts, stream = store.document_starts(name), store.split(name)
    n = len(stream)
    T = min(T, n - 1, LONGEST - 1)
    if not count or T < 1:
        return []
    return [
        Excerpt(name, start, T + 1, _parts(store, stream, starts, start, start + T + 1))
        for start in _choose(starts, n, T, count)
    ]


def _choose(starts: npt.NDArray[np.uint64], n: int, T: int, count: int) -> list[int]:
    drawn = window_starts("random", n, T, SEED, np.arange(max(count, CANDIDATES), dtype=np.int64))
    with_border = drawn[_holds_border(starts, drawn, T)]
    chosen = drawn[:count].tolist()
    if len(with_border) and not np.isin(chosen, with_border).any():
        chosen[-1] = int(with_border[0])
    elif not len(with_border) and len(starts) > 1:
        chosen[-1] = min(max(0, int(starts[len(starts) // 2]) - T // 2), n - T - 1)
    return list(dict.fromkeys(chosen))  # a split of one window has no other


def _holds_border(starts: npt.NDArray[np.uint64], windows: npt.NDArray[np.int64], T: int) -> npt.NDArray[np.bool_]:
    """Whether a document begins among the T inputs of each window, behind the first."""
    bounds = windows.astype(np.uint64)  # of the index's own type, or numpy would convert the whole index
    one, length = np.uint64(1), np.uint64(T)
    return np.searchsorted(starts, bounds + one) < np.searchsorted(starts, bounds + length)


def _parts(store: TokenStore, stream: TokenStream, starts: npt.NDArray[np.uint64], start: int, stop: int) -> list[Part]:
    first, last = np.searchsorted(starts, np.array([start, stop], dtype=np.uint64)).tolist()
    bounds = [start, *starts[first:last].tolist(), stop]
    return [
        Part(number, number > first, _text(store, stream.read(begin, end).tolist()))
        for number, (begin, end) in enumerate(pairwise(bounds), first)
        if begin < end
    ]


def _text(store: TokenStore, ids: list[int]) -> str:
    """The text of one document's ids without the eot at its beginning or end."""
    begin, end = int(ids[:1] == [store.eot]), len(ids) - int(ids[1:][-1:] == [store.eot])
    return store.tokenizer.decode(ids[begin:end])
