"""What the order of documents does to a run that reads a store from front to back: sorted by domain, and shuffled.

Four domains (books, web pages, plays, short descriptions), 400 kB of each, one after the other; the same documents with
`prepare --shuffle`. The same small model is trained on both with `data.order = "sequential"` for four epochs. Prints
the oscillation of the loss after the first: the standard deviation of what is left when the mean over one epoch around
it is taken off.

Run: python bench/order.py   (two to five minutes on two cores; data: the shared books, web rows, plays, HellaSwag)
"""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import zstandard

SHARED = Path(os.environ.get("QUATRAIN_SHARED", "../shared/data"))
DOMAIN = 400_000  # characters
STEPS_AN_EPOCH, EPOCHS = 195, 4
TRAINING = {
    "--model.n-layer": "2",
    "--model.n-head": "2",
    "--model.n-embd": "64",
    "--model.block-size": "128",
    "--data.seq-len": "128",
    "--data.order": "sequential",
    "--train.tokens-per-step": "8192",
    "--train.micro-batch": "64",
    "--train.steps": str(STEPS_AN_EPOCH * EPOCHS),
    "--train.eval-every": "15",
    "--train.eval-tokens": "16384",
    "--train.save-every": "1000",
    "--optim.lr": "2e-3",
    "--optim.min-lr": "2e-4",
    "--optim.warmup": "20",
}


def domains() -> Iterator[Iterator[str]]:
    with zstandard.open(SHARED / "gutenberg_100mb.jsonl.zst", "rt", encoding="utf-8") as lines:
        book = json.loads(next(iter(lines)))["text"] + json.loads(next(iter(lines)))["text"]
    yield (book[start : start + 1500] for start in range(0, len(book), 1500))
    yield iter(pq.read_table(SHARED / "fineweb.parquet", columns=["text"])["text"].to_pylist())
    plays = (SHARED / "tinyshakespeare.txt").read_text(encoding="utf-8")
    yield (plays[start : start + 1500] for start in range(0, len(plays), 1500))
    with gzip.open(SHARED / "hellaswag_val.jsonl.gz", "rt", encoding="utf-8") as lines:
        items = [json.loads(line) for line in lines]
    yield (f"{item['activity_label']}: {item['ctx']} {item['endings'][int(item['label'])]}" for item in items)


def write_corpus(path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for documents in domains():
            size = 0
            for text in documents:
                if size < DOMAIN:
                    file.write(json.dumps({"text": text}) + "\n")
                    size += len(text)


def quatrain(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "quatrain", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def curves(corpus: Path, folder: Path, *options: str) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation losses of a run over the corpus in the order that the options give it."""
    quatrain("prepare", corpus, "--tokenizer", "bytes", "--val-fraction", "0.02", "--out", folder / "store", *options)
    settings = [word for pair in TRAINING.items() for word in pair]
    quatrain("train", "shakespeare", "--data", folder / "store", "--out", folder / "run", *settings)
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return tuple(np.array([row[key] for row in rows if key in row]) for key in ("loss", "val_loss"))


def oscillation(losses: np.ndarray, epoch: int) -> float:
    """Standard deviation around the moving mean over one epoch, half an epoch at each end left out."""
    losses = losses[epoch:]  # at first it falls too steeply for a mean to follow
    trend = np.convolve(losses, np.ones(epoch) / epoch, mode="valid")
    rest = losses[epoch // 2 :][: len(trend)] - trend
    return float(rest.std())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "domains.jsonl"
        write_corpus(corpus)
        found = {}
        for name, options in {"sorted": [], "shuffled": ["--shuffle", "1"]}.items():
            train, val = curves(corpus, Path(folder) / name, *options)
            found[name] = oscillation(train, STEPS_AN_EPOCH)
            around = oscillation(val, STEPS_AN_EPOCH // 15)
            print(
                f"{name:<10} oscillation of training loss {found[name]:.4f}, of validation loss {around:.4f} nats; ",
                end="",
            )
            print(f"last validation {val[-1]:.4f}")
        print(f"ratio of training oscillation: {found['sorted'] / found['shuffled']:.1f}x")


if __name__ == "__main__":
    if (SHARED / "gutenberg_100mb.jsonl.zst").is_file():
        main()
    else:
        print(f"bench/order.py: no shared data in {SHARED}")
