"""Texts to ids in a thread: a chunk becomes one array of ids and a table of its documents.

The ids are as they will stand in the stream, each document behind its eot.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError, QuatrainError
from quatrain.text.fast import Offsets
from quatrain.text.reading import Span, parse
from quatrain.text.rows import Bad, Chunk, Reading, Rows
from quatrain.text.split import text_hashes
from quatrain.text.tokenizers import Tokenizer

# What the reference encodes as well: this share of the bytes, and the first documents. Some at a time: the reference is
# faster with what it needs in the core's cache.
CHECKED_SHARE = 1 / 200
CHECKED_AT_ONCE = 1 << 18  # bytes

FILLERS = 300  # ids that are tried

DOCUMENT = np.dtype(
    [
        ("tokens", "<u8"),  # without eot
        ("bytes", "<u8"),
        ("hash", "<u8"),  # of the text, keyed with the seed
        ("row", "<u8"),  # in its span, counted from 0
        ("index", "<u8"),  # among the documents of its span, those left out included
        ("span", "<u4"),  # in its unit
        ("contaminated", "<u4"),
    ]
)
Documents = npt.NDArray[Any]  # of DOCUMENT, shape (documents,)


def dtype_of(tokenizer: Tokenizer) -> np.dtype[Any]:
    """By the largest id that the tokenizer can give, not by those seen: every shard of a corpus is alike."""
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


class FindsTexts(Protocol):
    """What tells which of some texts hold a passage that they must not hold."""

    def found_in(self, texts: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """One truth a text."""
        ...


@dataclass
class Tokenized:
    """The documents of a chunk: ids end to end, each document behind its eot, and one row of `documents` for each."""

    ids: npt.NDArray[Any]
    documents: Documents
    read: int  # documents, the empty and the bad ones included
    empty: int
    surrogates: int
    bad: list[Bad] = field(default_factory=list)  # their rows are of the span


@dataclass
class Encoder:
    """Parses and tokenizes chunks; may be called from several threads."""

    tokenizer: Tokenizer
    reading: Reading
    seed: int
    benchmark: FindsTexts | None = None

    def __post_init__(self) -> None:
        self.dtype = dtype_of(self.tokenizer)
        # Bytes, and whether they are being spent; threads may take turns at it in any way.
        self.to_check, self.checking = float(CHECKED_AT_ONCE), False

    def __call__(self, number: int, span: Span, chunk: Chunk) -> Tokenized:
        """Ids and table of a chunk of the unit's span `number`. Raises `DataError` that names file and row."""
        rows = parse(span, chunk, self.reading)
        texts = [text for text in rows.texts if text]

        def place(document: int) -> str:
            return span.place(chunk.first + int(table["row"][document]))

        table = self._table(rows, texts, number)
        ids, offsets = self._encode(texts, place)
        self._compare(texts, ids, offsets, place)
        table["tokens"] = np.diff(offsets) - 1
        table["row"] += chunk.first
        bad = [one._replace(row=one.row + chunk.first) for one in rows.bad]
        read = len(set(rows.rows)) + sum(one.lost for one in rows.bad)  # a row cut in two is one document
        return Tokenized(ids, table, read, len(rows.texts) - len(texts), rows.surrogates, bad)

    @functools.cached_property
    def filler(self) -> bytes | None:
        """A text that is a single id, if one of the first ids has one.

        It is tokenized before each document and its id replaced by eot, so that no id has to be moved to make room.
        """
        for token in range(min(self.tokenizer.vocab_size, FILLERS)):
            with contextlib.suppress(DataError):  # no character, but a part of one
                text = self.tokenizer.decode([token])
                if self.tokenizer.encode(text).tolist() == [token]:
                    return text.encode()
        return None

    def _table(self, rows: Rows, texts: list[bytes], number: int) -> Documents:
        table = np.zeros(len(texts), dtype=DOCUMENT)
        present = np.fromiter(map(bool, rows.texts), dtype=np.bool_)
        table["bytes"] = np.fromiter(map(len, texts), dtype=np.int64)
        table["hash"] = text_hashes(self.seed, texts)
        table["row"] = np.array(rows.rows, dtype=np.uint64)[present]
        lost = np.cumsum([0, *(one.lost for one in rows.bad)])
        lost_before = lost[np.searchsorted([one.row for one in rows.bad], table["row"])]
        table["index"] = np.flatnonzero(present) + lost_before
        table["span"] = number
        if self.benchmark and texts:
            table["contaminated"] = self.benchmark.found_in(texts)
        return table

    def _encode(self, texts: list[bytes], place: Callable[[int], str]) -> tuple[npt.NDArray[Any], Offsets]:
        """Ids of the texts, each behind its eot, and the len(texts) + 1 places where one begins and the last ends."""
        given = texts
        if self.filler:
            given = [self.filler] * (2 * len(texts))
            given[1::2] = texts
        try:
            ids, offsets = self.tokenizer.encode_batch(given)
        except DataError:
            for document, text in enumerate(texts):  # once more, one by one, to name it
                try:
                    self.tokenizer.encode_batch([text])
                except DataError as error:
                    raise DataError(f"{place(document)}: {error}") from error
            raise
        largest = ids.max(initial=0)
        if largest >= self.tokenizer.eot and (
            largest >= self.tokenizer.vocab_size or (ids == self.tokenizer.eot).any()
        ):
            raise QuatrainError(f"the tokenizer gave an id that no text may have, in a batch from {place(0)} on")
        ids = ids.astype(self.dtype)
        if not self.filler:
            return np.insert(ids, offsets[:-1], self.tokenizer.eot), offsets + np.arange(len(offsets))
        starts = offsets[::2]
        if not (offsets[1::2] == starts[:-1] + 1).all():
            raise QuatrainError(
                f"the tokenizer gave more than one id for {self.filler!r}, in a batch from {place(0)} on"
            )
        ids[starts[:-1]] = self.tokenizer.eot
        return ids, starts

    def _compare(
        self, texts: list[bytes], ids: npt.NDArray[Any], offsets: Offsets, place: Callable[[int], str]
    ) -> None:
        """The ids of the fast way against those of the reference, on a sample."""
        self.to_check += CHECKED_SHARE * sum(map(len, texts))
        self.checking = self.checking or self.to_check >= CHECKED_AT_ONCE
        for document, text in enumerate(texts if self.checking else []):
            if len(text) > self.to_check:
                self.checking = False
                return
            self.to_check -= len(text)
            try:
                expected = self.tokenizer.encode(text.decode())
            except DataError:
                continue  # the reference gives up on a million spaces in a row
            if not np.array_equal(ids[offsets[document] + 1 : offsets[document + 1]], expected):
                raise QuatrainError(f"{place(document)}: two tokenizers give different ids; report this document")
