"""Documents to pieces of a stream: a batch of texts becomes one array of ids a split, in a thread."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError, QuatrainError
from quatrain.text.fast import Ids, Offsets
from quatrain.text.tokenizers import Tokenizer
from quatrain.tokens.overlap import Hashes, sampled_spans
from quatrain.tokens.store import SPLITS, SplitName


class Admitted(NamedTuple):
    """One document that goes into the store."""

    utf8: bytes
    split: SplitName
    place: str


class Piece(NamedTuple):
    """Consecutive documents of one split, each behind its eot."""

    split: SplitName
    ids: npt.NDArray[Any]  # eots included, in the shards' dtype
    starts: Offsets  # of each document's eot within ids
    text_bytes: int
    spans: Hashes


class Encoder:
    """Turns batches into pieces; may be called from several threads."""

    def __init__(self, tokenizer: Tokenizer, bits: int) -> None:
        self.tokenizer = tokenizer
        self.bits = bits
        # By the largest id that the tokenizer can give, not by those seen: every shard of a corpus is alike.
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")

    def __call__(self, numbered: tuple[int, Sequence[Admitted]]) -> list[Piece]:
        """The pieces of batch number n. Raises `DataError` that names the document."""
        number, batch = numbered
        ids, offsets = self._encode(batch)
        if number % CHECKED_EVERY == 0:
            self._compare(batch, ids, offsets)
        return list(self._pieces(batch, ids, offsets))

    def _encode(self, batch: Sequence[Admitted]) -> tuple[Ids, Offsets]:
        try:
            ids, offsets = self.tokenizer.encode_batch([document.utf8 for document in batch])
        except DataError:
            for document in batch:  # once more, one by one, to name it
                try:
                    self.tokenizer.encode_batch([document.utf8])
                except DataError as error:
                    raise DataError(f"{document.place}: {error}") from error
            raise
        if len(ids) and (ids.max() >= self.tokenizer.vocab_size or (ids == self.tokenizer.eot).any()):
            raise QuatrainError(f"the tokenizer gave an id that no text may have, in a batch from {batch[0].place} on")
        return ids, offsets

    def _compare(self, batch: Sequence[Admitted], ids: Ids, offsets: Offsets) -> None:
        """Every so often, the ids of the fast way against those of the reference."""
        for place, document in enumerate(batch):
            try:
                expected = self.tokenizer.encode(document.utf8.decode())
            except DataError:
                continue  # the reference gives up on a million spaces in a row
            if not np.array_equal(ids[offsets[place] : offsets[place + 1]], expected):
                raise QuatrainError(f"{document.place}: two tokenizers give different ids; report this document")

    def _pieces(self, batch: Sequence[Admitted], ids: Ids, offsets: Offsets) -> Iterator[Piece]:
        lengths = np.diff(offsets)
        for split in SPLITS:
            mine = np.array([document.split == split for document in batch])
            if not mine.any():
                continue
            part = ids if mine.all() else ids[np.repeat(mine, lengths)]
            bounds = np.concatenate([[0], np.cumsum(lengths[mine])])
            starts = bounds[:-1] + np.arange(len(bounds) - 1)
            framed = np.empty(len(part) + len(starts), dtype=self.dtype)
            is_text = np.ones(len(framed), dtype=np.bool_)
            is_text[starts] = False
            framed[is_text] = part
            framed[starts] = self.tokenizer.eot
            text_bytes = sum(len(document.utf8) for document in batch if document.split == split)
            yield Piece(split, framed, starts, text_bytes, sampled_spans(part, bounds, self.bits))


CHECKED_EVERY = 200  # batches
