"""Rows of ids that ask for other ids, and the numbers that are made of the answers."""

import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from quatrain.inference.ngram import TIED, Said
from quatrain.inference.probe_words import Draws, Words
from quatrain.text.tokenizers import Tokenizer

Outcome = Callable[[Said], tuple[float, int]]  # of a row: a sum, and over how many


class Row(NamedTuple):
    """Ids that the model reads, and (place, id): what is asked for behind which places."""

    ids: tuple[int, ...]
    asked: tuple[tuple[int, int], ...]


class Measure(NamedTuple):
    """One number of a probe."""

    name: str
    said: str
    outcome: Outcome
    chance: float  # of an answer that does not look at the prompt


@dataclass(frozen=True)
class Probe:
    """Rows that ask the same thing at one setting."""

    family: str
    setting: str
    said: str
    rows: tuple[Row, ...]
    measures: tuple[Measure, ...]

    @property
    def length(self) -> int:
        """Ids of the longest row."""
        return max(len(row.ids) for row in self.rows)

    @property
    def data_hash(self) -> str:
        """sha256 of the rows: their lengths, their ids and what is asked, as little-endian int64."""
        numbers = [[len(row.ids), len(row.asked), *row.ids, *chain(*row.asked)] for row in self.rows]
        return hashlib.sha256(np.array(list(chain(*numbers)), dtype="<i8").tobytes()).hexdigest()


@dataclass(frozen=True)
class Material:
    """What rows are made of. They are a function of tokenizer, words and seed: a larger `count` adds rows."""

    tokenizer: Tokenizer
    words: Words
    count: int
    seed: int

    def draws(self, family: str, setting: str) -> Iterator[Draws]:
        """A stream of draws for each row of a probe."""
        number = zlib.crc32(f"{family} {setting}".encode())
        return (Draws(self.seed, number, row) for row in range(self.count))

    def row(self, ids: list[int], answer: list[int]) -> Row:
        """A row that begins with an eot, as documents do, and asks for each id of an answer behind it."""
        whole = (self.tokenizer.eot, *ids, *answer)
        return Row(whole[:-1], tuple((len(ids) + place, token) for place, token in enumerate(answer)))


def greedy_from(start: int) -> Outcome:
    """Of a row: how many of the ids asked for, from this one on, are likeliest, and of how many."""
    return lambda found: (float(found.greedy[start:].sum()), len(found.greedy) - start)


def loss_of(part: slice) -> Outcome:
    """Of a row: the nats of some of the ids asked for, and their number."""
    return lambda found: (float(found.losses[part].sum()), len(found.losses[part]))


def all_greedy(found: Said) -> tuple[float, int]:
    """One where every id asked for is likeliest."""
    return float(found.greedy.prod()), 1


def first_greedy(found: Said) -> tuple[float, int]:
    """One where the first of the choices is the likeliest of all ids."""
    return float(found.greedy[0]), 1


def first_chosen(found: Said) -> tuple[float, int]:
    """One where the first of the choices is the likeliest, 1 / n where n are equals."""
    with np.errstate(invalid="ignore"):  # a model that says nan is never right
        best = np.exp(found.losses.min() - found.losses) >= TIED
    return float(best[0]) / max(1, int(best.sum())), 1
