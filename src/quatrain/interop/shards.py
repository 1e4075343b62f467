"""Shards of ids as other programs write them: which files they are, and where the ids lie in each.

A file says what it holds by its header (llm.c, modded-nanogpt, NumPy) or by an index beside it
(Megatron, datatrove); a headerless `.bin` (nanoGPT) says nothing, and is looked at. No file is
unpickled, and none is written.
"""

import fnmatch
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quatrain.errors import DataError
from quatrain.interop.megatron import read_index
from quatrain.tokens.store import SplitName

ENDINGS = (".bin", ".npy", ".ds")
COMPANIONS = (".idx", ".index", ".metadata", ".loss")  # read with their shard, or of no use here
OWN_FILES = ("store.json", "prepare.json")  # a folder with one of these is a token store

HEADER_BYTES = 1024  # of llm.c and modded-nanogpt: 256 int32: magic, version, ids, zeros
HEADERS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: (version, ids); llm.c's dev/data/data_common.py
OTHER_HEADERS = {20240522: "evaluation questions", 20240326: "a model", 20240328: "a tokenizer"}
LOOKED_AT = 1 << 20  # bytes of a headerless file
FEWEST_PAIRS = 16  # below this, tiny ids at every other place may be chance


@dataclass(frozen=True)
class PeerShard:
    """One file of ids; `ends` are its documents' ends in ids where an index beside it says them."""

    path: Path  # absolute
    format: str
    dtype: np.dtype[Any]  # unsigned, little-endian
    offset: int  # bytes
    tokens: int
    ends: npt.NDArray[np.int64] | None = None


def find_shards(folder: Path, pattern: str = "*") -> tuple[list[Path], list[Path]]:
    """The shards in a folder, searched whole, in the order of their numbers, and the files passed over.

    Hidden names and token stores are left out. `pattern` is compared with a file's name and with its
    path below the folder.
    """
    shards: list[Path] = []
    passed_over: list[Path] = []
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = [name for name in folders if not (name.startswith(".") or _is_store(here / name))]
        for name in names:
            path = here / name
            if name.startswith(".") or not matches(path, folder, pattern):
                continue
            if path.suffix in ENDINGS:
                shards.append(path)
            elif path.suffix not in COMPANIONS and name != "tokenizer.json":
                passed_over.append(path)
    return sorted(shards, key=lambda path: _by_number(path.relative_to(folder).as_posix())), sorted(passed_over)


def matches(path: Path, folder: Path, pattern: str) -> bool:
    """Whether a pattern names this file of a folder, by its name or by its path below the folder."""
    below = path.relative_to(folder).as_posix()
    return fnmatch.fnmatchcase(path.name, pattern) or fnmatch.fnmatchcase(below, pattern)


def split_of(path: Path, folder: Path) -> SplitName:
    """`val` where the file's name says val, valid or validation, else where a folder between does; else `train`.

    >>> split_of(Path("d/fineweb_val_000000.bin"), Path("d")), split_of(Path("d/val/x_train_1.bin"), Path("d"))
    ('val', 'train')
    """
    for part in reversed(path.relative_to(folder).with_suffix("").parts):
        words = re.findall(r"[a-z]+", part.lower())
        if "train" in words:
            return "train"
        if {"val", "valid", "validation"} & set(words):
            return "val"
    return "train"


def follows(first: Path, second: Path) -> bool:
    """Whether the second file's name is the first's with its last number one higher: text goes on across them.

    >>> follows(Path("a_000009.bin"), Path("a_000010.bin")), follows(Path("a_1.bin"), Path("a_3.bin"))
    (True, False)
    """
    one, other = (re.fullmatch(r"(.*?)(\d+)(\D*)", path.as_posix(), re.DOTALL) for path in (first, second))
    if one is None or other is None:
        return False
    return (one[1], one[3], int(one[2]) + 1) == (other[1], other[3], int(other[2]))


def read_shard(path: Path, dtype: str, vocab_size: int) -> PeerShard:
    """Where the ids lie in a file.

    `dtype` is what the user says of headerless files; empty: uint16 if the vocabulary fits into it.
    Raises `DataError`, with the file, for a header or an index that disagrees with the file's size, and
    for a headerless file that is evidently of another dtype.
    """
    path = Path(os.path.abspath(path))
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
        if head.startswith(b"version https://git-lfs"):
            raise DataError(f"{path}: a Git LFS pointer in place of the file; fetch it with: git lfs pull")
        if path.suffix == ".npy":
            return _npy(path, size)
        if path.suffix == ".ds":
            return _datatrove(path, size, dtype, vocab_size)
        if path.with_suffix(".idx").exists():
            return _megatron(path, size)
        magic = int.from_bytes(head[:4], "little")
        if len(head) == HEADER_BYTES and magic in HEADERS | OTHER_HEADERS:
            return _llmc(path, size, np.frombuffer(head, "<i4"))
        return _headerless(path, size, dtype, vocab_size)
    except OSError as error:
        raise DataError(f"{error.filename or path}: {error.strerror or error}") from error


def _is_store(folder: Path) -> bool:
    return any((folder / name).exists() for name in OWN_FILES)


