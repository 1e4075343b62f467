"""One training step on a CPU: ours against a plain loop over `transformers` GPT2LMHeadModel, same weights and batches.

The peers: fp32 and bf16 autocast, eager and compiled, each with the labels given to the model (their loss) and with
a cross-entropy of its own on their logits; sdpa attention, dropout 0, AdamW with the same groups, clipping to 1.
Every contender is a process of its own; ours and one peer take turns step by step. Prints medians, ratios (of wall
time and of CPU time), GFLOP/s against the measured ceiling of matrix products, how far the loss curves part, what
each of our changes gave, and with --memory the peak of one step at B=4, T=512.

Run: python bench/step.py [--steps 20] [--shape 1,256] [--char] [--memory] [--ablation] [--fused] [--only bf16]
(data: tinyshakespeare from the shared data, else the eight sonnets; needs the development install)
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from quatrain.model import masks
from quatrain.model.config import ModelConfig
from quatrain.model.device import keep_freed_memory, pick_precision
from quatrain.model.gpt import GPT
from quatrain.model.pretrained import save_model
from quatrain.text.tokenizers import Tokenizer, named_tokenizer
from quatrain.tokens.loader import Batch
from quatrain.training import step as training_step
from quatrain.training.config import OptimConfig
from quatrain.training.flops import flops_per_token
from quatrain.training.optim import build_optimizer
from quatrain.training.schedule import learning_rate
from quatrain.training.step import Step

SHARED = Path(os.environ.get("QUATRAIN_SHARED", "../shared/data"))
OPTIM = OptimConfig(lr=6e-4, schedule="constant", warmup=715, weight_decay=0.1)  # as recipe gpt2 begins
WARM_UP = 3
SHAPES = {"124M": [(1, 256), (2, 512)], "char": [(12, 64)]}
MODELS = {
    "124M": ModelConfig(vocab_size=50257),
    "char": ModelConfig(n_layer=4, n_head=4, n_embd=128, block_size=64),
}
PEERS = [
    f"peer {precision} {mode} {head}"
    for precision in ("fp32", "bf16")
    for mode in ("eager", "compiled")
    for head in ("labels", "own loss")
]
OURS, FUSED = "quatrain", " fused"
WITHOUT = ["memory kept", "blocked attention", "loss in chunks", "fused AdamW", "bf16"]

Run = Callable[[int], float]  # step number to loss


def tokenizer_of(model: str) -> tuple[Tokenizer, str]:
    """The tokenizer of a size, and the text."""
    path = SHARED / "tinyshakespeare.txt"
    sonnets = resources.files("quatrain.text") / "sonnets.txt"
    text = path.read_text(encoding="utf-8") if path.is_file() else sonnets.read_text(encoding="utf-8")
    return named_tokenizer("gpt2" if model == "124M" else "char", lambda: text), text


def batches_of(model: str, B: int, T: int) -> Callable[[int], torch.Tensor]:
    """Windows (B, T+1) of the text by step number, the same in every process."""
    tokenizer, text = tokenizer_of(model)
    ids = np.array(tokenizer.encode(text), dtype=np.int64)

    def windows(step: int) -> torch.Tensor:
        starts = np.random.default_rng(step).integers(0, len(ids) - T, size=B)
        return torch.from_numpy(np.stack([ids[start : start + T + 1] for start in starts]))

    return windows


def our_model(model: str) -> GPT:
    """The same weights in every process."""
    tokenizer, _ = tokenizer_of(model)
    fields = vars(MODELS[model]) | {"vocab_size": tokenizer.vocab_size}
    return GPT(ModelConfig(**fields), torch.Generator().manual_seed(0))


def our_step(name: str, model: str, B: int, T: int) -> Run:
    """The step that `quatrain train` runs, or that without one of its changes."""
    without = name.removeprefix(f"{OURS} without ") if name != OURS else ""
    if without != "memory kept":
        keep_freed_memory()
    if without == "blocked attention":
        masks.BlockedAttention = PlainAttention  # type: ignore[misc,assignment]
    if without == "loss in chunks":
        training_step.loss_of = plain_loss
    network = our_model(model).train()
    optimizer = build_optimizer(network, OPTIM)
    if without == "fused AdamW":
        optimizer = torch.optim.AdamW(optimizer.param_groups, betas=OPTIM.betas, eps=OPTIM.eps)
        for group in optimizer.param_groups:
            group["fused"] = None
    fp32 = without == "bf16"
    precision = pick_precision("fp32" if fp32 else "auto", torch.device("cpu"))
    step = Step(network, optimizer, precision, OPTIM.clip, 0)
    step.loss_of = training_step.loss_of
    windows = batches_of(model, B, T)

    def run(number: int) -> float:
        ids = windows(number)
        return step(
            number, learning_rate(number, OPTIM, OPTIM.warmup), [Batch(ids[:, :-1], ids[:, 1:], B * T)], B * T
        ).loss

    return run


class PlainAttention:
    """What torch does for itself, under the name of the blocked kernel."""

    @staticmethod
    def apply(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As `BlockedAttention`."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def plain_loss(model: GPT, inputs: torch.Tensor, targets: torch.Tensor, documents: None, positions: None) -> Any:
    """Cross-entropy of whole fp32 logits."""
    logits = model(inputs, documents, positions)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def peer_step(name: str, model: str, B: int, T: int) -> Run:
    """The loop of a tutorial over the model of transformers; AdamW is torch's default, or with "fused" as ours."""
    from transformers import GPT2LMHeadModel

    _, precision, mode, head = name.removesuffix(FUSED).split(" ", 3)
    fused = name.endswith(FUSED) or None
    with tempfile.TemporaryDirectory() as folder:
        save_model(our_model(model), tokenizer_of(model)[0], Path(folder))
        network = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa").train()
    decayed = [parameter for parameter in network.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in network.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": OPTIM.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps, fused=fused)
    forward = torch.compile(network) if mode == "compiled" else network
    windows = batches_of(model, B, T)
    context = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()

    def run(number: int) -> float:
        ids = windows(number)
        with context:
            if head == "labels":
                found = forward(ids[:, :-1], labels=ids[:, :-1]).loss
            else:
                logits = forward(ids[:, :-1]).logits
                found = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, OPTIM, OPTIM.warmup)
        optimizer.zero_grad()
        found.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), OPTIM.clip)
        optimizer.step()
        return found.item()

    return run


