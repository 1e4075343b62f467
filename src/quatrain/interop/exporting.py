"""A token store written as shards that other programs read: llm.c, build-nanogpt's .npy, Megatron.

Files are written front to back under temporary names, and `export.json` last: it says whose the folder
is and what every file holds.
"""

import hashlib
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quatrain.errors import DataError, UsageError
from quatrain.files import replace_file, writing
from quatrain.interop.config import ShardFormat, ShardsConfig
from quatrain.interop.megatron import index_bytes
from quatrain.interop.scan import SECONDS_BETWEEN_LINES, Report
from quatrain.interop.shards import HEADER_BYTES, HEADERS
from quatrain.tokens.pieces import IntArray
from quatrain.tokens.shards import HashedFile
from quatrain.tokens.store import SplitName, TokenStore, TokenStream

MARK = "export.json"
CHUNK = 1 << 22  # ids written at once
ORDER: tuple[SplitName, ...] = ("val", "train")  # val is shard 000000, as build-nanogpt and llm.c have it
LLMC_MAGIC = 20240520
ENDING = {"llmc": "bin", "npy": "npy"}
LARGEST_VOCABULARY = {"llmc": 1 << 16, "npy": 1 << 16, "megatron": 1 << 31}
OTHER_WAY = {
    "llmc": "give --to megatron, which holds 32-bit ids",
    "npy": "give --to megatron, which holds 32-bit ids",
    "megatron": "no format here holds them",
}


def export_store(
    store: TokenStore, out: Path, config: ShardsConfig, report: Report = lambda line: None
) -> dict[str, Any]:
    """Write both splits of a store into `out` and return what `export --json` prints.

    The same store and options again leave a finished `out` as it is. Raises `UsageError` for a vocabulary
    that the format cannot hold and for a folder that is not ours, `QuatrainError` when it cannot be written.
    """
    started = time.monotonic()
    if store.vocab_size > LARGEST_VOCABULARY[config.to]:
        raise UsageError(
            f"{store.folder}: its vocabulary has {store.vocab_size:,} ids, --to {config.to} holds "
            f"{LARGEST_VOCABULARY[config.to]:,}; {OTHER_WAY[config.to]}"
        )
    name = config.name or store.facts["splits"]["train"]["idx"]["file"].removesuffix("_train.idx")
    writer = _Writer(store, out, config, name, report)
    if writer.finished():
        report(f"{out} already holds this export")
    else:
        writer.run()
    return writer.summary() | {"seconds": round(time.monotonic() - started, 3)}


