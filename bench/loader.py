"""How fast shuffled windows become int64 batches, from memory and from disk, and how long training waits for them.

Warm: B=16, T=1024 from 200 million uint16 ids in two shards, all of it in the system's cache. Beside `Loader.batch`
stand a plain loop over a memmap (torch.stack of astype), the feed, whose thread hands every batch over, and the floor:
the same bytes (2 read, 16 written a token) cast from one place in the processor's cache, with no choice of windows.
Cold: a store of which the cache is never allowed more than a small part: passes of a few thousand random windows, the
files dropped from the cache before each. Beside the feed, which advises the system ahead, stands a plain loop. (A hard
limit of the whole process needs a cgroup: systemd-run --user --scope -p MemoryMax=1G python bench/loader.py.)
Training: the share of the time of steps that was spent waiting, for the recipe `sonnets` and a GPT-2 of 124M.

Run: python bench/loader.py [warm] [cold] [training]   (about two minutes on two cores; 3 GB in the temporary folder)
"""

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from quatrain.model.config import ModelConfig
from quatrain.recipes.resolve import resolve
from quatrain.tokens.config import DataConfig, PrepareConfig
from quatrain.tokens.loader import Batch, Loader
from quatrain.tokens.store import TokenStore, TokenStream
from quatrain.tokens.writer import prepare
from quatrain.training.config import OptimConfig, TrainConfig
from quatrain.training.feed import Feed
from quatrain.training.loop import train
from quatrain.training.metrics import JsonLines

B, T = 16, 1024
WARM, COLD = 200_000_000, 1_250_000_000  # ids
SHARD = 100_000_000
ROWS_COLD = 8192  # of a pass: 3 % of the windows of the cold store
PASSES = 5
Pass = Callable[[int], Iterable[Batch | torch.Tensor]]  # from a first row to what is read


def write_shards(folder: Path, tokens: int) -> list[Path]:
    ids = np.random.default_rng(1).integers(0, 50257, SHARD, dtype=np.uint16)
    paths = []
    for number, first in enumerate(range(0, tokens, SHARD)):
        paths.append(folder / f"synthetic_train_{number:06d}.bin")
        with paths[-1].open("wb") as file:
            ids[: min(SHARD, tokens - first)].tofile(file)
            file.flush()
            os.fsync(file.fileno())  # what is not on the disk yet cannot be dropped from the cache
    return paths


def loader_of(paths: list[Path]) -> Loader:
    stream = TokenStream([np.memmap(path, dtype="<u2", mode="r") for path in paths])
    return Loader(stream, DataConfig(seq_len=T), eot=50256)


def plain(paths: list[Path], rows: int) -> Pass:
    """What a training script does by hand: random crops of a memmap, row by row."""
    shards = [np.memmap(path, dtype="<u2", mode="r") for path in paths]
    draw = np.random.default_rng(2)

    def run(first: int) -> Iterable[torch.Tensor]:
        for _ in range(0, rows, B):
            data = shards[draw.integers(len(shards))]
            starts = draw.integers(0, len(data) - T, B)
            yield torch.stack([torch.from_numpy(data[i : i + T].astype(np.int64)) for i in starts])
            yield torch.stack([torch.from_numpy(data[i + 1 : i + 1 + T].astype(np.int64)) for i in starts])

    return run


def batches(loader: Loader, rows: int) -> Pass:
    return lambda first: (loader.batch(row, B) for row in range(first, first + rows, B))


def fed(loader: Loader, rows: int) -> Pass:
    def run(first: int) -> Iterable[Batch]:
        with Feed(loader, range(first, first + rows, B), B) as feed:
            yield from feed

    return run


def floor(rows: int) -> Pass:
    def run(first: int) -> Iterable[torch.Tensor]:
        ids = np.zeros((B, T + 1), dtype=np.uint16)
        for _ in range(0, rows, B):
            yield torch.from_numpy(ids[:, :-1].astype(np.int64))
            yield torch.from_numpy(ids[:, 1:].astype(np.int64))

    return run