def work(name: str, model: str, B: int, T: int, threads: int, pipe: Connection) -> None:
    """Run steps as they are asked for: their loss, wall and CPU seconds, and the process's peak memory so far."""
    torch.set_num_threads(threads)
    run = (peer_step if name.startswith("peer") else our_step)(name, model, B, T)
    while (number := pipe.recv()) is not None:
        wall, cpu = time.perf_counter(), time.process_time()
        found = run(number)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        pipe.send({"loss": found, "wall": wall, "cpu": cpu, "peak": peak})


class Contender:
    """A process that trains when it is its turn."""

    def __init__(self, name: str, model: str, B: int, T: int, threads: int) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(name, model, B, T, threads, theirs), daemon=True)
        self.process.start()
        self.rows: list[dict[str, float]] = []

    def step(self, number: int) -> None:
        """One step; what it says is kept."""
        self.pipe.send(number)
        self.rows.append(self.pipe.recv())

    def median(self, key: str) -> float:
        """Of the steps behind the warm-up."""
        return statistics.median(row[key] for row in self.rows[WARM_UP:])

    def end(self) -> None:
        """Let it go."""
        self.pipe.send(None)
        self.process.join()


def compete(names: list[str], model: str, B: int, T: int, steps: int, threads: int) -> list[Contender]:
    """Some contenders, step by step in turns."""
    contenders = [Contender(name, model, B, T, threads) for name in names]
    for number in range(steps + WARM_UP):
        for contender in contenders:
            contender.step(number)
    for contender in contenders:
        contender.end()
    return contenders


