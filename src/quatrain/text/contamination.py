"""Documents that hold a piece of a benchmark: a run of 13 words that one of its texts has too.

The rule is that of GPT-3 (Brown et al. 2020, appendix C): 13-grams of lower-cased words without punctuation. A word
is a run of ASCII letters, digits and bytes from 0x80 on, and only ASCII is lower-cased. Texts are UTF-8.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError
from quatrain.text.lookup import Hashes, Lookup, Places, ascending, mixed
from quatrain.text.reading import read_objects
from quatrain.text.sources import Source, content_hash, find_sources
from quatrain.text.tokenizers import whole_characters

WORDS = 13
BLOCK = 1 << 18  # bytes whose words are found together: all that this needs stays in a core's cache
ITEMS = 1000  # benchmark items taken in together
PADDING = 8  # bytes behind the last word, so that eight can be read wherever one begins

# A lower-cased letter for a letter, itself for what else belongs to a word, 0 for the rest.
_CLASSES = bytes(
    byte + 32 if 0x41 <= byte <= 0x5A else byte if byte >= 0x80 or chr(byte).isalnum() else 0 for byte in range(256)
)
_FIRST = np.array([(1 << 8 * size) - 1 for size in range(9)], dtype=np.uint64)  # masks of so many of eight bytes
_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class BenchmarkFile:
    """What a store writes down about one file of benchmark items."""

    name: str
    sha256: str
    items: int
    items_without_grams: int  # no text of theirs has 13 words: they can be found nowhere
    grams: int  # distinct ones


class Benchmark:
    """The 13-grams of benchmark items; used from any number of threads at once."""

    def __init__(self, words: list[str]) -> None:
        """From JSON lines files, plain, .gz or .zst, or folders of them: one item a line.

        Every string in an item is a text, those in lists and objects included; `ctx` with each of `endings` is one
        too, as HellaSwag means them. Raises `DataError` that names file and line.
        """
        self.files: list[BenchmarkFile] = []
        grams = [np.empty(0, dtype=np.uint64)]
        for source in find_sources(words)[0]:
            facts, found = _read(source)
            self.files.append(facts)
            grams.append(found)
        self._lookup = Lookup(ascending(np.concatenate(grams)))

    def describe(self) -> list[dict[str, Any]]:
        """The facts about every file, for JSON."""
        return [asdict(file) for file in self.files]

    def found_in(self, texts: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Whether each text holds 13 words in a row that a text of the benchmark holds too, shape (texts,)."""
        found = np.zeros(len(texts), dtype=np.bool_)
        joined = _joined(texts)
        for grams in _grams(joined):
            found[joined.holders(grams.take(self._lookup.find(grams.hashes)[0]))[0]] = True
        return found

    def matched(self, text: bytes) -> str:
        """The first such 13 words of a text, lower-cased, or an empty string."""
        joined = _joined([text])
        for grams in _grams(joined):
            for place in self._lookup.find(grams.hashes)[0][:1]:
                span = joined.plain[grams.starts[place] : grams.ends[place]]
                return b" ".join(span.replace(b"\0", b" ").split()).decode(errors="replace")
        return ""


class _Grams(NamedTuple):
    """Runs of 13 words: a hash of each, and where it begins and ends in the joined texts."""

    hashes: Hashes
    starts: Places
    ends: Places

    def take(self, places: Places | slice) -> "_Grams":
        return _Grams(self.hashes[places], self.starts[places], self.ends[places])

    def then(self, more: "_Grams") -> "_Grams":
        return _Grams(
            np.concatenate([self.hashes, more.hashes]),
            np.concatenate([self.starts, more.starts]),
            np.concatenate([self.ends, more.ends]),
        )


class _Joined(NamedTuple):
    """Texts end to end, lower-cased, with zeros for what belongs to no word: before, between and behind them."""

    plain: bytes
    begins: Places  # of every text, and one more

    def holders(self, grams: _Grams) -> tuple[Places, Hashes]:
        """The texts that hold runs whole, and the hashes of those runs."""
        holders = np.searchsorted(self.begins, grams.starts, side="right") - 1
        whole = grams.ends < self.begins[holders + 1]
        return holders[whole], grams.hashes[whole]


def _joined(texts: Sequence[bytes]) -> _Joined:
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    begins = np.concatenate([[1], 1 + np.cumsum(lengths + 1)])
    return _Joined(b"\n".join([b"", *texts, b"\n" * PADDING]).translate(_CLASSES), begins)


