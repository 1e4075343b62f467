"""Long runs on real data: what the README promises of them. `make soak`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import shared_file

pytestmark = pytest.mark.soak


def quatrain(*words: str | Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "quatrain", *map(str, words), "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_shakespeare_reaches_what_the_field_reaches(tmp_path: Path) -> None:
    text = shared_file("tinyshakespeare.txt")
    quatrain("prepare", text, "--tokenizer", "char", "--val-tail", "0.1", "--out", tmp_path / "store")
    quatrain("train", "shakespeare", "--data", tmp_path / "store", "--out", tmp_path / "run")
    result = quatrain("evaluate", tmp_path / "run")
    assert result["tokens"] == 111_541
    assert result["loss"] <= 1.93


def test_books_are_learned_in_300_steps(tmp_path: Path) -> None:
    books = shared_file("gutenberg_100mb.jsonl.zst")
    quatrain("prepare", books, "--tokenizer", "gpt2", "--out", tmp_path / "store")
    shape = ["--model.n-layer", "4", "--model.n-head", "4", "--model.n-embd", "256", "--model.block-size", "256"]
    batch = ["--data.seq-len", "256", "--train.tokens-per-step", "4096", "--train.steps", "300"]
    rate = ["--optim.lr", "1e-3", "--optim.min-lr", "1e-4", "--optim.warmup", "30", "--train.eval-every", "300"]
    quatrain("train", "gpt2", "--data", tmp_path / "store", "--out", tmp_path / "run", *shape, *batch, *rate)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert abs(next(row["loss"] for row in rows if "loss" in row) - 10.8) <= 0.15
    assert quatrain("evaluate", tmp_path / "run")["loss"] < 6.6
    assert quatrain("sample", tmp_path / "run", "--prompt", "It was", "--max-tokens", "20")["samples"][0]["ids"]
