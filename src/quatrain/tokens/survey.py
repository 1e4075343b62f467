"""What only the ids themselves tell: how often each is a target, and what padding their documents would waste.

A split of up to `SAMPLE` ids is read whole, a larger one in blocks spread evenly over it, unless all is asked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quatrain.console import progress
from quatrain.errors import DataError
from quatrain.mixing import derive, uniform
from quatrain.tokens.lengths import PaddedRows
from quatrain.tokens.pieces import IntArray
from quatrain.tokens.store import SplitName, TokenStore

SAMPLE = 1 << 24  # ids read of a larger split
BLOCKS = 256  # places from which its targets are counted
RUNS = 32  # places at which its documents are padded
DOCUMENTS = 4096  # padded, at most
CHUNK = 1 << 22  # ids in memory at once
MAPPED = 1 << 26  # ids read before files are mapped anew: else all that was read counts as this process's memory
SEED = 1337  # of the places: a store is always told in the same numbers

Spans = list[tuple[int, int]]  # positions start .. stop-1


@dataclass(frozen=True)
class Survey:
    """What was seen of a split."""

    counts: npt.NDArray[np.int64]  # how often each id is a target, shape (vocab_size,)
    padded: PaddedRows
    whole: bool


def survey(store: TokenStore, name: SplitName, T: int, everything: bool) -> Survey:
    """Count targets and pad documents to rows of T, over all ids of a split or over a sample.

    Raises `DataError` for an id that is not in the vocabulary.
    """
    count = len(store.split(name))
    counts = np.zeros(store.vocab_size, dtype=np.int64)
    padded = PaddedRows(T, store.eot)
    if everything or count <= SAMPLE:
        for first, ids in _read(store, name, [(0, count)], name):
            padded.read(ids)
            counts += _counted(store, name, ids if first else ids[1:])  # the first id of a split is no target
        return Survey(counts, padded, whole=True)
    for _, ids in _read(store, name, _blocks(count), f"{name} targets"):
        counts += _counted(store, name, ids)
    for span in _runs(store.document_starts(name)):
        padded.jump()
        for _, ids in _read(store, name, [span]):
            padded.read(ids)
    return Survey(counts, padded, whole=False)


def _counted(store: TokenStore, name: SplitName, ids: IntArray) -> npt.NDArray[np.int64]:
    largest = int(ids.max(initial=0))
    if largest >= store.vocab_size:
        raise DataError(
            f"{store.folder}: id {largest} stands in {name}, and the vocabulary has {store.vocab_size} ids; "
            f"quatrain inspect {store.folder} --verify names the damaged file"
        )
    return np.bincount(ids, minlength=store.vocab_size)


def _blocks(ids: int) -> Spans:
    """One block somewhere in each of `BLOCKS` equal parts of the targets 1 .. ids-1."""
    length, part = SAMPLE // BLOCKS, (ids - 1) // BLOCKS
    starts = [1 + block * part + uniform(derive(SEED, block), part - length + 1) for block in range(BLOCKS)]
    return [(start, start + length) for start in starts]


def _runs(starts: npt.NDArray[np.uint64]) -> Spans:
    """A run of whole documents, with the eots at both ends, in each of `RUNS` equal parts of them.

    A run is cut at its share of `SAMPLE` ids: a document longer than that is not seen.
    """
    part = max(1, len(starts) // RUNS)
    length = max(1, min(part // 2, DOCUMENTS // RUNS))
    firsts = range(part // 4, len(starts) - length, part)
    bounds = [(int(starts[first]), int(starts[first + length]) + 1) for first in firsts]
    return [(start, min(stop, start + SAMPLE // RUNS)) for start, stop in bounds]


def _read(store: TokenStore, name: SplitName, spans: Spans, what: str = "") -> Iterator[tuple[int, IntArray]]:
    """The ids of each span in chunks, each with its position."""
    stream, mapped = store.split(name), 0
    with progress(what, sum(stop - start for start, stop in spans)) as advance:
        for begin, end in spans:
            for start in range(begin, end, CHUNK):
                if mapped > MAPPED:
                    stream, mapped = store.split(name), 0
                ids = stream.read(start, min(end, start + CHUNK))
                yield start, ids
                mapped += len(ids)
                advance(len(ids))
