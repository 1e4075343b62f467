"""Shards as one stream: where eot is missing, where documents begin, and which the peer's own border has cut.

In quatrain's stream a document begins with eot and a split ends with one more. Peers put eot before
a document (build-nanogpt, llm.c), after it (nanoGPT, datatrove) or nowhere (character sets, Megatron
without --append-eod); what is missing is supplied here, and no file is touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from quatrain.errors import DataError
from quatrain.interop.scan import Positions, Scan
from quatrain.interop.shards import PeerShard, follows

EotStyle = Literal["before", "after", "none"]


class Scanned(NamedTuple):
    """A shard and what stands in it; whether an eot opens its first document, and one closes its last."""

    shard: PeerShard
    scan: Scan
    opened: bool
    closed: bool


@dataclass
class Layout:
    """One split: its parts in order, None for a single eot that no file holds."""

    parts: list[Scanned | None] = field(default_factory=list)
    starts: Positions = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # of documents, in the stream
    tokens: int = 0  # every eot counted
    eot_by_index: bool = False  # eot is supplied before every document, at `starts`
    cut_begins: list[Path] = field(default_factory=list)  # files where text begins that belongs to what is not there
    cut_ends: list[Path] = field(default_factory=list)

    @property
    def supplied(self) -> int:
        """The eots of the stream that no file holds."""
        return sum(part is None for part in self.parts) + (len(self.starts) if self.eot_by_index else 0)

    @property
    def empty(self) -> int:
        """Documents without any id."""
        return int((np.diff(self.starts, append=self.tokens - 1) == 1).sum())


def lay_out(shards: Sequence[Scanned], by_index: bool) -> Layout:
    """One split's shards as a stream. `by_index`: no shard holds an eot, and documents are as the indices say."""
    return _by_index(shards) if by_index else _by_eot(shards)


def judged(shard: PeerShard, scan: Scan, eot: int) -> Scanned:
    """How a shard begins and ends. Raises `DataError` where some documents of its index have an eot, others not."""
    if shard.ends is None or not len(scan.eots):
        return Scanned(shard, scan, scan.first == eot, scan.last == eot)
    begins = _begins(shard.ends)
    filled = shard.ends > begins
    behind, before = np.isin(shard.ends[filled] - 1, scan.eots), np.isin(begins[filled], scan.eots)
    if not (behind.all() or before.all()):
        lacking = int(np.argmin(behind if behind.sum() >= before.sum() else before))
        raise DataError(
            f"{shard.path}: document {lacking:,} of its index has no eot, and others have one; expected one for every "
            f"document or for none: tokenize again (Megatron: with --append-eod), or name another --eot"
        )
    # A document that is an eot alone has it behind an empty text.
    alone = len(scan.eots) == shard.tokens
    return Scanned(shard, scan, bool(before.all()) and not alone, bool(behind.all()))


def without_eot(shards: Sequence[Scanned]) -> bool:
    """Whether the peer knows its documents by indices alone; raises `DataError` where that is true of some files."""
    lacking = [one.shard for one in shards if one.shard.ends is not None and not len(one.scan.eots)]
    if lacking and len(lacking) < len(shards):
        raise DataError(
            f"{lacking[0].path}: holds no eot, and other files do; expected one for every document or for none: "
            f"tokenize again (Megatron: with --append-eod), or leave it out with --files"
        )
    return bool(lacking)


def style_of(shards: dict[str, list[Scanned]]) -> EotStyle:
    """Where the files put eot, judged by how the splits begin and end."""
    if not any(len(one.scan.eots) for split in shards.values() for one in split):
        return "none"
    ends = [(split[0].opened, split[-1].closed) for split in shards.values()]
    before, after = ends.count((True, False)), ends.count((False, True))
    return "after" if after > before else "before"


def _by_eot(shards: Sequence[Scanned]) -> Layout:
    laid = Layout()
    starts: list[Positions] = []

    def supply() -> None:
        laid.parts.append(None)
        starts.append(np.array([laid.tokens]))
        laid.tokens += 1

    before: Scanned | None = None
    for part in shards:
        goes_on = before is not None and follows(before.shard.path, part.shard.path)
        if not goes_on and not part.opened and (before is None or not before.closed):
            if before is not None:
                laid.cut_ends.append(before.shard.path)
            laid.cut_begins.append(part.shard.path)
            supply()
        laid.parts.append(part)
        starts.append(part.scan.eots + laid.tokens)
        laid.tokens += part.shard.tokens
        before = part
    if not shards[-1].closed:
        laid.cut_ends.append(shards[-1].shard.path)
        supply()
    laid.starts = np.concatenate(starts)[:-1]  # the closing eot begins nothing
    return laid


def _by_index(shards: Sequence[Scanned]) -> Layout:
    laid = Layout(list(shards), eot_by_index=True)
    starts: list[Positions] = []
    for shard, *_ in shards:
        assert shard.ends is not None
        begins = _begins(shard.ends)
        starts.append(begins[shard.ends > begins] + laid.tokens)  # a document without ids is none
        laid.tokens += shard.tokens
    places = np.concatenate(starts)
    laid.starts = places + np.arange(len(places))
    laid.tokens += len(places) + 1
    laid.parts.append(None)
    return laid


def _begins(ends: Positions) -> Positions:
    return np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