def _by_number(name: str) -> list[str | int]:
    """A key that sorts shard_2 before shard_10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _llmc(path: Path, size: int, header: npt.NDArray[np.int32]) -> PeerShard:
    magic, version, tokens = header[:3].tolist()
    if magic not in HEADERS:
        raise DataError(f"{path}: {OTHER_HEADERS[magic]} of llm.c (magic {magic}), not ids; leave it out with --files")
    known, ids = HEADERS[magic]
    if version != known:
        raise DataError(f"{path}: version {version} of llm.c's shards with magic {magic}, expected {known}")
    dtype = np.dtype(ids)
    expected = HEADER_BYTES + tokens * dtype.itemsize
    if size != expected:
        raise DataError(
            f"{path}: its header says {tokens:,} ids of {dtype.name}, {expected:,} bytes with the header; "
            f"it has {size:,}: get the file again"
        )
    return PeerShard(path, "llm.c", dtype, HEADER_BYTES, tokens)


def _npy(path: Path, size: int) -> PeerShard:
    try:
        array = np.lib.format.open_memmap(path, mode="r")  # which reads no pickle
    except (ValueError, EOFError) as error:
        raise DataError(f"{path}: not a whole .npy file of ids ({error})") from error
    if not isinstance(array, np.memmap) or array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{path}: expected a 1-D array of whole numbers, this is {array.ndim}-D of {array.dtype}")
    if array.dtype.newbyteorder("<") != array.dtype:
        raise DataError(f"{path}: its ids are big-endian; save it again as little-endian {array.dtype.name}")
    offset, tokens = array.offset, len(array)
    if size != offset + array.nbytes:
        raise DataError(f"{path}: its header says {offset + array.nbytes:,} bytes, it has {size:,}: get the file again")
    # Signed ids are read as unsigned: the same bytes, and a negative one lies beyond every vocabulary.
    return PeerShard(path, ".npy", np.dtype(f"<u{array.dtype.itemsize}"), offset, tokens)


def _megatron(path: Path, size: int) -> PeerShard:
    index = read_index(path.with_suffix(".idx"))
    expected = index.tokens * index.dtype.itemsize
    if size != expected:
        raise DataError(
            f"{path}: {size:,} bytes, its .idx says {index.tokens:,} ids of {index.dtype.name} ({expected:,} bytes): "
            f"get both files again"
        )
    return PeerShard(path, "megatron", index.dtype, 0, index.tokens, index.ends)


def _datatrove(path: Path, size: int, dtype: str, vocab_size: int) -> PeerShard:
    index = path.with_name(path.name + ".index")
    if not index.exists():
        metadata = path.with_name(path.name + ".metadata")
        said = metadata.read_text("utf-8", "replace").split("\n")[0] if metadata.exists() else ""
        width = {"|2": "uint16", "|4": "uint32"}.get(said[-2:], "")
        shard = _headerless(path, size, dtype or width, vocab_size)
        return PeerShard(path, "datatrove", shard.dtype, 0, shard.tokens)
    if index.stat().st_size % 8:
        raise DataError(f"{index}: {index.stat().st_size:,} bytes, expected 8 for each document: get the file again")
    ends = np.fromfile(index, "<u8").astype(np.int64)
    tokens = int(ends[-1]) if len(ends) else 0
    if (np.diff(ends, prepend=0) < 0).any() or size not in (2 * tokens, 4 * tokens):
        raise DataError(
            f"{path}: {size:,} bytes, and {index.name} says {tokens:,} ids, of 2 or 4 bytes each: get both files again"
        )
    found = np.dtype("<u4" if tokens and size == 4 * tokens else "<u2")
    if dtype not in ("", found.name):
        raise DataError(f"{path}: its index says {found.name}, --dtype says {dtype}; leave --dtype out")
    return PeerShard(path, "datatrove", found, 0, tokens, ends)


def _headerless(path: Path, size: int, said: str, vocab_size: int) -> PeerShard:
    dtype = np.dtype(said or ("<u2" if vocab_size <= 1 << 16 else "<u4"))
    if size % dtype.itemsize:
        raise DataError(
            f"{path}: {size:,} bytes are no whole number of {dtype.name} ids ({dtype.itemsize} bytes each); "
            f"copied in part, or of another --dtype"
        )
    with path.open("rb") as file:
        ids = np.frombuffer(file.read(LOOKED_AT), dtype)
    even, odd = ids[: len(ids) // 2 * 2 : 2], ids[1::2]
    highest = (vocab_size - 1) >> 8 * dtype.itemsize  # upper half of an id that is twice as wide
    if len(odd) >= FEWEST_PAIRS and even.max() > highest and odd.max() <= highest:
        instead = "give --dtype uint32" if dtype.itemsize == 2 else "write them again as uint16 or uint32"
        raise DataError(
            f"{path}: read as {dtype.name}, every other id is at most {highest}: the ids are {2 * dtype.itemsize} "
            f"bytes wide; {instead}"
        )
    return PeerShard(path, "headerless", dtype, 0, size // dtype.itemsize)
