"""Rows of documents: what making the table costs, how full the rows are, and how fast they are read.

Documents of log-normal lengths (median 545 ids, a fifth above 1,024), so no corpus is needed; each size is a process
of its own, because memory is a peak. Reading is by shuffled rows of 1,024 in batches of 16, warm.

Run: python bench/packing.py [--documents 1000000 10000000]
"""

import argparse
import multiprocessing
import resource
import sys
import time

import numpy as np

from quatrain.tokens.config import DataConfig, Packing
from quatrain.tokens.loader import Loader
from quatrain.tokens.rows import row_table
from quatrain.tokens.store import TokenStream

T, BATCH, BATCHES = 1024, 16, 40
READ = 20_000_000  # ids that are read


class Unread(TokenStream):
    """Documents as far as an index tells."""

    def __len__(self) -> int:
        return self.length


def borders(count: int, median: int = 545) -> np.ndarray:
    """Where documents begin, and behind the last one."""
    lengths = np.random.default_rng(0).lognormal(np.log(median), 1.0, count).astype(np.int64)
    return np.concatenate([[0], np.cumsum(np.clip(lengths, 1, 100_000))])


def peak() -> float:
    """The most memory that this process had, in MiB."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def table(count: int) -> None:
    """Make both tables of so many documents."""
    places = borders(count)
    stream = Unread([], places[:-1].astype(np.uint64))
    stream.length = int(places[-1]) + 1
    before = peak()
    for packing in ("best_fit", "pad"):
        began = time.perf_counter()
        made = row_table(stream, T, packing)
        seconds = time.perf_counter() - began
        fewest = -(-made.targets // T)
        print(
            f"| {count:,} | {packing} | {seconds:.2f} s | {made.rows:,} | {made.rows / fewest:.5f} | "
            f"{made.padding / (made.rows * T):.2%} | {made.cut / count:.1%} | {peak() - before:,.0f} MiB |",
            flush=True,
        )


def reading(packing: Packing, median: int) -> None:
    """Read rows of a store in memory."""
    places = borders(READ // median, median)
    ids = np.random.default_rng(1).integers(0, 50_256, places[-1] + 1).astype(np.uint16)
    loader = Loader(TokenStream([ids], places[:-1].astype(np.uint64)), DataConfig(seq_len=T, packing=packing), 50_256)
    loader.batch(0, BATCH)
    began = time.perf_counter()
    targets = sum(loader.batch(first * BATCH, BATCH).valid for first in range(1, BATCHES + 1))
    print(f"| {packing} | {median} | {targets / (time.perf_counter() - began) / 1e6:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, nargs="+", default=[1_000_000, 10_000_000])
    counts = parser.parse_args().documents
    print("| documents | packing | table | rows | by the fewest possible | padding | documents cut | memory |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for count in counts:
        process = multiprocessing.get_context("spawn").Process(target=table, args=(count,))
        process.start()
        process.join()
    print("\n| packing | median document | million targets a second |\n|---|---|---|")
    for median in (545, 40):
        for packing in ("concat", "document", "pad", "best_fit"):
            reading(packing, median)


if __name__ == "__main__":
    main()
