"""Which documents go where: decided over the whole corpus, from the tables of its parts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError
from quatrain.text.split import held_out
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.corpus import Corpus, Numbers
from quatrain.tokens.overlap import among
from quatrain.tokens.parts import EXAMPLES

Report = Callable[[str], None]
Flags = npt.NDArray[np.bool_]


class Fate(IntEnum):
    """What becomes of a document."""

    TRAIN = 0
    VAL = 1
    DUPLICATE = 2  # its text stands in the store already
    CONTAMINATED = 3  # shares a passage with a benchmark
    NEAR_VALIDATION = 4  # too much like a validation document to train on
    NEAR_DUPLICATE = 5  # too much like a training document before it


@dataclass
class Decisions:
    """The fate of every document, and a few examples of what is left out."""

    fates: npt.NDArray[np.uint8]
    examples: list[dict[str, Any]] = field(default_factory=list)  # kind, document, like (a document), jaccard

    def documents(self, fate: Fate) -> Numbers:
        """The numbers of the documents of one fate, in order."""
        return np.flatnonzero(self.fates == fate)

    def count(self, fate: Fate) -> int:
        """How many documents have this fate."""
        return int((self.fates == fate).sum())

    def leave_out(self, fate: Fate, documents: Numbers, like: Numbers | None = None, jaccard: Any = None) -> None:
        """Give documents a fate other than a split; the first few of each kind become examples."""
        self.fates[documents] = fate
        told = sum(one["kind"] == fate.name.lower() for one in self.examples)
        for place in range(min(len(documents), EXAMPLES - told)):
            example = {"kind": fate.name.lower(), "document": int(documents[place])}
            example |= {"like": int(like[place])} if like is not None else {}
            example |= {"jaccard": round(float(jaccard[place]), 4)} if jaccard is not None else {}
            self.examples.append(example)


def decide(corpus: Corpus, config: PrepareConfig, sources: int, report: Report) -> Decisions:
    """Splits, exact duplicates and contamination; the first `sources` sources are not validation files.

    Validation comes first, so a text that stands on both sides is left out of train. Raises `DataError`.
    """
    val = _validation(corpus, config, sources, report)
    decisions = Decisions(val.astype(np.uint8))
    if not config.val_tail:
        duplicates, like = _repeated(corpus, val)
        if config.allow_duplicates:  # but not across the splits
            across = val[like] & ~val[duplicates]
            duplicates, like = duplicates[across], like[across]
        decisions.leave_out(Fate.DUPLICATE, duplicates, like)
    if config.decontaminate:
        # A document has one reason to be left out, the first.
        decisions.leave_out(Fate.CONTAMINATED, np.flatnonzero(corpus.contaminated & (decisions.fates == Fate.TRAIN)))
    return decisions


def _validation(corpus: Corpus, config: PrepareConfig, sources: int, report: Report) -> Flags:
    if config.val_tail:
        last: Flags = np.arange(len(corpus)) == len(corpus) - 1
        return last
    if config.val:
        of_validation: Flags = corpus.sources >= sources
        return of_validation
    if config.val_docs:
        return _with_equals(corpus, set(config.val_docs))
    val = held_out(corpus.hashes, config.val_fraction)
    if not val.any() and len(corpus):
        report("no document fell into validation by its hash: holding out the one of smallest hash")
        val = corpus.hashes == corpus.hashes.min()
    return val


def _with_equals(corpus: Corpus, wanted: set[int]) -> Flags:
    indices = corpus.indices()
    chosen = np.isin(indices, list(wanted))
    count = sum(corpus.rows(1 + max(max(unit.sources) for unit in corpus.units)))
    missing = sorted(index for index in wanted if index >= count)
    if missing:
        raise DataError(f"--val-docs names document {missing[0]}, and there are {count} (0 to {count - 1})")
    return among(corpus.hashes, np.sort(corpus.hashes[chosen]))


def _repeated(corpus: Corpus, val: Flags) -> tuple[Numbers, Numbers]:
    """The documents whose text came before, validation first, and for each the first of its equals.

    Texts are equal if their 64-bit hashes and their lengths are: by chance, for a billion documents, less
    often than once in a million corpora.
    """
    ascending = np.sort(corpus.hashes)
    again = among(corpus.hashes, ascending[1:][ascending[1:] == ascending[:-1]])  # few, and soon found
    order = np.concatenate([np.flatnonzero(val & again), np.flatnonzero(~val & again)])
    order = order[np.argsort(corpus.hashes[order], kind="stable")]
    hashes, sizes = corpus.hashes[order], corpus.text_bytes[order]
    repeats = np.zeros(len(order), dtype=np.bool_)
    repeats[1:] = (hashes[1:] == hashes[:-1]) & (sizes[1:] == sizes[:-1])
    first = np.maximum.accumulate(np.where(repeats, 0, np.arange(len(order))))
    repeated, like = order[repeats], order[first[repeats]]
    in_order = np.argsort(repeated)
    return repeated[in_order], like[in_order]
