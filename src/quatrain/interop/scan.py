"""One reading of peers' shards: their hashes, where eot stands, and whether every id is in the vocabulary."""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError, QuatrainError
from quatrain.interop.shards import PeerShard
from quatrain.text.tokenizers import Tokenizer

Report = Callable[[str], None]
Positions = npt.NDArray[np.int64]

CHUNK = 1 << 22  # ids read at once
MOST_THREADS = 8  # a disk gains nothing from more
SECONDS_BETWEEN_LINES = 5.0


class Scan(NamedTuple):
    """What stands in one shard."""

    sha256: str  # of the ids' bytes, without a header
    first: int
    last: int
    eots: Positions  # ascending, within the shard
    text_bytes: int | None  # that the ids stand for; None where the tokenizer's ids are no fixed bytes


def scan_all(shards: Sequence[PeerShard], tokenizer: Tokenizer, report: Report) -> list[Scan]:
    """Read every shard once, in threads. Raises `DataError` for an id beyond the vocabulary, with file and place."""
    progress = _Progress(sum(shard.tokens * shard.dtype.itemsize for shard in shards), report)
    lengths = tokenizer.token_lengths()
    pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
    try:
        return list(pool.map(partial(_scan, tokenizer=tokenizer, lengths=lengths, progress=progress), shards))
    finally:
        progress.stopped = True
        pool.shutdown(cancel_futures=True)


def _scan(shard: PeerShard, tokenizer: Tokenizer, lengths: Positions | None, progress: "_Progress") -> Scan:
    digest = hashlib.sha256()
    eots: list[Positions] = []
    first = last = -1
    done = text_bytes = 0
    with shard.path.open("rb") as file:
        file.seek(shard.offset)
        while done < shard.tokens:
            data = file.read(min(CHUNK, shard.tokens - done) * shard.dtype.itemsize)
            ids = np.frombuffer(data, shard.dtype, len(data) // shard.dtype.itemsize)
            if not len(ids):
                raise DataError(f"{shard.path}: grew shorter while it was read; wait until it is whole")
            digest.update(data)
            _check_vocabulary(shard, ids, done, tokenizer)
            eots.append(np.flatnonzero(ids == tokenizer.eot) + done)
            if lengths is not None:
                text_bytes += int(np.bincount(ids.astype(np.int64), minlength=len(lengths)) @ lengths)
            first = int(ids[0]) if first < 0 else first
            last = int(ids[-1])
            done += len(ids)
            progress.add(len(data))
    return Scan(digest.hexdigest(), first, last, np.concatenate(eots), None if lengths is None else text_bytes)


def _check_vocabulary(shard: PeerShard, ids: npt.NDArray[np.unsignedinteger], done: int, tokenizer: Tokenizer) -> None:
    if ids.max() < tokenizer.vocab_size:
        return
    place = int(np.argmax(ids >= tokenizer.vocab_size))
    found = int(ids[place])
    signed = found - (1 << 8 * ids.itemsize)  # what a negative id looks like
    told = f"{found:,} (or {signed:,})" if ids.itemsize > 2 and signed >= -(1 << 8 * ids.itemsize - 1) else f"{found:,}"
    dtype = " and the --dtype" if shard.format == "headerless" else ""
    raise DataError(
        f"{shard.path}: id {told} at place {done + place:,}, and the tokenizer {tokenizer.name} has "
        f"{tokenizer.vocab_size:,} ids; give the tokenizer{dtype} that the shards were made with"
    )


class _Progress:
    """How far a reading in several threads is; `stopped` ends them all."""

    def __init__(self, total: int, report: Report) -> None:
        self.total = total
        self.report = report
        self.done = 0
        self.stopped = False
        self.last_said = time.monotonic()
        self.lock = threading.Lock()

    def add(self, size: int) -> None:
        """Count bytes, and say every few seconds how many."""
        if self.stopped:
            raise QuatrainError("stopped")  # seen by nobody: another error or a signal ends the command
        with self.lock:
            self.done += size
            if time.monotonic() - self.last_said > SECONDS_BETWEEN_LINES:
                self.last_said = time.monotonic()
                self.report(f"{self.done / 1e9:,.1f} of {self.total / 1e9:,.1f} GB read and hashed")
