"""The second half of a preparation: near-duplicates are found, and the documents that stay become shards.

Everything runs over blocks of documents in threads, with a bounded number of ids in memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quatrain.files import writing
from quatrain.mixing import derive
from quatrain.text.fast import Offsets
from quatrain.text.lookup import mixed
from quatrain.text.similar import ValidationIndex
from quatrain.text.tokenizers import Tokenizer
from quatrain.tokens.claim import PARTS
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.corpus import Corpus, Numbers
from quatrain.tokens.deciding import Decisions, Fate
from quatrain.tokens.overlap import Hashes, SpanSample, thinning
from quatrain.tokens.shards import Piece, SplitWriter
from quatrain.tokens.store import SplitName
from quatrain.tokens.tokenizing import in_order

SHORT = 100  # bytes of text below which a few grams in common say nothing: only equal documents are duplicates
BLOCK = 1 << 20  # ids that a thread works on at once: of smaller blocks threads wait for each other more often
SHARED = 4  # threads, beyond which blocks are smaller, so that memory is bounded
INDEXED = 1 << 23  # ids of validation that are compared with train at once: it bounds the memory


@dataclass
class Assembly:
    """Writes the splits of a corpus into the folder of its store."""

    corpus: Corpus
    decisions: Decisions
    config: PrepareConfig
    tokenizer: Tokenizer
    folder: Path
    name: str
    progress: Callable[[str, int, int], None] = lambda phase, done, of: None
    found: list[Hashes] = field(default_factory=list)  # spans of validation seen in train

    def run(self) -> dict[str, Any]:
        """Both splits as store.json describes them."""
        val = self.decisions.documents(Fate.VAL)
        compared = self.config.cross_dedup and not self.config.val_tail
        parts = list(self.corpus.blocks(self._not_short(val), INDEXED)) if compared else []
        # The last part of validation is compared with train while that is written, unless more must be known before.
        last = None if self.config.near_dedup or not parts else parts.pop()
        for part in parts:
            self._leave_out_near_validation(Comparison(self.corpus, part, self.config.near_threshold))
        if self.config.near_dedup:
            self._leave_out_near_duplicates()
        sample = SpanSample(thinning(int(self.corpus.text_bytes.sum())))
        for block in self.corpus.blocks(val, BLOCK):
            sample.add(*self.corpus.bare(block))
        train = self.decisions.documents(Fate.TRAIN)
        if self.config.shuffle is not None:
            train = _shuffled(train, self.corpus.hashes[train], self.config.shuffle)
        comparison = Comparison(self.corpus, last, self.config.near_threshold) if last is not None else None
        splits = {"train": self._write("train", train, sample, comparison), "val": self._write("val", val)}
        splits["val"]["share_in_train"] = round(sample.share(np.concatenate([sample.hashes[:0], *self.found])), 6)
        return splits

    def _in_blocks(self, work: Callable[[Numbers], Any], documents: Numbers, phase: str) -> Iterator[Any]:
        """What `work` gives for each block of documents, in order."""
        done = 0
        blocks = self.corpus.blocks(documents, BLOCK * SHARED // max(SHARED, self.config.workers))
        for count, result in in_order(lambda block: (len(block), work(block)), blocks, self.config.workers):
            done += count
            self.progress(phase, done, len(documents))
            yield result

    def _not_short(self, documents: Numbers) -> Numbers:
        return documents[self.corpus.text_bytes[documents] >= SHORT]

    def _leave_out_near_validation(self, comparison: "Comparison") -> None:
        def near(block: Numbers) -> Near:
            return comparison.near(block, *self.corpus.gather(block))

        for found in self._in_blocks(near, self.decisions.documents(Fate.TRAIN), "comparing with validation"):
            self.decisions.leave_out(Fate.NEAR_VALIDATION, *found)

    def _leave_out_near_duplicates(self) -> None:
        from quatrain.text.near import band_hashes, near_duplicates  # with rensa, only for this

        train = self._not_short(self.decisions.documents(Fate.TRAIN))

        def bands(block: Numbers) -> Any:
            return band_hashes(*self.corpus.bare(block))

        if not len(train):
            return
        with Bands(self.folder / PARTS / "bands.tmp") as file:
            for rows in self._in_blocks(bands, train, "hashing for near-duplicates"):
                file.add(rows)
            found = near_duplicates(file.column, self._ids_among(train), len(train), self.config.near_threshold)
        gone = np.flatnonzero(found.removed)
        self.decisions.leave_out(Fate.NEAR_DUPLICATE, train[gone], train[found.like[gone]], found.jaccards[gone])

    def _ids_among(self, documents: Numbers) -> Callable[[int], npt.NDArray[Any]]:
        return lambda place: self.corpus.bare(documents[place : place + 1])[0]

    def _write(
        self,
        split: SplitName,
        documents: Numbers,
        sample: SpanSample | None = None,
        comparison: "Comparison | None" = None,
    ) -> dict[str, Any]:
        """Write a split: those of its documents that the comparison leaves in it."""

        def piece(block: Numbers) -> tuple[Piece, Hashes | None, Near | None]:
            ids, offsets = self.corpus.gather(block)
            near = comparison.near(block, ids, offsets) if comparison else None
            if near and len(near.documents):
                block = block[~np.isin(block, near.documents)]
                ids, offsets = self.corpus.gather(block)
            found = sample.found_in(ids, offsets) if sample else None
            return Piece(ids, offsets[:-1], int(self.corpus.text_bytes[block].sum())), found, near

        stem = f"{self.name}_{split}"
        with SplitWriter(self.folder, stem, self.corpus.dtype, self.tokenizer.eot, self.config.shard_size) as writer:
            for written, found, near in self._in_blocks(piece, documents, f"writing {split}"):
                writer.add(written)
                self.found += [found] if found is not None else []
                if near:
                    self.decisions.leave_out(Fate.NEAR_VALIDATION, *near)
            return writer.close()


class Near(NamedTuple):
    """Documents that are near-duplicates of others, one of these for each, and how similar the two are."""

    documents: Numbers
    like: Numbers
    jaccard: npt.NDArray[np.float64]


class Comparison:
    """Finds the training documents that are near-duplicates of some validation documents; for any thread."""

    def __init__(self, corpus: Corpus, val: Numbers, threshold: float) -> None:
        self.corpus = corpus
        self.val = val
        self.index = ValidationIndex(*corpus.bare(val), threshold)

    def near(self, block: Numbers, ids: npt.NDArray[Any], offsets: Offsets) -> Near:
        """Those of a block of documents, whose ids these are, each behind its eot."""
        near, like, jaccard = self.index.similar(ids, offsets, most=1, behind=1)
        told = self.corpus.text_bytes[block[near]] >= SHORT
        return Near(block[near[told]], self.val[like[told]], jaccard[told])


def _shuffled(documents: Numbers, hashes: Hashes, seed: int) -> Numbers:
    """An order that follows from the texts and the seed alone, whatever the order of the sources."""
    keys = mixed(hashes ^ np.uint64(derive(seed)))
    return documents[np.argsort(keys, kind="stable")]


class Bands:
    """The band hashes of all documents on disk: written in blocks of documents, read one band at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: list[int] = []
        with writing(path):
            self.file = path.open("w+b")

    def __enter__(self) -> "Bands":
        return self

    def __exit__(self, *failure: object) -> None:
        self.file.close()
        self.path.unlink()

    def add(self, hashes: npt.NDArray[Any]) -> None:
        """Append documents: their hashes, shape (documents, bands)."""
        with writing(self.path, self.file.tell() + hashes.nbytes):
            self.file.write(hashes.T.tobytes())
            self.file.flush()
        self.counts.append(len(hashes))
        self.dtype, self.bands = hashes.dtype, hashes.shape[1]

    def column(self, band: int) -> npt.NDArray[Any]:
        """The hashes of one band, shape (documents,)."""
        parts, offset = [], 0
        for count in self.counts:
            place = (offset * self.bands + band * count) * self.dtype.itemsize
            parts.append(np.fromfile(self.path, dtype=self.dtype, count=count, offset=place))
            offset += count
        return np.concatenate(parts)
