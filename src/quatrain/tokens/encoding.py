"""Texts to ids in a thread: a chunk of a source becomes one array of ids and a table of its documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError, QuatrainError
from quatrain.text.fast import Ids, Offsets
from quatrain.text.reading import Span, parse
from quatrain.text.rows import Bad, Chunk, Reading, Rows
from quatrain.text.split import text_hashes
from quatrain.text.tokenizers import Tokenizer

# What the reference encodes as well: the first documents, and then this share of the bytes.
CHECKED_FIRST = 1 << 18  # bytes
CHECKED_SHARE = 1 / 200

DOCUMENT = np.dtype(
    [
        ("tokens", "<u8"),
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
    """The documents of a chunk: ids end to end without eot, and one row of `documents` for each."""

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
        self.to_check = float(CHECKED_FIRST)  # bytes; threads may take turns at it in any way

    def __call__(self, number: int, span: Span, chunk: Chunk) -> Tokenized:
        """Ids and table of a chunk of the unit's span `number`. Raises `DataError` that names file and row."""
        rows = parse(span, chunk, self.reading)
        texts = [text for text in rows.texts if text]

        def place(document: int) -> str:
            return span.place(chunk.first + int(table["row"][document]))

        table = self._table(rows, texts, number)
        ids, offsets = self._encode(texts, place)
        self._compare(texts, ids, offsets, place)
        table["tokens"] = np.diff(offsets)
        table["row"] += chunk.first
        bad = [one._replace(row=one.row + chunk.first) for one in rows.bad]
        read = len(set(rows.rows)) + sum(one.lost for one in rows.bad)  # a row cut in two is one document
        return Tokenized(ids.astype(self.dtype), table, read, len(rows.texts) - len(texts), rows.surrogates, bad)

    def _table(self, rows: Rows, texts: list[bytes], number: int) -> Documents:
        table = np.zeros(len(texts), dtype=DOCUMENT)
        present = np.array([bool(text) for text in rows.texts], dtype=np.bool_)
        table["bytes"] = [len(text) for text in texts]
        table["hash"] = text_hashes(self.seed, texts)
        table["row"] = np.array(rows.rows, dtype=np.uint64)[present]
        lost = np.cumsum([0, *(one.lost for one in rows.bad)])
        lost_before = lost[np.searchsorted([one.row for one in rows.bad], table["row"])]
        table["index"] = np.flatnonzero(present) + lost_before
        table["span"] = number
        if self.benchmark and texts:
            table["contaminated"] = self.benchmark.found_in(texts)
        return table

    def _encode(self, texts: list[bytes], place: Callable[[int], str]) -> tuple[Ids, Offsets]:
        try:
            ids, offsets = self.tokenizer.encode_batch(texts)
        except DataError:
            for document, text in enumerate(texts):  # once more, one by one, to name it
                try:
                    self.tokenizer.encode_batch([text])
                except DataError as error:
                    raise DataError(f"{place(document)}: {error}") from error
            raise
        if len(ids) and (ids.max() >= self.tokenizer.vocab_size or (ids == self.tokenizer.eot).any()):
            raise QuatrainError(f"the tokenizer gave an id that no text may have, in a batch from {place(0)} on")
        return ids, offsets

    def _compare(self, texts: list[bytes], ids: Ids, offsets: Offsets, place: Callable[[int], str]) -> None:
        """The ids of the fast way against those of the reference, on a sample."""
        self.to_check += CHECKED_SHARE * sum(map(len, texts))
        for document, text in enumerate(texts):
            if len(text) > self.to_check:
                return
            self.to_check -= len(text)
            try:
                expected = self.tokenizer.encode(text.decode())
            except DataError:
                continue  # the reference gives up on a million spaces in a row
            if not np.array_equal(ids[offsets[document] : offsets[document + 1]], expected):
                raise QuatrainError(f"{place(document)}: two tokenizers give different ids; report this document")
