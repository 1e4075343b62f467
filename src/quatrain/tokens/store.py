"""A token store on disk, and each of its splits as one virtual stream over its shards.

`docs/formats.md` describes the files. Opening maps them into memory and checks their sizes; it reads no ids.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError
from quatrain.text.tokenizer_json import EOT_TEXT
from quatrain.text.tokenizers import Tokenizer, load_tokenizer
from quatrain.tokens.pieces import AGAIN, IntArray, source_of

VERSION = 1
HASHED_AT_ONCE = 1 << 20  # bytes
SplitName = Literal["train", "val"]
SPLITS: tuple[SplitName, ...] = ("train", "val")


class TokenStream:
    """Consecutive ids over one or more 1-D integer arrays, as if they were one.

    A window may cross any border between the pieces. Nothing is copied until it is read. `starts` are the
    positions of the eots that begin documents, ascending, where they are known; `name` is what errors say.
    """

    def __init__(
        self,
        pieces: Sequence[IntArray],
        starts: npt.NDArray[np.uint64] | None = None,
        name: str = "this stream",
        also: Sequence[np.dtype[Any]] = (),
    ) -> None:
        """Of the narrowest dtype that holds those of the pieces, and `also` these."""
        self.pieces = list(pieces) or [np.empty(0, dtype=np.uint16)]
        self.starts = starts
        self.name = name
        self.ends = np.cumsum([len(piece) for piece in self.pieces], dtype=np.int64)  # position after each piece
        self._begins = self.ends - [len(piece) for piece in self.pieces]
        self.dtype = np.result_type(*self.pieces, *also)
        if self.dtype.kind not in "iu":  # int64 beside uint64 would become floats, and large ids others
            raise TypeError(
                f"ids are integers, these pieces are {', '.join(str(piece.dtype) for piece in self.pieces)}"
            )
        self._sources = [source_of(piece, self.dtype) for piece in self.pieces]

    def __len__(self) -> int:
        return int(self.ends[-1])

    @overload
    def __getitem__(self, where: int) -> int: ...
    @overload
    def __getitem__(self, where: slice) -> IntArray: ...
    def __getitem__(self, where: int | slice) -> int | IntArray:
        if not isinstance(where, slice):
            position = where + len(self) if where < 0 else where
            return int(self.read(position, position + 1)[0])
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise IndexError(f"a stream is read in steps of 1, not {step}")
        return self.read(start, max(start, stop))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> IntArray:
        ids = self.read(0, len(self))
        asked = ids.astype(dtype or self.dtype, copy=False)
        if asked is not ids and (asked != ids).any():  # numpy would wrap 70,000 to 4,464 without a word
            raise OverflowError(f"the stream holds ids up to {ids.max():,}, which {asked.dtype} cannot hold")
        return asked

    def read(self, start: int, stop: int) -> IntArray:
        """A copy of the ids at positions start .. stop-1, which must exist."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"ids {start}..{stop} of a stream of {len(self)}")
        return self._read(start, stop)

    def _read(self, start: int, stop: int) -> IntArray:
        ids = np.empty(stop - start, dtype=self.dtype)
        piece = int(np.searchsorted(self.ends, start, side="right"))
        filled = 0
        while filled < len(ids):
            begin = start + filled - int(self._begins[piece])
            count = min(len(ids) - filled, len(self.pieces[piece]) - begin)
            ids[filled : filled + count] = np.frombuffer(self._sources[piece].read(begin, count), dtype=self.dtype)
            filled += count
            piece += 1
        return ids

    def gather(self, starts: npt.NDArray[np.int64], length: int, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
        """Rows of consecutive ids, shape (len(starts), length); raises `IndexError` for ids beyond the stream."""
        if not len(starts) or not length:
            return np.empty((len(starts), length), dtype=dtype)
        if starts.min() < 0 or starts.max() + length > len(self):
            raise IndexError(f"rows of {length} ids at {starts.min()}..{starts.max()} of a stream of {len(self)}")
        rows = bytearray().join(
            self._sources[piece].read(begin, length) if whole else self._read(start, start + length).tobytes()
            for start, (piece, begin, whole) in zip(starts.tolist(), self._places(starts, length), strict=True)
        )
        return np.frombuffer(rows, dtype=self.dtype).reshape(len(starts), length).astype(dtype, copy=False)

    def advise(self, starts: npt.NDArray[np.int64], length: int) -> None:
        """Have the system read ahead, where it can, what `gather` will be asked for; returns at once."""
        for piece, begin, _ in self._places(starts, length):
            self._sources[piece].advise(begin, length)

    def _places(self, starts: npt.NDArray[np.int64], length: int) -> Iterable[tuple[int, int, bool]]:
        """Of each row the piece in which it begins, where in it, and whether that piece holds all of the row."""
        pieces = np.minimum(np.searchsorted(self.ends, starts, side="right"), len(self.ends) - 1)
        begins = starts - self._begins[pieces]
        whole = starts + length <= self.ends[pieces]
        return zip(pieces.tolist(), begins.tolist(), whole.tolist(), strict=True)


class SeparatedStream(TokenStream):
    """A stream whose pieces hold whole documents without any eot: one is read before each.

    `starts` are the positions of these eots in the stream, ascending. A read costs two binary
    searches in them, however many there are.
    """

    starts: npt.NDArray[np.uint64]

    def __init__(
        self, pieces: Sequence[IntArray], starts: npt.NDArray[np.uint64], eot: int, name: str = "this stream"
    ) -> None:
        super().__init__(pieces, starts, name, [np.min_scalar_type(eot)])
        self.eot = eot

    def __len__(self) -> int:
        return super().__len__() + len(self.starts)

    def _read(self, start: int, stop: int) -> IntArray:
        # Searched for as uint64: for an int64 numpy would first convert all starts to floats.
        first, after = np.searchsorted(self.starts, np.array([start, stop], dtype=np.uint64)).tolist()
        eots = self.starts[first:after].astype(np.int64) - start
        from_files = np.ones(stop - start, dtype=np.bool_)
        from_files[eots] = False
        ids = np.full(stop - start, self.eot, dtype=self.dtype)
        ids[from_files] = super()._read(start - first, stop - after)
        return ids

    def _places(self, starts: npt.NDArray[np.int64], length: int) -> Iterable[tuple[int, int, bool]]:
        before = self._eots_before(starts)
        inside = self._eots_before(starts + length) - before
        for (piece, begin, whole), eots in zip(super()._places(starts - before, length), inside.tolist(), strict=True):
            yield piece, begin, whole and not eots

    def _eots_before(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.searchsorted(self.starts, positions.astype(np.uint64))


class TokenStore:
    """A finished store: `store.train` and `store.val` are `TokenStream`s."""

    def __init__(self, folder: Path | str) -> None:
        """Open a store. Raises `DataError` if it is unfinished, of another version, or a file's size is wrong."""
        self.folder = Path(folder)
        self.facts = _read_facts(self.folder)
        try:
            self.fingerprint: str = self.facts["fingerprint"]
            self.vocab_size: int = self.facts["tokenizer"]["vocab_size"]
            self.eot: int = self.facts["tokenizer"]["eot"]
            self.train, self.val = (self.split(name) for name in SPLITS)  # mapped, not read: sizes are seen here
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{self.folder}/store.json: not a store's description ({error!r}); {AGAIN}") from error

    def sizes(self) -> dict[str, int]:
        """Documents and ids of both splits, as the commands that write stores print them."""
        splits = self.facts["splits"]
        train, val = (splits[name]["tokens"] for name in SPLITS)
        documents = sum(splits[name]["documents"] for name in SPLITS)
        return {"documents": documents, "tokens": train + val, "train_tokens": train, "val_tokens": val}

    def split(self, name: SplitName) -> TokenStream:
        """One split as a stream of ids, with the starts of its documents unless no file and no index tells them."""
        facts = self.facts["splits"][name]
        pieces = [self._map(shard) for shard in facts["shards"]]
        starts, told = self.document_starts(name), f"{self.folder} ({name})"
        if facts.get("eot_by_index"):
            return SeparatedStream(pieces, starts, self.eot, told)
        known = self.facts.get("eot_style") != "none"  # adopted ids without any eot count as one document
        return TokenStream(pieces, starts if known else None, told)

    def document_starts(self, name: SplitName) -> npt.NDArray[np.uint64]:
        """Position of the eot that begins each document of a split, in order."""
        facts = self.facts["splits"][name]
        path = self.folder / facts["idx"]["file"]
        starts = _map_file(path, np.dtype("<u8"), 0, facts["documents"])
        return starts.astype(np.uint64, copy=False)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The store's tokenizer, checked against its hash."""
        path = self.folder / "tokenizer.json"
        facts = self.facts["tokenizer"]
        tokenizer = load_tokenizer(path, facts.get("eot_text", EOT_TEXT))
        if tokenizer.sha256 != facts["sha256"]:
            raise DataError(f"{path}: sha256 is {tokenizer.sha256}, store.json says {facts['sha256']}; {AGAIN}")
        return tokenizer

    def damaged(self, advance: Callable[[int], None] = lambda size: None) -> Iterator[str]:
        """Read everything and yield a sentence for each file whose hash is not the one written down.

        `advance` is told the bytes that were read, as they are.
        """
        for part in self._files():
            path = self.folder / part["file"]
            try:
                found = _hash(path, part.get("offset", 0), advance)
            except OSError as error:
                yield f"{path}: {error.strerror}"
                continue
            if found != part["sha256"]:
                yield f"{path}: sha256 is {found}, store.json says {part['sha256']}"

    def hashed_sizes(self) -> list[int]:
        """Bytes that `damaged` reads of each file; 0 for one that is missing."""
        parts = [(self.folder / part["file"], part.get("offset", 0)) for part in self._files()]
        return [path.stat().st_size - offset if path.exists() else 0 for path, offset in parts]

    def _files(self) -> list[dict[str, Any]]:
        splits = [self.facts["splits"][name] for name in SPLITS]
        parts = [part for split in splits for part in [*split["shards"], split["idx"]]]
        return [*parts, {"file": "tokenizer.json", "sha256": self.facts["tokenizer"]["sha256"]}]

    def _map(self, shard: dict[str, Any]) -> IntArray:
        path = self.folder / shard["file"]  # an absolute file name stays as it is
        return _map_file(path, np.dtype(shard["dtype"]).newbyteorder("<"), shard["offset"], shard["tokens"])


def _hash(path: Path, offset: int, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(offset)
        while block := file.read(HASHED_AT_ONCE):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def _map_file(path: Path, dtype: np.dtype[Any], offset: int, count: int) -> IntArray:
    expected = offset + count * dtype.itemsize
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; store.json names this file: {AGAIN}") from error
    if found != expected:
        raise DataError(f"{path}: {found:,} bytes, store.json says {expected:,}; {AGAIN}")
    if count == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))


def _read_facts(folder: Path) -> dict[str, Any]:
    path = folder / "store.json"
    if not path.is_file():
        progress = folder / "prepare.json"
        if progress.is_file():
            raise DataError(
                f"{folder}: an unfinished preparation; give its {_command_of(progress)} command again to finish it"
            )
        raise DataError(f"{folder}: {_what_instead(folder)}")
    try:
        facts: dict[str, Any] = json.loads(path.read_bytes())
        version = facts["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a store's description ({error!r}); {AGAIN}") from error
    if version != VERSION:
        raise DataError(f"{path}: version {version} of the format, this quatrain reads version {VERSION}")
    return facts


def _command_of(progress: Path) -> str:
    """The command that was writing an unfinished store."""
    try:
        return str(json.loads(progress.read_bytes())["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return "prepare"


def _what_instead(folder: Path) -> str:
    """What stands where a token store was expected, and what to do about it."""
    if not folder.exists():
        return f"no such folder; make a token store with: quatrain prepare SOURCE --out {folder}"
    if folder.is_file():
        return f"a file, not a token store; make one with: quatrain prepare {folder} --out stores/{folder.stem}"
    if (folder / "recipe.toml").is_file() or (folder / "config.json").is_file():
        return "a run or checkpoint, not a token store (no store.json); give the folder that prepare wrote"
    return "no token store here (no store.json); give the folder that prepare wrote"


def tokenizer_facts(tokenizer: Tokenizer) -> dict[str, Any]:
    """What store.json says of a tokenizer."""
    return {
        "name": tokenizer.name,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "eot_text": tokenizer.eot_text,
    }


def fingerprint(tokenizer: dict[str, Any], splits: dict[str, Any]) -> str:
    """sha256 of what decides a store's ids: never of paths, times, workers or the names of shards."""
    content = [tokenizer["sha256"], tokenizer["eot"]]
    for name in SPLITS:
        shards = [[shard["tokens"], shard["sha256"]] for shard in splits[name]["shards"]]
        content.append([shards, splits[name]["idx"]["sha256"]])
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
