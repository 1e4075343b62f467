"""HellaSwag: predicted labels against a straight loop over examples, and the throughput of both.

The loop is that of build-nanogpt: four rows an example, padded to the longest, logits at every position. It runs over
both texts, raw and lm-eval's, with the two normalisers of each. Labels are compared on all questions with a small
model over bytes; throughput on a few, with the shape of GPT-2 124M. Times are of one thread's CPU time, interleaved.

Run: OMP_NUM_THREADS=1 python bench/eval.py [hellaswag_val.jsonl.gz] [--items N] [--timed N]
"""

import argparse
import os
import re
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from quatrain.inference.endings import answer
from quatrain.inference.forward import Forward
from quatrain.inference.items import Row, question_of
from quatrain.inference.tasks import TASKS, named_task, predicted
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.text.tokenizers import ByteTokenizer, Tokenizer, gpt2

Labels = list[tuple[int, int]]


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


def network(vocab_size: int, **shape: int) -> GPT:
    model = GPT(ModelConfig(vocab_size=vocab_size, block_size=1024, **shape), torch.Generator().manual_seed(1)).eval()
    with torch.no_grad():  # further from uniform than a fresh network is
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    shared = Path(os.environ.get("QUATRAIN_SHARED", "../shared/data"))
    parser.add_argument("file", type=Path, nargs="?", default=shared / "hellaswag_val.jsonl.gz")
    parser.add_argument("--items", type=int, default=0)
    parser.add_argument("--timed", type=int, default=24)
    asked = parser.parse_args()
    given = named_task("hellaswag", asked.file, asked.items)
    small = network(257, n_layer=1, n_head=2, n_embd=32)
    print("| text | questions | labels that differ, first normaliser | second | share right | |")
    print("|---|---|---|---|---|---|")
    gold = [int(row["label"]) for row in given.rows]
    for way in ("raw", "lm_eval"):
        loop, own = (run(small, given.rows, ByteTokenizer(), way) for run in (straight, ours))
        differ = [sum(a[n] != b[n] for a, b in zip(loop, own, strict=True)) for n in (0, 1)]
        right = [sum(a[n] == b for a, b in zip(own, gold, strict=True)) / len(gold) for n in (0, 1)]
        print(f"| {way} | {len(gold):,} | {differ[0]} | {differ[1]} | {right[0]:.4f} | {right[1]:.4f} |", flush=True)
    large = network(50257, n_layer=12, n_head=12, n_embd=768)
    rows = given.rows[:: max(1, len(given.rows) // asked.timed)]  # of all lengths
    straight(large, rows[:1], gpt2(), "raw")
    spent = {"straight": 0.0, "ours": 0.0}
    for way in ("raw", "lm_eval"):
        for name, run in (("straight", straight), ("ours", ours)):
            began = time.process_time()
            run(large, rows, gpt2(), way)
            spent[name] += time.process_time() - began
    rates = {name: 2 * len(rows) / seconds for name, seconds in spent.items()}
    print(
        f"\n124M, fp32, {len(rows)} questions, both texts: straight {rates['straight']:.3f} questions/s, ours "
        f"{rates['ours']:.3f}: {rates['ours'] / rates['straight']:.2f}x"
    )


if __name__ == "__main__":
    main()
