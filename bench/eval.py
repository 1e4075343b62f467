"""HellaSwag: predicted labels against a straight loop over examples, and the throughput of both.

The loop is that of build-nanogpt: four rows an example, padded to the longest, logits at every position, cross entropy
of all of them. It runs over both texts, raw and lm-eval's, with the two normalisers of each. Labels are compared on all
questions with a small model over bytes. Throughput, on a few, is that of the shape of GPT-2 124M in fp32: questions a
second of one thread's CPU time, in turns, the packing of weights counted. Beside the loop stand ours with torch's own
matrix products, which shows what each half of the way brings, and lm-eval's Hugging Face backend.

Run: OMP_NUM_THREADS=1 python bench/eval.py [hellaswag_val.jsonl.gz] [--items N] [--timed N]
"""

import argparse
import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from quatrain.inference import products
from quatrain.inference.endings import answer
from quatrain.inference.forward import Forward
from quatrain.inference.items import Row, question_of
from quatrain.inference.tasks import TASKS, named_task, predicted
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.pretrained import save_model
from quatrain.text.tokenizers import ByteTokenizer, Tokenizer, gpt2

WAYS = ("raw", "lm_eval")
Labels = list[tuple[int, int]]
Scorer = Callable[[GPT, list[Row], Tokenizer, str], Labels]
AT_ONCE = 24  # questions of a turn


def preprocess(text: str) -> str:
    text = text.strip().replace(" [title]", ". ")
    return re.sub("\\[.*?\\]", "", text).replace("  ", " ")


def rendered(row: Row, tokenizer: Tokenizer, way: str) -> tuple[list[int], list[list[int]], list[float]]:
    """Ids of context and endings, and what the second normaliser divides by."""
    if way == "raw":
        endings = [tokenizer.encode(" " + ending).tolist() for ending in row["endings"]]
        return tokenizer.encode(row["ctx"]).tolist(), endings, [float(len(ending)) for ending in endings]
    query = preprocess(row["activity_label"] + ": " + row["ctx_a"] + " " + row["ctx_b"].capitalize())
    choices = [preprocess(ending) for ending in row["endings"]]
    spaces = query[len(query.rstrip()) :]
    context = tokenizer.encode(query.rstrip()).tolist()
    whole = [tokenizer.encode(query.rstrip() + spaces + " " + choice).tolist() for choice in choices]
    return context, [ids[len(context) :] for ids in whole], [float(len(choice)) for choice in choices]


