"""Text to token shards, end to end: `quatrain prepare` against what a user would otherwise run, to the same ids.

The peers: (a) a plain `multiprocessing.Pool(n).imap(tokenize, documents, chunksize)` with tiktoken, one encoder a
worker, to uint16 shards, n = half of the cores and all of them, at the best of three chunk sizes; (b)
`tiktoken.encode_ordinary_batch` with as many threads as cores. Every run is a process of its own, start-up included;
the ways take turns, and medians are compared. Prints MB/s, ratios, peak memory and three ceilings. Ours runs twice:
with every default, and without looking for near-duplicates of validation, as the peers do not.

Run: python bench/prepare.py [--rounds 3] [--megabytes 100] [--chunksizes 16 64 256]   (data: the shared Gutenberg books
and FineWeb rows; above 110 MB their lines are mixed into new documents, so that all stay distinct and no two are
near-duplicates)
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken
import zstandard

from quatrain.text.tokenizers import gpt2

SHARED = Path(os.environ.get("QUATRAIN_SHARED", "../shared/data"))
CORES = os.cpu_count() or 2
HALF = max(1, CORES // 2)
PLAIN, DEFAULT = "quatrain prepare --no-cross-dedup", "quatrain prepare"
SHARD = 100_000_000
EOT = 50256

_encoder: tiktoken.Encoding | None = None


def make_corpus(path: Path, megabytes: float) -> float:
    """Distinct documents of a few kilobytes, as web text has them, in a parquet file; returns its MB of text."""
    texts, seen, size = [], set(), 0.0
    for text in documents_of_shared():
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            texts.append(text)
            size += len(text.encode()) / 1e6
        if size >= megabytes:
            break
    pq.write_table(pa.table({"text": texts}), path, row_group_size=1000)
    return size


def documents_of_shared() -> Iterator[str]:
    yield from pq.read_table(SHARED / "fineweb.parquet", columns=["text"])["text"].to_pylist()
    with zstandard.open(SHARED / "gutenberg_100mb.jsonl.zst", "rt", encoding="utf-8") as file:
        books = [json.loads(line)["text"] for line in file]
    for book in books:
        yield from (
            book[start : start + 3000] for start in range(0, len(book), 3000) if book[start : start + 3000].strip()
        )
    lines = [line for book in books for line in book.split("\n") if len(line) > 40]
    draw = random.Random(0)
    while True:
        yield "\n".join(draw.choices(lines, k=45))


def documents(path: Path) -> Iterator[str]:
    for batch in pq.ParquetFile(path).iter_batches(batch_size=1000, columns=["text"]):
        yield from batch.column(0).to_pylist()


def start_worker() -> None:
    global _encoder
    _encoder = gpt2()._encoding


def tokenize(text: str) -> np.ndarray:
    assert _encoder is not None
    return np.array([EOT, *_encoder.encode_ordinary(text)], dtype=np.uint16)


class Shards:
    """The tutorials' way to write shards of uint16."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.buffer = np.empty(SHARD, dtype=np.uint16)
        self.filled = self.count = self.total = 0
        self.sha256 = hashlib.sha256()

    def add(self, ids: np.ndarray) -> None:
        while len(ids):
            part = ids[: SHARD - self.filled]
            self.buffer[self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            self.total += len(part)
            ids = ids[len(part) :]
            if self.filled == SHARD:
                self.flush()

    def flush(self) -> None:
        self.buffer[: self.filled].tofile(self.folder / f"shard_{self.count:06d}.bin")
        self.count += 1
        self.filled = 0


def pool(path: Path, out: Path, workers: int, chunksize: int) -> None:
    shards = Shards(out)
    with multiprocessing.Pool(workers, start_worker) as processes:
        for ids in processes.imap(tokenize, documents(path), chunksize=chunksize):
            shards.add(ids)
    shards.flush()


def batch(path: Path, out: Path, threads: int) -> None:
    shards = Shards(out)
    encoder = gpt2()._encoding
    for part in pq.ParquetFile(path).iter_batches(batch_size=1000, columns=["text"]):
        for ids in encoder.encode_ordinary_batch(part.column(0).to_pylist(), num_threads=threads):
            shards.add(np.array([EOT, *ids], dtype=np.uint16))
    shards.flush()


LAUNCHER = """
import json, os, resource, subprocess, sys, time
started = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(json.dumps([time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3]))
"""


def run(words: list[str]) -> tuple[float, float]:
    """Seconds of a process, and the peak MB of the largest among it and its children."""
    os.sync()  # or it pays for what an earlier one has written
    # From a small process, for a child's peak begins with its parent's memory.
    done = subprocess.run([sys.executable, "-c", LAUNCHER, *words], check=True, stdout=subprocess.PIPE)
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


def documents_in(folder: Path) -> list[bytes]:
    """A hash of the ids of every document, sorted: equal if and only if the same documents have the same ids."""
    hashes = []
    for split in ("train", "val") if (folder / "store.json").exists() else ("",):
        shards = sorted(folder.glob(f"*_{split}_*.bin" if split else "*.bin"))
        ids = np.concatenate([np.fromfile(path, dtype=np.uint16) for path in shards])
        borders = [*np.flatnonzero(ids == EOT).tolist(), len(ids)]
        parts = (ids[start + 1 : end].tobytes() for start, end in pairwise(borders))
        hashes += [hashlib.blake2b(part, digest_size=16).digest() for part in parts if part]
    return sorted(hashes)


def ceilings(path: Path, megabytes: float) -> None:
    started = time.perf_counter()
    for part in pq.ParquetFile(path).iter_batches(columns=["text"]):
        part.column(0)
    print(f"{'ceiling: parquet decode':<40}{megabytes / (time.perf_counter() - started):8.0f} MB/s")
    data = np.random.default_rng(0).bytes(100_000_000)
    with tempfile.TemporaryFile() as file:
        started = time.perf_counter()
        file.write(data)
        os.fsync(file.fileno())
        # A MB of English text is about half a MB of uint16 ids.
        print(f"{'ceiling: disk write (of ids, as text)':<40}{2 * 100 / (time.perf_counter() - started):8.0f} MB/s")
    started = time.perf_counter()
    np.frombuffer(data, dtype=np.uint64).sum()
    print(f"{'ceiling: memory scan':<40}{100 / (time.perf_counter() - started):8.0f} MB/s")


def ways_over(corpus: Path, chunksizes: list[int]) -> dict[str, list[str]]:
    """The command of every way, up to the folder it writes into."""
    ours = [sys.executable, "-m", "quatrain", "prepare", str(corpus)]
    ways = {PLAIN: [*ours, "--no-cross-dedup", "--out"], DEFAULT: [*ours, "--out"]}
    me = [sys.executable, __file__, "--peer"]
    for workers in sorted({HALF, CORES}):
        for chunksize in chunksizes:
            ways[f"Pool({workers}).imap, chunksize {chunksize}"] = [
                *me,
                "pool",
                str(corpus),
                str(workers),
                str(chunksize),
            ]
    return ways | {f"encode_ordinary_batch, {CORES} threads": [*me, "batch", str(corpus), str(CORES)]}


def compare(rounds: int, wanted: float, chunksizes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.parquet"
        megabytes = make_corpus(corpus, wanted)
        ways = ways_over(corpus, chunksizes)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        memory: dict[str, float] = {}
        found: dict[str, list[bytes]] = {}
        for number in range(rounds):
            # Every other round backwards: the first way finds memory that nothing has touched for a while.
            for place, (name, words) in list(enumerate(ways.items()))[:: 1 - 2 * (number % 2)]:
                out = Path(folder) / f"out_{place}"
                if name not in (PLAIN, DEFAULT):
                    out.mkdir()
                took, memory[name] = run([*words, str(out)])
                seconds[name].append(took)
                if number == 0:
                    found[name] = documents_in(out)
                shutil.rmtree(out)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        print(f"{megabytes:.0f} MB of text in {corpus.name}, {CORES} cores, median of {rounds}")
        for name, median in medians.items():
            print(f"{name:<40}{median:8.2f} s{megabytes / median:8.1f} MB/s{memory[name]:8.0f} MB peak")
        ceilings(corpus, megabytes)
        for ours in (PLAIN, DEFAULT):
            for workers in sorted({HALF, CORES}):
                best = min(median for name, median in medians.items() if name.startswith(f"Pool({workers})"))
                print(f"{ours}: {best / medians[ours]:.2f}x the best Pool({workers})")
        left_out = found.pop(DEFAULT)
        assert len({tuple(hashes) for hashes in found.values()}) == 1, "the ids differ"
        assert set(left_out) <= set(found[PLAIN])
        print(f"identical ids in {len(found[PLAIN]):,} documents; {len(found[PLAIN]) - len(left_out)} near validation")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--chunksizes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--peer", nargs="+")
    arguments = parser.parse_args()
    if arguments.peer:
        kind, source, *rest = arguments.peer
        *numbers, target = rest
        {"pool": pool, "batch": batch}[kind](Path(source), Path(target), *map(int, numbers))
    elif (SHARED / "gutenberg_100mb.jsonl.zst").is_file():
        compare(arguments.rounds, arguments.megabytes, arguments.chunksizes)
    else:
        print(f"bench/prepare.py: no shared data in {SHARED}")
