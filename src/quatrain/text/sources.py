"""Where documents come from: .txt, .jsonl and .parquet files, plain or .gz/.zst, streams of the Hub, the sonnets."""

import glob
import hashlib
import io
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from quatrain.errors import DataError, did_you_mean
from quatrain.text.hub import pin
from quatrain.text.hub_address import HubAddress, parse

KINDS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".zst")
BUILT_IN = {"corpus:sonnets": "sonnets.txt"}


@dataclass(frozen=True)
class Source:
    """One input file (or built-in corpus, or stream) and how to read it."""

    path: Path
    kind: str  # ".txt", ".jsonl", ".parquet", "poems" for a built-in corpus, or "hub"
    compression: str  # "", ".gz" or ".zst"
    address: HubAddress | None = None  # of a stream; its revision is a commit

    @property
    def name(self) -> str:
        """The file's base name, the only part of its path that a store keeps; U+FFFD for bytes that are not UTF-8."""
        if self.address:
            files = os.path.basename(self.address.data_files) if self.address.local else self.address.data_files
            return str(replace(self.address, revision="", data_files=files))
        return os.fsencode(self.path.name).decode("utf-8", errors="replace")

    @property
    def stem(self) -> str:
        """The base name without the endings that say how to read it."""
        if self.address:
            return self.address.stem
        kind = ".txt" if self.kind == "poems" else self.kind
        return self.name[: len(self.name) - len(kind) - len(self.compression)]

    @property
    def size(self) -> int:
        """Bytes on disk; 0 for a stream."""
        return 0 if self.address else self.stat().st_size

    @property
    def looks(self) -> list[int | str]:
        """What changes when the content does, and costs nothing to know: size and time, or the revision."""
        if self.address:
            return [self.address.revision]
        found = self.stat()
        return [found.st_size, found.st_mtime_ns]

    def stat(self) -> os.stat_result:
        """What the system says of the file. Raises `DataError`."""
        try:
            return self.path.stat()
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}; expected a file that can be read") from error

    def place(self, number: int, short: bool = False) -> str:
        """Where row `number`, counted from 1, stands: `file.jsonl:17`, with the file's base name alone if short."""
        file = self.name if short else str(self.path)
        if self.address:
            return f"{self.name}, row {number}"
        if self.kind == "poems":
            return f"{self.name}, poem {number}"
        return file + {".txt": "", ".jsonl": f":{number}", ".parquet": f", row {number}"}[self.kind]


def find_sources(
    words: list[str], twice: bool = False, pinned: Mapping[str, str] | None = None
) -> tuple[list[Source], list[Path]]:
    """Files that the words name, in order, and the files of unknown kind found in folders.

    A word is a file, a folder (searched whole, sorted), a glob (sorted), `corpus:sonnets`, or `hub:OWNER/NAME?...`,
    whose revision is looked up unless `pinned` knows it by the source's name.
    An existing path wins over a glob. A named file of unknown kind, a word that matches
    nothing, a file named twice (unless `twice`) and a corpus without any file raise `DataError`.
    """
    found: list[Source] = []
    passed_over: list[Path] = []
    for word in words:
        if word.startswith("hub:"):
            found.append(_stream(word, pinned or {}))
        elif word.startswith("corpus:"):
            found.append(_built_in(word))
        elif os.path.isdir(word):
            for path in _files_below(Path(word)):
                source = _recognise(path)
                if source is None:
                    passed_over.append(path)
                else:
                    found.append(source)
        else:
            found.extend(_named(path) for path in _matches(word))
    if not twice:
        _check_named_once(found)
    if not found:
        raise DataError(f"no document files in {', '.join(words)}; expected {', '.join(KINDS)}, each also .gz or .zst")
    return found, passed_over


def _stream(word: str, pinned: Mapping[str, str]) -> Source:
    address = parse(word)
    known = "" if address.revision else pinned.get(str(address), "")
    address = replace(address, revision=known) if known else pin(address)
    return Source(Path(word), "hub", "", address)


def _check_named_once(sources: list[Source]) -> None:
    seen: dict[object, Path] = {}
    for source in sources:
        found = None if source.address else source.stat()
        first = seen.setdefault((found.st_dev, found.st_ino) if found else source.address, source.path)
        if first is not source.path:
            raise DataError(
                f"{source.path} is the same file as {first}; name it once, or allow it with --allow-duplicates"
            )


def _built_in(word: str) -> Source:
    if word not in BUILT_IN:
        raise DataError(f"no built-in corpus '{word}'{did_you_mean(word, BUILT_IN)}; there is {', '.join(BUILT_IN)}")
    return Source(Path(str(resources.files("quatrain.text") / BUILT_IN[word])), "poems", "")


def _files_below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}; expected a folder that can be read") from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent) / name for name in sorted(names) if not name.startswith("."))


def _matches(word: str) -> list[Path]:
    if os.path.exists(word):
        return [Path(word)]
    matched = [Path(name) for name in sorted(glob.glob(word, recursive=True)) if os.path.isfile(name)]
    if not matched:
        raise DataError(f"{word}: no such file or folder, and no file matches it as a pattern")
    return matched


def _named(path: Path) -> Source:
    source = _recognise(path)
    if source is None:
        raise DataError(f"{path}: unknown kind of file; expected {', '.join(KINDS)}, each also .gz or .zst")
    return source


def _recognise(path: Path) -> Source | None:
    name = path.name.lower()
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    name = name.removesuffix(compression)
    kind = next((ending for ending in KINDS if name.endswith(ending)), "")
    if kind and path.exists() and not path.is_file():  # it may have no end, and it is read more than once
        raise DataError(f"{path}: a pipe or a device; expected a file (write what comes from there into one)")
    return Source(path, kind, compression) if kind else None


def content_hash(source: Source, stop: threading.Event | None = None) -> str:
    """sha256 of the file as it lies on disk (of a stream: of its address and revision); cut short by `stop`."""
    digest = hashlib.sha256()
    if source.address:
        digest.update(str(source.address).encode())  # with its revision
        return digest.hexdigest()
    piece = bytearray(1 << 20)
    with opened(source.path) as file:
        while (size := file.readinto(piece)) and not (stop and stop.is_set()):
            digest.update(memoryview(piece)[:size])
    return digest.hexdigest()


def opened(path: Path) -> io.BufferedReader:
    """The file for reading. Raises `DataError`."""
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a file that can be read") from error