def _grams(joined: _Joined) -> Iterator[_Grams]:
    """All runs of 13 words, those across two texts too, in parts."""
    last = _Grams(np.empty(0, dtype=np.uint64), *np.empty((2, 0), dtype=np.int64))
    for words in _words(joined.plain):
        known = last.then(words)
        runs = max(0, len(known.hashes) - WORDS + 1)
        yield _Grams(_run_hashes(known.hashes), known.starts[:runs], known.ends[WORDS - 1 :])
        last = known.take(slice(runs, None))


def _words(plain: bytes) -> Iterator[_Grams]:
    """All words, some from one block at a time."""
    letters = np.frombuffer(plain, dtype=np.uint8)
    start, end = 0, len(plain) - PADDING
    while start < end:
        stop = plain.find(b"\0", min(start + BLOCK, end))  # a block begins and ends between words
        within = letters[start : stop + 1] != 0
        edges = np.flatnonzero(within[1:] != within[:-1]) + (start + 1)
        starts, ends = edges[0::2], edges[1::2]
        yield _Grams(_word_hashes(plain, starts, ends), starts, ends)
        start = stop


def _word_hashes(plain: bytes, starts: Places, ends: Places) -> Hashes:
    """A word's hash is the sum of those of its eights of bytes, each mixed with its place in the word."""
    eights = np.ndarray((len(plain) - 7,), dtype="<u8", buffer=plain, strides=(1,))  # from every byte on
    sizes = ends - starts
    hashes = mixed(eights[starts] & _FIRST[np.minimum(sizes, 8)])
    long = np.flatnonzero(sizes > 8)
    if len(long):
        more = (sizes[long] - 1) // 8
        firsts = np.cumsum(more) - more
        place = np.arange(1, more.sum() + 1) - np.repeat(firsts, more)
        begin = np.repeat(starts[long], more) + 8 * place
        rest = eights[begin] & _FIRST[np.minimum(np.repeat(ends[long], more) - begin, 8)]
        hashes[long] += np.add.reduceat(mixed(rest + place.astype(np.uint64) * np.uint64(_ODD)), firsts)
    return hashes


def _run_hashes(words: Hashes) -> Hashes:
    """A hash of every 13 in a row, shape (max(0, n - 12),): a polynomial of their hashes by way of 2, 4, 8 and 12."""
    if len(words) < WORDS:
        return words[:0]

    def joined(some: Hashes, others: Hashes, power: int) -> Hashes:
        hashes = some * np.uint64(_ODD**power % 2**64)
        hashes += others
        return hashes

    two = joined(words[:-1], words[1:], 1)
    four = joined(two[:-2], two[2:], 2)
    eight = joined(four[:-4], four[4:], 4)
    twelve = joined(eight[:-4], four[8:], 4)
    return mixed(joined(twelve[:-1], words[12:], 1))


def _read(source: Source) -> tuple[BenchmarkFile, Hashes]:
    if source.kind != ".jsonl":
        raise DataError(f"{source.path}: expected benchmark items as JSON lines, one a line (.jsonl, also .gz or .zst)")
    items = read_objects(source)
    count, silent = 0, 0
    grams = np.empty(0, dtype=np.uint64)
    while batch := list(islice(items, ITEMS)):
        texts = [list(_texts(item)) for item in batch]
        joined = _joined([whole_characters(text)[1] for some in texts for text in some])
        item_of = np.repeat(np.arange(len(batch)), [len(some) for some in texts])
        heard = np.zeros(len(batch), dtype=np.bool_)
        for holders, found in map(joined.holders, _grams(joined)):
            heard[item_of[holders]] = True
            grams = np.concatenate([grams, found])
        grams = ascending(grams)
        count, silent = count + len(batch), silent + int((~heard).sum())
    if not count:
        raise DataError(f"{source.path}: no benchmark items; expected one JSON object a line")
    return BenchmarkFile(source.name, content_hash(source), count, silent, len(grams)), grams


def _texts(item: dict[str, Any]) -> Iterator[str]:
    rest: list[Any] = [item]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            rest.extend(value.values() if isinstance(value, dict) else value)
    context, endings = item.get("ctx"), item.get("endings")
    if isinstance(context, str) and isinstance(endings, list):
        yield from (f"{context} {ending}" for ending in endings if isinstance(ending, str))