@torch.no_grad()
def straight(model: GPT, rows: list[Row], tokenizer: Tokenizer, way: str) -> Labels:
    """One example after another."""
    found = []
    for row in rows:
        context, endings, sizes = rendered(row, tokenizer, way)
        length = max(len(context) + len(ending) for ending in endings)
        ids, mask = torch.zeros(4, length, dtype=torch.long), torch.zeros(4, length)
        for place, ending in enumerate(endings):
            ids[place, : len(context) + len(ending)] = torch.tensor(context + ending)
            mask[place, len(context) : len(context) + len(ending)] = 1
        logits = model(ids[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(4, -1)
        sums = (losses * mask[:, 1:]).double().sum(dim=1).numpy()
        with np.errstate(divide="ignore"):
            found.append((int(np.argmin(sums)), int(np.argmax(-sums / np.array(sizes)))))
    return found


def ours(model: GPT, rows: list[Row], tokenizer: Tokenizer, way: str) -> Labels:
    chosen = next(one for one in TASKS["hellaswag"].ways if one.name == way)
    items = [chosen.item(row) for row in rows]
    questions = [question_of(item, tokenizer, chosen.joined) for item in items]
    second = "mean" if way == "raw" else "acc_norm"
    answers = answer(Forward(model), questions)
    asked = zip(items, questions, answers, strict=True)
    return [(predicted(*each, "sum"), predicted(*each, second)) for each in asked]


def with_torchs_products(model: GPT, rows: list[Row], tokenizer: Tokenizer, way: str) -> Labels:
    """Ours, weights as they lie."""
    fastest = products.fastest
    products.fastest = lambda dtype, device: products.Plain
    try:
        return ours(model, rows, tokenizer, way)
    finally:
        products.fastest = fastest


def harness(model: GPT, folder: Path) -> Scorer:
    """The requests of lm-eval to its own backend."""
    from lm_eval.models.huggingface import HFLM

    save_model(model, gpt2(), folder)
    backend = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4)

    def run(model: GPT, rows: list[Row], tokenizer: Tokenizer, way: str) -> Labels:
        asked = [rendered(row, tokenizer, way) for row in rows]
        requests = [(("", ""), context, ending) for context, endings, _ in asked for ending in endings]
        likelihoods = [found for found, _ in backend._loglikelihood_tokens(requests, disable_tqdm=True)]
        sums = np.array(likelihoods).reshape(-1, 4)
        sizes = np.array([sizes for *_, sizes in asked])
        with np.errstate(divide="ignore"):
            scaled = sums / sizes
        return list(zip(sums.argmax(axis=1).tolist(), scaled.argmax(axis=1).tolist(), strict=True))

    return run


def network(vocab_size: int, **shape: int) -> GPT:
    model = GPT(ModelConfig(vocab_size=vocab_size, block_size=1024, **shape), torch.Generator().manual_seed(1)).eval()
    with torch.no_grad():  # further from uniform than a fresh network is
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def compare_labels(rows: list[Row]) -> None:
    small = network(257, n_layer=1, n_head=2, n_embd=32)
    print("| text | questions | labels that differ, first normaliser | second | share right | |")
    print("|---|---|---|---|---|---|")
    gold = [int(row["label"]) for row in rows]
    for way in WAYS:
        loop, own = (run(small, rows, ByteTokenizer(), way) for run in (straight, ours))
        differ = [sum(a[n] != b[n] for a, b in zip(loop, own, strict=True)) for n in (0, 1)]
        right = [sum(a[n] == b for a, b in zip(own, gold, strict=True)) / len(gold) for n in (0, 1)]
        print(f"| {way} | {len(gold):,} | {differ[0]} | {differ[1]} | {right[0]:.4f} | {right[1]:.4f} |", flush=True)


def compare_speed(rows: list[Row], folder: Path) -> None:
    model = network(50257, n_layer=12, n_head=12, n_embd=768)
    runs: dict[str, Scorer] = {"straight loop": straight, "ours": ours, "ours, torch's products": with_torchs_products}
    with contextlib.suppress(ImportError):
        runs["lm-eval's hf backend"] = harness(model, folder)
    spent, labels = dict.fromkeys(runs, 0.0), {name: [] for name in runs}
    straight(model, rows[:1], gpt2(), "raw")
    for way in WAYS:
        for first in range(0, len(rows), AT_ONCE):
            for name, run in runs.items():
                began = time.process_time()
                labels[name] += run(model, rows[first : first + AT_ONCE], gpt2(), way)
                spent[name] += time.process_time() - began
    print(f"\n| 124M, fp32, {len(rows)} questions, both texts | questions/s | | labels that differ from the loop's |")
    print("|---|---|---|---|")
    for name, seconds in spent.items():
        differ = sum(a != b for a, b in zip(labels[name], labels["straight loop"], strict=True))
        ratio = spent["straight loop"] / seconds
        print(f"| {name} | {2 * len(rows) / seconds:.2f} | {ratio:.2f}x | {differ} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    shared = Path(os.environ.get("QUATRAIN_SHARED", "../shared/data"))
    parser.add_argument("file", type=Path, nargs="?", default=shared / "hellaswag_val.jsonl.gz")
    parser.add_argument("--items", type=int, default=0, help="questions whose labels are compared; 0: all")
    parser.add_argument("--timed", type=int, default=48, help="questions that are timed")
    asked = parser.parse_args()
    rows = named_task("hellaswag", asked.file, asked.items).rows
    compare_labels(rows)
    with tempfile.TemporaryDirectory() as folder:
        compare_speed(rows[:: max(1, len(rows) // asked.timed)][: asked.timed], Path(folder))  # of all lengths


if __name__ == "__main__":
    main()