def ceiling(dtype: torch.dtype, threads: int) -> float:
    """GFLOP/s of a large matrix product, the best of several."""
    torch.set_num_threads(threads)
    a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        F.linear(a, b)
        seconds.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(seconds) / 1e9


def compare(model: str, B: int, T: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A table of one size and shape: ours against each peer in turn."""
    tokenizer, _ = tokenizer_of(model)
    flops = flops_per_token(ModelConfig(**(vars(MODELS[model]) | {"vocab_size": tokenizer.vocab_size})), T) * B * T
    tops = {
        name: ceiling(dtype, options.threads) for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }
    print(f"\n{model}, B={B}, T={T}, {options.threads} threads: {flops / 1e9:.0f} GFLOP a step; ", end="")
    print("ceiling " + ", ".join(f"{name} {top:.0f} GFLOP/s" for name, top in tops.items()))
    print(f"{'against':34}{'theirs ms':>10}{'ours ms':>9}{'ratio':>7}{'of CPU':>8}{'ours GFLOP/s':>14}{'curves':>9}")
    rows = []
    names = [f"{OURS} without {what}" for what in WITHOUT] if options.ablation else PEERS
    names = [name + FUSED for name in names] if options.fused else names
    names = [name for name in names if options.only in name]
    for name in names:
        ours, theirs = compete([OURS, name], model, B, T, options.steps, options.threads)
        apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours.rows, theirs.rows, strict=True))
        row = {
            "model": model,
            "B": B,
            "T": T,
            "against": name,
            "theirs": theirs.median("wall"),
            "ours": ours.median("wall"),
            "ratio": statistics.median(
                b["wall"] / a["wall"] for a, b in zip(ours.rows[WARM_UP:], theirs.rows[WARM_UP:], strict=True)
            ),
            "cpu_ratio": theirs.median("cpu") / ours.median("cpu"),
            "apart": None if "labels" in name else apart,
        }
        rows.append(row)
        curves = "" if row["apart"] is None else f"{apart:.4f}"
        print(
            f"{name:34}{row['theirs'] * 1e3:10.1f}{row['ours'] * 1e3:9.1f}{row['ratio']:7.2f}{row['cpu_ratio']:8.2f}"
            f"{flops / row['ours'] / 1e9:14.0f}{curves:>9}",
            flush=True,
        )
    return rows


def memory(threads: int) -> None:
    """The peak of processes that run three steps of 124M at B=4, T=512."""
    print("\n124M, B=4, T=512: peak resident memory of three steps, MB")
    peaks = {}
    for name in (OURS, "peer bf16 eager labels", "peer bf16 eager own loss"):
        (contender,) = compete([name], "124M", 4, 512, 0, threads)
        peaks[name] = max(row["peak"] for row in contender.rows)
        print(f"{name:34}{peaks[name]:10.0f}{peaks[OURS] / peaks[name]:8.2f} of it", flush=True)


def main() -> None:
    """Parse, measure, print; --json FILE keeps the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps measured of each pair (50 for the loss curves)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shape", help="B,T of 124M alone")
    parser.add_argument("--char", action="store_true", help="the char model alone")
    parser.add_argument("--memory", action="store_true", help="peak memory alone")
    parser.add_argument("--only", default="", help="contenders whose name holds this")
    parser.add_argument("--fused", action="store_true", help="give the peers the fused AdamW too")
    parser.add_argument("--ablation", action="store_true", help="only ours without each change")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.memory:
        memory(options.threads)
        return
    rows = []
    if not options.char:
        for B, T in [tuple(map(int, options.shape.split(",")))] if options.shape else SHAPES["124M"]:
            rows += compare("124M", B, T, options)
    if options.char or not options.shape:
        rows += compare("char", *SHAPES["char"][0], options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
