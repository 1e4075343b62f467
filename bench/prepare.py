"""Text to token shards, end to end: `quatrain prepare` against what a user would otherwise run, to the same ids.

The peers: (a) a plain `multiprocessing.Pool(n).imap(tokenize, documents, chunksize)` with tiktoken, one encoder a
worker, to uint16 shards, n = half of the cores and all of them, at the best of three chunk sizes; (b)
`tiktoken.encode_ordinary_batch` with as many threads as cores. Every run is a process of its own, start-up included;
the ways take turns, and medians are compared. Prints MB/s, ratios, peak memory and three ceilings.

Run: python bench/prepare.py [--rounds 3] [--megabytes 100]   (data: the shared Gutenberg books and FineWeb rows)
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken
import zstandard

from quatrain.text.tokenizers import gpt2

SHARED = Path(os.environ.get("QUATRAIN_SHARED", "../shared/data"))
CORES = os.cpu_count() or 2
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
    with zstandard.open(SHARED / "gutenberg_100mb.jsonl.zst", "rt", encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            for start in range(0, len(text), 3000):
                if text[start : start + 3000].strip():
                    yield text[start : start + 3000]


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


def run(words: list[str]) -> tuple[float, float]:
    """Seconds and peak MB of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    started = time.perf_counter()
    subprocess.run(words, check=True, capture_output=True)
    return time.perf_counter() - started, max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 1e3


def ids_in(folder: Path) -> int:
    """Ids of documents and their eots, without the closing eot that only a store has."""
    shards = sum(path.stat().st_size // 2 for path in folder.glob("*.bin"))
    return shards - 2 * (folder / "store.json").exists()


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


def compare(rounds: int, wanted: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.parquet"
        megabytes = make_corpus(corpus, wanted)
        half = max(1, CORES // 2)
        me = [sys.executable, __file__]
        ways = {"quatrain prepare": [sys.executable, "-m", "quatrain", "prepare", str(corpus), "--out"]}
        for workers in sorted({half, CORES}):
            for chunksize in (16, 64, 256):
                name = f"Pool({workers}).imap, chunksize {chunksize}"
                ways[name] = [*me, "--peer", "pool", str(corpus), str(workers), str(chunksize)]
        ways[f"encode_ordinary_batch, {CORES} threads"] = [*me, "--peer", "batch", str(corpus), str(CORES)]
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        memory: dict[str, float] = {}
        counts = {}
        for number in range(rounds):
            for name, words in ways.items():
                out = Path(folder) / f"{number}-{len(memory)}-{name.replace(' ', '-')}"
                if name != "quatrain prepare":
                    out.mkdir()
                took, peak = run([*words, str(out)])
                seconds[name].append(took)
                memory.setdefault(name, peak)
                counts[name] = ids_in(out)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        print(f"{megabytes:.0f} MB of text in {corpus.name}, {CORES} cores, median of {rounds}")
        for name, median in medians.items():
            print(f"{name:<40}{median:8.2f} s{megabytes / median:8.1f} MB/s{counts[name]:>14,} ids")
        ceilings(corpus, megabytes)
        for workers in sorted({half, CORES}):
            best = min(median for name, median in medians.items() if name.startswith(f"Pool({workers})"))
            print(f"ratio to the best Pool({workers}): {best / medians['quatrain prepare']:.2f}x")
        assert len(set(counts.values())) == 1, counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--peer", nargs="+")
    arguments = parser.parse_args()
    if arguments.peer:
        kind, source, *rest = arguments.peer
        *numbers, target = rest
        {"pool": pool, "batch": batch}[kind](Path(source), Path(target), *map(int, numbers))
    elif (SHARED / "gutenberg_100mb.jsonl.zst").is_file():
        compare(arguments.rounds, arguments.megabytes)
    else:
        print(f"bench/prepare.py: no shared data in {SHARED}")
