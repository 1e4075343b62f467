"""What probes are made of: ids and strings that a tokenizer's text can hold, drawn by a seed."""

import string
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from quatrain.errors import DataError
from quatrain.mixing import derive, uniform
from quatrain.text.tokenizers import Tokenizer

MOST_IDS = 4096  # the first ones of a vocabulary of merges are the most frequent in text
FEW_IDS = 16  # with fewer letters than that, other signs are taken, too
ARROWS = (" ->", ":", ",", "")
BREAKS = ("\n", ";", ",", " ")

T = TypeVar("T")


class Draws:
    """A stream of draws that is a function of its key: the first n are the same whatever follows."""

    def __init__(self, *key: int) -> None:
        self._key, self._count = derive(*key), 0

    def below(self, count: int) -> int:
        """A number in 0 .. count - 1."""
        self._count += 1
        return uniform(self._key + self._count, count)

    def one(self, things: Sequence[T]) -> T:
        """Any of some things."""
        return things[self.below(len(things))]

    def different(self, things: Sequence[T], count: int) -> list[T]:
        """So many of some things, each at most once, in any order (Fisher and Yates)."""
        pool = list(things)
        for place in range(count):
            other = place + self.below(len(pool) - place)
            pool[place], pool[other] = pool[other], pool[place]
        return pool[:count]


class Words(NamedTuple):
    """The material that a tokenizer gives."""

    ids: tuple[int, ...]  # ordinary ids, see `ordinary_ids`
    words: tuple[int, ...]  # those of them that begin a word, where the tokenizer tells these apart; else all
    arrow: tuple[int, ...]  # between a key and its value
    line_break: tuple[int, ...]  # between pairs
    letters: str  # that random strings are made of, of a-z


def words_of(tokenizer: Tokenizer, vocab_size: int) -> Words:
    """The material for a model of that (true) vocabulary. What the tokenizer cannot give is empty."""
    ids = ordinary_ids(tokenizer, vocab_size)
    words = [token for token in ids if tokenizer.decode([token]).startswith(" ")]
    spaced = len(words) >= FEW_IDS
    arrow = _first_spelled(tokenizer, [sign + ("" if spaced else " ") for sign in ARROWS])
    line_break = _first_spelled(tokenizer, BREAKS)
    signs = {*arrow, *line_break}
    letters = "".join(letter for letter in string.ascii_lowercase if spells(tokenizer, letter))
    return Words(
        ids,
        tuple(token for token in (words if spaced else ids) if token not in signs),
        arrow,
        line_break,
        letters if spells(tokenizer, letters[::-1]) else "",
    )


def ordinary_ids(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Ids that text gives: the text of each is letters, perhaps behind a space, and encoding that gives the id again.

    The first `MOST_IDS` of them. Where there are fewer than `FEW_IDS`, as in a corpus of digits, any visible signs
    will do. Never eot, which no text gives, nor an id beyond `vocab_size`.
    """
    letters, visible = [], []
    for token in range(min(vocab_size, tokenizer.vocab_size)):
        text = "" if token == tokenizer.eot else _text_of(tokenizer, token)
        if text.strip() and text.isprintable() and _encoded(tokenizer, text) == [token]:
            visible.append(token)
            if text.removeprefix(" ").isalpha():
                letters.append(token)
        if len(letters) == MOST_IDS:
            break
    return tuple(letters if len(letters) >= FEW_IDS else visible[:MOST_IDS])


def spells(tokenizer: Tokenizer, text: str) -> bool:
    """Whether the ids of a text stand for it; spaces and case aside, which some tokenizers change."""
    ids = _encoded(tokenizer, text)
    return bool(ids) and _bare(tokenizer.decode(ids)) == _bare(text)


def _bare(text: str) -> str:
    return "".join(text.split()).casefold()


def _first_spelled(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[int, ...]:
    for text in texts:
        if text and (ids := _encoded(tokenizer, text)) and tokenizer.decode(ids).strip() == text.strip():
            return tuple(ids)
    return ()


def _text_of(tokenizer: Tokenizer, token: int) -> str:
    try:
        return tokenizer.decode([token])
    except (DataError, OverflowError):  # ids may have gaps
        return ""


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text; none where the tokenizer cannot spell it."""
    try:
        return [int(token) for token in tokenizer.encode(text)]
    except DataError:
        return []


def common_start(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first ids two rows share."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