class _Writer:
    """One export into one folder."""

    def __init__(self, store: TokenStore, out: Path, config: ShardsConfig, name: str, report: Report) -> None:
        self.store = store
        self.out = out
        self.config = config
        self.name = name
        self.report = report
        self.files: dict[str, str] = {}  # name: sha256
        self.done = 0  # ids
        self.last_said = time.monotonic()
        options = [store.fingerprint, config.to, config.shard_size if config.to != "megatron" else 0, name]
        self.request = hashlib.sha256(json.dumps(options).encode()).hexdigest()

    def finished(self) -> bool:
        """Whether the folder holds this export whole; raises `DataError` where it holds anything that is not ours."""
        if self.out.exists() and not self.out.is_dir():
            raise DataError(f"{self.out}: a file; --out must be a folder that is absent, empty or our own")
        present = sorted(path.name for path in self.out.iterdir()) if self.out.exists() else []
        if not present or present == [MARK + ".tmp"]:
            return False
        try:
            mark = json.loads((self.out / MARK).read_bytes())
            request, files = mark["request"], mark["files"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.out / present[0]}: --out must be absent, empty or our own; this file is not ours, nothing was "
                f"touched"
            ) from error
        if request != self.request:
            raise DataError(f"{self.out}: holds an export of another store or options; choose another --out")
        missing = [file for file in files or [] if not (self.out / file).is_file()]
        if missing:
            raise DataError(
                f"{self.out / missing[0]}: missing, and {MARK} names it; remove the folder and export again"
            )
        self.files = files or {}
        return bool(files)

    def run(self) -> None:
        """Write the shards of both splits and the tokenizer, then the mark that says so."""
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        self._mark({})
        number = 0
        for split in ORDER:
            stream = self.store.split(split)
            if self.config.to == "megatron":
                self._megatron(split, stream)
            else:
                number = self._shards(split, stream, number)
        tokenizer = (self.store.folder / "tokenizer.json").read_bytes()
        replace_file(self.out / "tokenizer.json", tokenizer)
        self.files["tokenizer.json"] = hashlib.sha256(tokenizer).hexdigest()
        self._mark(self.files)

    def summary(self) -> dict[str, Any]:
        """What the folder holds."""
        splits = self.store.facts["splits"]
        return {
            "format": self.config.to,
            "files": sorted(self.files),
            "documents": sum(splits[split]["documents"] for split in ORDER),
            "train_tokens": len(self.store.train),
            "val_tokens": len(self.store.val),
            "fingerprint": self.store.fingerprint,
        }

    def _mark(self, files: dict[str, str]) -> None:
        """`files` empty: unfinished."""
        content = {"version": 1, "request": self.request, "fingerprint": self.store.fingerprint, "files": files}
        replace_file(self.out / MARK, (json.dumps(content, indent=1) + "\n").encode())

    def _shards(self, split: SplitName, stream: TokenStream, number: int) -> int:
        """Shards of a split, numbered on from `number`; the number that comes next."""
        size = self.config.shard_size
        length = _length(stream, size, self.store.eot)
        for start in range(0, length, size):
            stop = min(length, start + size)
            file = f"{self.name}_{split}_{number:06d}.{ENDING[self.config.to]}"
            self._write(file, _header(self.config.to, stop - start), self._ids(stream, start, stop, np.dtype("<u2")))
            number += 1
        if length % size:
            self.report(f"{split}: its last shard is partial, {length % size:,} ids of {size:,}")
        return number

    def _megatron(self, split: SplitName, stream: TokenStream) -> None:
        """One .bin and .idx: a document is its text and the eot behind it, so the stream's first eot is left out."""
        dtype = np.dtype("<u2" if self.store.vocab_size <= 1 << 16 else "<i4")
        starts = self.store.document_starts(split).astype(np.int64)
        lengths = np.diff(starts, append=len(stream) - 1)
        self._write(f"{self.name}_{split}.bin", b"", self._ids(stream, 1, len(stream), dtype))
        self._write(f"{self.name}_{split}.idx", index_bytes(lengths, dtype), iter(()))

    def _ids(self, stream: TokenStream, start: int, stop: int, dtype: np.dtype[Any]) -> Iterator[bytes]:
        for place in range(start, stop, CHUNK):
            ids = stream.read(place, min(stop, place + CHUNK))
            self._check_vocabulary(ids)
            yield ids.astype(dtype).tobytes()
            self._say_how_far(len(ids))

    def _write(self, name: str, header: bytes, chunks: Iterator[bytes]) -> None:
        with HashedFile(self.out / name) as file:
            file.write(header)
            for chunk in chunks:
                file.write(chunk)
            file.finish()
        self.files[name] = file.sha256.hexdigest()

    def _check_vocabulary(self, ids: IntArray) -> None:
        """A damaged shard could hold an id that the format's dtype would wrap."""
        if int(ids.max()) >= self.store.vocab_size:
            raise DataError(
                f"{self.store.folder}: holds id {ids.max():,}, beyond its vocabulary of {self.store.vocab_size:,}; "
                f"find the damaged file with: quatrain inspect {self.store.folder} --verify"
            )

    def _say_how_far(self, count: int) -> None:
        self.done += count
        if time.monotonic() - self.last_said > SECONDS_BETWEEN_LINES:
            self.last_said = time.monotonic()
            self.report(f"{self.done:,} of {len(self.store.train) + len(self.store.val):,} ids written")


def _length(stream: TokenStream, size: int, eot: int) -> int:
    """The ids to write: all, but for a closing eot that would be a shard of its own.

    No peer could train on that shard, and `adopt` supplies the eot again. Behind a document without ids it
    stays, or that document would be lost.
    """
    alone = size > 1 and len(stream) % size == 1 and int(stream[-2]) != eot
    return len(stream) - 1 if alone else len(stream)


def _header(to: ShardFormat, tokens: int) -> bytes:
    if to == "llmc":
        header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
        header[:3] = LLMC_MAGIC, HEADERS[LLMC_MAGIC][0], tokens
        return header.tobytes()
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (tokens,)})
    return file.getvalue()