def most_resident() -> int:
    """The most MB of this process that were in memory since the last call, mapped files included; -1 if not told."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        return -1
    most = int(status.read_text().split("VmHWM:")[1].split()[0]) // 1024
    clear.write_text("5")  # proc(5): the peak begins anew
    return most


def from_disk() -> int:
    """Bytes that this process has had read from disks."""
    file = Path("/proc/self/io")
    return int(file.read_text().split("\nread_bytes:")[1].split()[0]) if file.exists() else 0


def drop(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(ways: dict[str, Callable[[], Pass]], rows: int, before: Callable[[], None] = lambda: None) -> None:
    """Interleaved passes; prints the median rate of each way, what it read from disk, and its most memory."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    read, memory = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0)
    for number in range(PASSES):
        for name, make in ways.items():
            before()
            most_resident()
            way, bytes_before, began = make(), from_disk(), time.perf_counter()
            for _ in way(number * rows):
                pass
            rates[name].append(rows * T / (time.perf_counter() - began))
            read[name] += from_disk() - bytes_before
            memory[name] = max(memory[name], most_resident())
            del way
            gc.collect()  # closes the maps before the next way is measured
    for name, found in rates.items():
        disk = read[name] / (PASSES * rows * T)
        rate = statistics.median(found) / 1e6
        print(
            f"  {name:24} {rate:9,.1f} million tokens/s   {disk:5.1f} bytes/token from disk   "
            f"at most {memory[name]:,} MB in memory"
        )


def warm(folder: Path) -> None:
    paths = write_shards(folder, WARM)
    for path in paths:
        path.read_bytes()
    rows = WARM // T // B * B
    print("warm: at least 300 million tokens/s are asked for")
    print(f"  {WARM:,} ids, {rows:,} windows a pass, B={B}, T={T}")
    ways = {
        "Loader.batch": lambda: batches(loader_of(paths), rows),
        "Feed (its thread)": lambda: fed(loader_of(paths), rows),
        "plain memmap loop": lambda: plain(paths, rows),
        "floor: bare casts": lambda: floor(rows),
    }
    measure(ways, rows)


def cold(folder: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        print("cold: this platform cannot drop files from its cache")
        return
    paths = write_shards(folder, COLD)
    share = ROWS_COLD * T / COLD
    print(f"cold: {COLD * 2 / 1e9:.1f} GB, {ROWS_COLD:,} windows a pass ({share:.1%}), the cache dropped before each")
    ways = {
        "Feed (advises ahead)": lambda: fed(loader_of(paths), ROWS_COLD),
        "Loader.batch": lambda: batches(loader_of(paths), ROWS_COLD),
        "plain memmap loop": lambda: plain(paths, ROWS_COLD),
    }
    measure(ways, ROWS_COLD, lambda: drop(paths))


def training(folder: Path) -> None:
    print("training: share of the steps' time spent waiting for data; less than 1 % is asked for")
    recipe, _ = resolve("sonnets")
    short = replace(recipe.train, steps=200, eval_every=0, save_every=0)
    waiting("sonnets", folder, "char", recipe.model, recipe.data, short)
    large = ModelConfig(n_layer=12, n_head=12, n_embd=768, block_size=256)
    few = TrainConfig(steps=6, tokens_per_step=1024, micro_batch=2, eval_every=0, save_every=0, samples=0)
    waiting("GPT-2 124M, 2 x 2 x 256", folder, "gpt2", large, DataConfig(seq_len=256), few)


def waiting(name: str, folder: Path, tokenizer: str, model: ModelConfig, data: DataConfig, config: TrainConfig) -> None:
    prepare(["corpus:sonnets"], folder / tokenizer, PrepareConfig(tokenizer=tokenizer))
    vocab_size = TokenStore(folder / tokenizer).vocab_size
    run, data = folder / f"run_{tokenizer}", replace(data, store=str(folder / tokenizer))
    done = train(replace(model, vocab_size=vocab_size), OptimConfig(), data, config, run, "", "cpu")
    rows = JsonLines(run / "metrics.jsonl").trained()
    most = max(row["data_wait"] for row in rows)
    seconds = done["seconds"] / done["step"]
    print(f"  {name:24} {done['data_wait']:7.2%} of {done['step']} steps of {seconds:.3f} s; most of one: {most:.2%}")


if __name__ == "__main__":
    for part in (warm, cold, training):
        if len(sys.argv) == 1 or part.__name__ in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as folder:
                part(Path(folder))
