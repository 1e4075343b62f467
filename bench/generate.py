"""Writing with a 124M model on a CPU: ours in fp32, bf16 and int8 against `generate` of `transformers`, same weights.

Prompts of 64 ids, 128 new ones, greedy, one and eight rows. Every contender is a process of its own; they take turns,
one generation each. Prints tokens a second (prompt included), the ratio to fp32 `transformers` of wall time and of CPU
time, and the share of the limit that memory sets: the bytes of the weights that each step must read, over the measured
speed of reading, over the time of a step. Then what smaller weights cost: the validation loss of a small model, trained
here, by the engine in each dtype.

Run: python bench/generate.py [--rounds 5] [--threads 2] [--rows 1,8] [--quality]
(data: tinyshakespeare from the shared data, else the eight sonnets; needs the development install)
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from quatrain.inference.batch import Batch, Writing
from quatrain.inference.config import SamplingConfig
from quatrain.inference.engine import Engine
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.pretrained import save_model
from quatrain.text.tokenizers import CharTokenizer, gpt2

SHARED = Path(os.environ.get("QUATRAIN_SHARED", "../shared/data"))
CONFIG = ModelConfig(vocab_size=50257)
PROMPT, NEW = 64, 128
SIZES = {"fp32": 4, "bf16": 2, "int8": 1}  # bytes of a weight
PEER = "transformers fp32"
NAMES = [PEER, "transformers bf16", "quatrain fp32", "quatrain bf16", "quatrain int8"]
ASKED = {"quatrain fp32": (1.0, 1.0), "quatrain bf16": (1.8, None), "quatrain int8": (3.5, 3.0)}  # at 1 and 8 rows

Run = Callable[[], list[list[int]]]  # the new ids of each row


def prompts_of(rows: int) -> list[list[int]]:
    """The same in every process; no eot among them."""
    ids = np.random.default_rng(1).integers(0, CONFIG.vocab_size - 1, size=(rows, PROMPT))
    return [[int(token) for token in row] for row in ids]


def our_model() -> GPT:
    """The same weights in every process."""
    return GPT(CONFIG, torch.Generator().manual_seed(0)).eval()


def ours(dtype: str, rows: int) -> Run:
    """What `generate` does, with a prompt for each row."""
    engine, tokenizer = Engine(our_model(), rows, dtype), gpt2()
    config = SamplingConfig(max_tokens=NEW, temperature=0.0)

    def run() -> list[list[int]]:
        batch = Batch(engine)
        writings = [Writing(tokenizer, prompt, config, number, NEW) for number, prompt in enumerate(prompts_of(rows))]
        for writing in writings:
            batch.add(writing)
        while batch.busy:
            batch.step()
        return [writing.end().ids for writing in writings]

    return run


def theirs(dtype: str, rows: int) -> Run:
    """`generate` with its cache and sdpa attention."""
    from transformers import GPT2LMHeadModel

    with tempfile.TemporaryDirectory() as folder:
        save_model(our_model(), gpt2(), Path(folder))
        network = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32).eval()
    network = network.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    ids = torch.tensor(prompts_of(rows))
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": CONFIG.vocab_size - 1}

    def run() -> list[list[int]]:
        with torch.inference_mode():
            found = network.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return found[:, PROMPT:].tolist()

    return run


def work(name: str, rows: int, threads: int, pipe: Connection) -> None:
    """Generate whenever asked: wall and CPU seconds, and the ids."""
    torch.set_num_threads(threads)
    side, dtype = name.split()
    run = (ours if side == "quatrain" else theirs)(dtype, rows)
    while pipe.recv():
        wall, cpu = time.perf_counter(), time.process_time()
        ids = run()
        pipe.send((time.perf_counter() - wall, time.process_time() - cpu, ids))


class Contender:
    """A process that generates when it is its turn."""

    def __init__(self, name: str, rows: int, threads: int) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(name, rows, threads, other), daemon=True)
        self.process.start()
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.ids: list[list[int]] = []

    def turn(self, counts: bool) -> None:
        """One generation; the first one warms up."""
        self.pipe.send(True)
        wall, cpu, self.ids = self.pipe.recv()
        if counts:
            self.wall.append(wall)
            self.cpu.append(cpu)

    def end(self) -> None:
        """Let it go."""
        self.pipe.send(False)
        self.process.join()


def reading_speed(threads: int) -> float:
    """Bytes a second of reading memory that no cache holds, the best of several."""
    torch.set_num_threads(threads)
    numbers = torch.ones(1 << 27)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - start)
    return numbers.nbytes / min(seconds)


def compare(rows: int, rounds: int, threads: int) -> list[dict[str, object]]:
    """A table of one batch size."""
    contenders = [Contender(name, rows, threads) for name in NAMES]
    for number in range(rounds + 1):
        for contender in contenders:
            contender.turn(counts=number > 0)
    speed = reading_speed(threads)
    for contender in contenders:
        contender.end()
    peer = contenders[0]
    read_a_step = sum(weight.numel() for name, weight in our_model().named_parameters() if "wpe" not in name)
    print(f"\n124M, {rows} row(s), {threads} thread(s), {PROMPT} -> {NEW} ids; memory reads {speed / 1e9:.1f} GB/s")
    print(f"{'':20}{'tokens/s':>10}{'ratio':>8}{'of CPU':>8}{'asked':>7}{'of the limit':>14}{'same ids':>10}")
    table = []
    for one in contenders:
        asked = ASKED.get(one.name, (None, None))[rows > 1]
        row: dict[str, object] = {
            "name": one.name,
            "rows": rows,
            "threads": threads,
            "tokens_per_second": rows * NEW / statistics.median(one.wall),
            "ratio": statistics.median(b / a for a, b in zip(one.wall, peer.wall, strict=True)),
            "cpu_ratio": statistics.median(b / a for a, b in zip(one.cpu, peer.cpu, strict=True)),
            "limit": NEW * read_a_step * SIZES[one.name.split()[1]] / speed / statistics.median(one.wall),
        }
        same = sum(a == b for x, y in zip(one.ids, peer.ids, strict=True) for a, b in zip(x, y, strict=True))
        table.append(row)
        print(
            f"{one.name:20}{row['tokens_per_second']:10.1f}{row['ratio']:8.2f}{row['cpu_ratio']:8.2f}{asked or '':>7}"
            f"{row['limit']:13.0%} {same / rows / NEW:9.0%}",
            flush=True,
        )
    return table


def trained(ids: torch.Tensor, vocab_size: int, steps: int) -> GPT:
    """A character model after some minutes."""
    config = ModelConfig(n_layer=4, n_head=4, n_embd=256, block_size=128, vocab_size=vocab_size)
    model = GPT(config, torch.Generator().manual_seed(0)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    for step in range(steps):
        starts = np.random.default_rng(step).integers(0, len(ids) - 129, size=16)
        windows = torch.stack([ids[start : start + 129] for start in starts])
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(windows[:, :-1]).float().flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def quality(steps: int, windows: int) -> dict[str, float]:
    """Validation loss by the engine, of each dtype."""
    path = SHARED / "tinyshakespeare.txt"
    sonnets = resources.files("quatrain.text") / "sonnets.txt"
    text = path.read_text(encoding="utf-8") if path.is_file() else sonnets.read_text(encoding="utf-8")
    tokenizer = CharTokenizer(text)
    ids = torch.from_numpy(np.array(tokenizer.encode(text), dtype=np.int64))
    train, val = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
    model = trained(train, tokenizer.vocab_size, steps)
    rows = val[: len(val) // 129 * 129].view(-1, 129)[:windows].tolist()
    losses = {}
    for dtype in SIZES:
        engine, nats = Engine(model, 1, dtype), []
        for row in rows:
            nats.append(float(F.cross_entropy(engine.read(0, row[:-1]), torch.tensor(row[1:]))))
            engine.free(0)
        losses[dtype] = statistics.fmean(nats)
    print(f"\nvalidation loss of a trained model, {len(rows) * 128:,} targets, {steps} steps")
    for dtype, loss in losses.items():
        print(f"{dtype:6}{loss:10.5f}{loss - losses['fp32']:+11.6f}", flush=True)
    return losses


def main() -> None:
    """Parse, measure, print; --json FILE keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--steps", type=int, default=1000, help="of training the model whose loss is compared")
    parser.add_argument("--windows", type=int, default=400, help="of 128 targets, for the validation loss")
    parser.add_argument("--quality", action="store_true", help="the validation losses alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = []
    if not options.quality:
        for rows in map(int, options.rows.split(",")):
            table += compare(rows, options.rounds, options.threads)
    losses = quality(options.steps, options.windows)
    if options.json:
        options.json.write_text(json.dumps({"speed": table, "loss": losses}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
