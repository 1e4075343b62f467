"""End-to-end tokenization: `prepare` against the tutorials' process pool, over the same documents.

The peer is a multiprocessing.Pool(n).imap(tokenize, documents, chunksize) with one tiktoken encoder a worker,
writing uint16 shards of eot + ids, n = half of the cores. Interleaved; prints medians, MB/s and the ratio.
Run: python bench/prepare.py [FILE.jsonl.zst] (default: the shared Gutenberg books).
"""

import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tiktoken
import zstandard

from quatrain.text.tokenizers import gpt2
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.store import TokenStore
from quatrain.tokens.writer import prepare

ROUNDS = 3
CHUNKSIZES = (1, 16, 64)
DEFAULT = Path(os.environ.get("QUATRAIN_SHARED", "../shared/data")) / "gutenberg_100mb.jsonl.zst"

_encoder: tiktoken.Encoding = gpt2()._encoding  # inherited by forked workers, as the tutorials do it


def tokenize(text: str) -> np.ndarray:
    return np.array([50256, *_encoder.encode_ordinary(text)], dtype=np.uint16)


def peer(source: Path, out: Path, workers: int, chunksize: int) -> int:
    """The tutorials' way; returns the ids written."""
    with zstandard.open(source, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    total = 0
    with multiprocessing.Pool(workers) as pool, (out / "shard.bin").open("wb") as file:
        for ids in pool.imap(tokenize, texts, chunksize=chunksize):
            file.write(ids.tobytes())
            total += len(ids)
    return total


def ours(source: Path, out: Path, workers: int) -> int:
    shutil.rmtree(out)
    prepare([str(source)], out, PrepareConfig(workers=workers))
    store = TokenStore(out)
    return len(store.train) + len(store.val)


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT
    if not source.is_file():
        print(f"bench/prepare.py: no {source}; name a .jsonl.zst file")
        return
    with zstandard.open(source, "rb") as file:
        megabytes = sum(len(chunk) for chunk in iter(lambda: file.read(1 << 20), b"")) / 1e6
    workers = max(1, (os.cpu_count() or 2) // 2)
    ways = {"quatrain prepare": lambda out: ours(source, out, workers)}
    for chunksize in CHUNKSIZES:
        ways[f"Pool({workers}).imap, chunksize {chunksize}"] = lambda out, size=chunksize: peer(
            source, out, workers, size
        )
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    counts = {}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                started = time.perf_counter()
                counts[name] = way(Path(folder))
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    best_peer = min(median for name, median in medians.items() if name.startswith("Pool"))
    print(f"{megabytes:.0f} MB of {source.name}, {workers} worker(s), median of {ROUNDS}")
    for name, median in medians.items():
        print(f"{name:<32}{median:8.2f} s{megabytes / median:8.1f} MB/s{counts[name]:>14,} ids")
    print(f"ratio to the best peer: {best_peer / medians['quatrain prepare']:.2f}x")
    assert len({count - (2 if name.startswith("quatrain") else 0) for name, count in counts.items()}) == 1, counts


if __name__ == "__main__":
    main()
