"""What a GPU makes of us: tokens/s, MFU, memory and the first losses of the recipes of 124M, and whether it is right.

Recipes gpt2, gpt2-rope-swiglu and speedrun at T=1024, eager and compiled, with plain causal attention and with each
way to attend within documents. Step, optimizer, precision, loader and its feed are those of `quatrain train`; the
schedule is the recipe's. Timed steps hold as many tokens as the recipe's; steps of the loss curve are smaller.
Checked: every way to attend gives the loss and the gradient of the dense mask; a document does not reach into another;
compiled and eager losses stay together; nothing is compiled anew; writing with kept keys and values gives the model's
own logits. Parts run in order of importance, each only if it is expected to end in time: what is left out is said.
Everything stands in a JSON file too. Exit status 1: a check or a part failed.

Run: python bench/gpu.py [--data STORE] [--out runs/gpu.json] [--seconds 450]   (under 8 minutes on one H100 or H200)
     python bench/gpu.py --smoke   (the same code on a CPU, tiny, in seconds; torch.compile traces, but makes no code)
"""

import argparse
import contextlib
import gc
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from quatrain.inference.engine import Engine
from quatrain.interop.adoption import adopt
from quatrain.interop.config import AdoptConfig
from quatrain.model import masks
from quatrain.model.config import ModelConfig
from quatrain.model.device import Precision, autocast, can_compile, pick_precision
from quatrain.model.gpt import GPT
from quatrain.model.loss import loss_of
from quatrain.recipes.named import RECIPES
from quatrain.tokens.config import DataConfig
from quatrain.tokens.loader import Batch, Loader
from quatrain.tokens.store import TokenStore
from quatrain.training.feed import Feed
from quatrain.training.flops import flops_per_token, peak_flops
from quatrain.training.optim import build_optimizer
from quatrain.training.schedule import learning_rate, momentum
from quatrain.training.step import Step

NAMES = ("gpt2", "gpt2-rope-swiglu", "speedrun")
TARGET = 460_000  # tokens/s of plain GPT-2 124M on one H100 or H200; users have 430,000 today
PHRASES, PHRASE, DOCUMENT = 4096, 8, 600  # of the synthetic text: phrases, their ids, the mean document's ids
PARITY = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}  # of loss and gradient, relative
CURVES = {"fp32": 1e-3, "bf16": 1e-2, "fp16": 1e-2}  # between eager and compiled losses, nats
CACHED_STEPS, CACHE_PARITY = 20, 1e-2  # logits in fp32, whose products may be in TF32
EXPECTED = {True: 90.0, False: 30.0}  # seconds of the first compiled and eager part, before one has been measured


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    shape: dict[str, int]  # of the model, where it is not the recipe's
    tokenizer: str  # of the synthetic store
    tokens: int  # in it
    seq_len: int
    timed_tokens: int  # of a timed step
    timed_steps: int
    loss_tokens: int  # of a step of the loss curve
    loss_steps: int
    eager_loss_steps: int
    micro_batch: int | None  # None: the recipe's
    ways: dict[bool, tuple[masks.Way, ...]]  # by compiled or not


REAL = Scale({}, "gpt2", 20_000_000, 1024, 524_288, 3, 65_536, 100, 20, None, {False: ("varlen",), True: ("flex",)})
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 64}
SMOKE = Scale(TINY, "bytes", 20_000, 64, 512, 2, 256, 5, 5, 2, {False: ("segments",), True: ()})


class Part(NamedTuple):
    """One thing that is trained and timed."""

    recipe: str
    compiled: bool
    attention: str = "causal"  # or cudnn, or a way within documents
    curve: bool = False  # whether the loss curve is run
    micro_batch: int = 0  # 0: the recipe's

    def __str__(self) -> str:
        mode = "compiled" if self.compiled else "eager"
        return f"{self.recipe:<17}{mode:<9}{self.attention:<9}" + (f"B={self.micro_batch}" if self.micro_batch else "")


def parts_of(scale: Scale) -> Iterator[Part]:
    """In order of importance."""
    known = [name for name in NAMES if name in RECIPES]
    yield from (Part("gpt2", compiled, curve=True) for compiled in (True, False))
    yield from (Part("gpt2", True, way) for way in scale.ways[True])
    yield from (Part(name, compiled, curve=True) for name in known[1:] for compiled in (True, False))
    yield from (Part("gpt2", False, way) for way in (*scale.ways[False], "dense"))
    if scale is REAL:
        yield Part("gpt2", True, micro_batch=64)
        yield Part("gpt2", True, "cudnn")
    yield Part("gpt2", True, "dense")
    yield from (Part(name, True, way) for name in known[1:] for way in scale.ways[True])


def synthetic(folder: Path, scale: Scale) -> Path:
    """A store of documents made of recurring phrases: the first id of each is a guess, the others can be learned."""
    eot = {"gpt2": 50256, "bytes": 256}[scale.tokenizer]
    draw = np.random.default_rng(0)
    phrases = draw.integers(0, eot, (PHRASES, PHRASE), dtype=np.uint16)
    often = 1 / np.arange(1, PHRASES + 1)
    ids = phrases[draw.choice(PHRASES, scale.tokens // PHRASE, p=often / often.sum())].ravel()
    ids[draw.random(len(ids)) < 1 / min(DOCUMENT, scale.seq_len // 3)] = eot
    ids[[0, -1]] = eot
    shards = folder / "shards"
    shards.mkdir()
    for split, some in (("train", ids), ("val", ids[-scale.tokens // 100 :])):
        np.concatenate([[eot], some]).astype(np.uint16).tofile(shards / f"synthetic_{split}.bin")
    adopt(str(shards), folder / "store", AdoptConfig(tokenizer=scale.tokenizer))
    return folder / "store"


@contextlib.contextmanager
def attending(attention: str) -> Iterator[None]:
    """Within documents by this way, whatever would be chosen."""
    if attention == "cudnn":
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            yield
    elif attention == "causal":
        yield
    else:

        def chosen(*facts: object) -> str:
            return attention

        with mock.patch.object(masks, "fastest_way", chosen):
            yield


class Bench:
    """One device, one store, one scale; collects what was found."""

    def __init__(self, scale: Scale, store: TokenStore, device: torch.device, limit: float, started: float) -> None:
        self.scale, self.store, self.device = scale, store, device
        self.limit, self.started = limit, started
        self.precision: Precision = pick_precision("fp32" if scale is SMOKE else "auto", device)
        self.took: dict[bool, float] = {}
        self.found: dict[str, Any] = {"parts": [], "checks": [], "left_out": []}
        self.curves: dict[tuple[str, bool], list[float]] = {}

    def model_config(self, recipe: str, **changes: int) -> ModelConfig:
        config = RECIPES[recipe]().config.model
        return replace(config, vocab_size=self.store.vocab_size, **{**self.scale.shape, **changes})

    def loader(self, packing: str) -> Loader:
        data = DataConfig(seq_len=self.scale.seq_len, packing=packing)
        return Loader(self.store.train, data, self.store.eot, self.device)

    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def attempt(self, what: str, compiled: bool, run: Callable[[], None]) -> None:
        """Run it if it is expected to end in time; what goes wrong is told, and the rest goes on."""
        expected = self.took.get(compiled, EXPECTED[compiled] if self.scale is REAL else 0.0)
        if self.elapsed() + expected > self.limit:
            self.found["left_out"].append(what)
            say(f"{what}: left out, {self.limit - self.elapsed():.0f} s are left and it takes about {expected:.0f} s")
            return
        started = time.perf_counter()
        try:
            run()
        except Exception as error:  # on a machine that is at hand for minutes, one part must not cost the others
            self.check(what, False, f"did not run: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
        self.took[compiled] = max(self.took.get(compiled, 0.0), 1.1 * (time.perf_counter() - started))
        torch.compiler.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def check(self, what: str, holds: bool, told: str) -> None:
        self.found["checks"].append({"check": what, "holds": holds, "told": told})
        say(f"{'ok' if holds else 'FAILED':<8}{what}: {told}")

    def measure(self, part: Part) -> None:
        """Train a fresh model: the loss curve, or a step to warm up, and the timed steps."""
        scale, config = self.scale, RECIPES[part.recipe]().config
        micro_batch = part.micro_batch or scale.micro_batch or config.train.micro_batch
        network = GPT(self.model_config(part.recipe), torch.Generator().manual_seed(config.train.seed)).to(self.device)
        optimizer = build_optimizer(network.train(), config.optim)
        step = Step(network, optimizer, self.precision, config.optim.clip, config.train.seed, part.compiled)
        small = [scale.loss_tokens] * (scale.loss_steps if part.compiled else scale.eager_loss_steps)
        sizes = (small if part.curve else small[:2]) + [scale.timed_tokens] * scale.timed_steps
        loader = self.loader("concat" if part.attention in ("causal", "cudnn") else "document")
        rows = range(0, sum(sizes) // scale.seq_len, micro_batch)
        losses: list[float] = []
        seconds: list[float] = []
        with attending(part.attention), Feed(loader, rows, micro_batch) as feed:
            for number, tokens in enumerate(sizes):
                if number == len(sizes) - scale.timed_steps:
                    waited, graphs = feed.waited, self._begin_timing()
                started = time.perf_counter()
                batches = itertools.islice(feed, tokens // (scale.seq_len * micro_batch))
                lr = learning_rate(number, config.optim, config.train.steps)
                losses.append(step(number, lr, batches, tokens, momentum(number, config.optim)).loss)
                self._synchronize()
                seconds.append(time.perf_counter() - started)
            waited = (feed.waited - waited) / sum(seconds[-scale.timed_steps :])
        curve = losses[: len(losses) - scale.timed_steps] if part.curve else []
        self._tell(part, micro_batch, seconds, curve, waited, graphs_compiled() - graphs)

    def _begin_timing(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return graphs_compiled()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _tell(
        self, part: Part, micro_batch: int, seconds: list[float], curve: list[float], waited: float, graphs: int
    ) -> None:
        scale, plain = self.scale, (part.recipe, part.attention) == ("gpt2", "causal")
        rate = scale.timed_tokens * scale.timed_steps / sum(seconds[-scale.timed_steps :])
        peak = peak_flops(self.device, self.precision)
        mfu = rate * flops_per_token(self.model_config(part.recipe), scale.seq_len) / peak if peak else None
        memory = torch.cuda.max_memory_allocated(self.device) / 1e9 if self.device.type == "cuda" else None
        ratio = f"{rate / TARGET:.2f}x the target" if plain and scale is REAL else ""
        self.found["parts"].append(
            part._asdict()
            | {"micro_batch": micro_batch, "tokens_per_second": rate, "mfu": mfu, "peak_gb": memory, "waited": waited}
            | {"first_step_seconds": seconds[0], "recompilations": graphs, "losses": curve}
            | ({"of_target": rate / TARGET} if ratio else {})
        )
        say(
            f"{part!s:<42}{rate:>10,.0f} tokens/s  mfu {_or_na(mfu, '.1%')}  peak {_or_na(memory, '.1f')} GB  "
            f"B={micro_batch}  waited {waited:.2%}  first step {seconds[0]:.1f} s  {ratio}"
        )
        if curve:
            marks = sorted({1, 2, 5, 10, 20, 50, 100, len(curve)} & set(range(1, len(curve) + 1)))
            say("        loss by step: " + "  ".join(f"{mark}: {curve[mark - 1]:.4f}" for mark in marks))
            self._compare(part.recipe, part.compiled, curve)
        if part.compiled and graphs:
            self.check(str(part), False, f"{graphs} graphs were compiled anew while steps were timed, expected none")

    def _compare(self, recipe: str, compiled: bool, curve: list[float]) -> None:
        """Compile parity, once both curves are there."""
        self.curves[recipe, compiled] = curve
        other = self.curves.get((recipe, not compiled))
        if other:
            both = list(zip(curve, other, strict=False))
            apart, allowed = max(abs(a - b) for a, b in both), CURVES[self.precision]
            told = f"losses differ by {apart:.1e} at most over {len(both)} steps, allowed {allowed:.0e}"
            self.check(f"compile parity of {recipe}", apart <= allowed, told)

    def mask_parity(self, compiled: bool) -> None:
        """Every way against the dense mask: loss and gradient of two blocks with rotation, and no reach across."""
        config = self.model_config("gpt2-rope-swiglu", n_layer=2)
        network = GPT(config, torch.Generator().manual_seed(0)).to(self.device).train()
        batch = self.loader("document").batch(0, 4)
        expected = self._loss_and_gradient(network, batch, "dense", compiled)
        for way in self.scale.ways[compiled]:
            found = self._loss_and_gradient(network, batch, way, compiled)
            apart = max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
            allowed = PARITY[self.precision]
            told = f"loss and gradient differ by {apart:.1e} of the dense mask's, allowed {allowed:.0e}"
            self.check(f"mask parity of {way}", apart <= allowed, told)
        for way in () if compiled else ("dense", *self.scale.ways[compiled]):
            reach = self._reach(network, batch, way)
            self.check(f"no reach of {way}", reach == 0, f"another first document changes the others' by {reach}")

    def _loss_and_gradient(self, network: GPT, batch: Batch, way: str, compiled: bool) -> list[torch.Tensor]:
        torch.compiler.reset()
        network.zero_grad()
        with attending(way), autocast(self.device, self.precision):
            run = torch.compile(loss_of) if compiled else loss_of
            loss = run(network, batch.inputs, batch.targets, batch.documents, batch.positions) / batch.valid
        loss.backward()
        return [loss.detach(), torch.cat([parameter.grad.flatten() for parameter in network.parameters()])]

    @torch.no_grad()
    def cache_parity(self, compiled: bool) -> None:
        """Two rows read and written with kept keys and values, against the model over each whole row."""
        config = self.model_config("gpt2-rope-swiglu", n_layer=2)
        network = GPT(config, torch.Generator().manual_seed(0)).to(self.device).eval()
        ids = self.loader("concat").batch(0, 2).inputs  # (2, T)
        engine = Engine(network, slots=2, compiled=compiled)
        read = self.scale.seq_len // 2
        starts = [read, read - 7]  # unequal lengths
        found = [engine.prefill([0, 1], [row[:start].tolist() for row, start in zip(ids, starts, strict=True)])]
        for step in range(CACHED_STEPS):
            tokens = [int(row[start + step]) for row, start in zip(ids, starts, strict=True)]
            found.append(engine.decode([0, 1], tokens))
        whole = [network(row[None])[0, start - 1 :][: CACHED_STEPS + 1] for row, start in zip(ids, starts, strict=True)]
        apart = float((torch.stack(found, dim=1) - torch.stack(whole)).abs().max())
        told = f"logits differ by {apart:.1e} over {CACHED_STEPS} steps, allowed {CACHE_PARITY:.0e}"
        self.check(f"{'compiled ' if compiled else ''}cache parity", apart <= CACHE_PARITY, told)

    @torch.no_grad()
    def _reach(self, network: GPT, batch: Batch, way: str) -> float:
        """How much other ids in each row's first document change the hidden states of its other documents."""
        first = batch.documents == batch.documents[:, :1]
        changed = torch.where(first, (batch.inputs + 1) % self.store.eot, batch.inputs)
        with attending(way), autocast(self.device, self.precision):
            states = [network.hidden(ids, batch.documents, batch.positions) for ids in (batch.inputs, changed)]
        assert (states[0] != states[1])[first].any()
        return float((states[0] - states[1])[~first].abs().max())

    def run(self) -> dict[str, Any]:
        """All of it, most important first."""
        for name in NAMES:
            if name not in RECIPES:
                self.found["left_out"].append(name)
                say(f"{name}: left out, there is no such recipe yet")
        self.attempt("mask parity", False, lambda: self.mask_parity(compiled=False))
        compiles = self.scale is SMOKE or can_compile(self.device)  # tracing needs no compiler
        for number, part in enumerate(parts_of(self.scale)):
            if part.compiled and not compiles:
                self.check(str(part), False, "torch.compile finds no compiler (or no triton) on this machine")
            else:
                self.attempt(str(part), part.compiled, partial(self.measure, part))
            if number == 1:
                self.attempt("cache parity", False, lambda: self.cache_parity(compiled=False))
            if number == 1 and compiles:
                self.attempt("compiled cache parity", True, lambda: self.cache_parity(compiled=True))
            if number == 1 and compiles and self.scale.ways[True]:
                self.attempt("compiled mask parity", True, lambda: self.mask_parity(compiled=True))
        return self.found


def graphs_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _or_na(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def say(line: str) -> None:
    print(line, flush=True)


def main(words: list[str] | None = None) -> int:
    started = time.perf_counter()
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="a token store; default: synthetic documents")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu.json"), help="the JSON file")
    parser.add_argument("--seconds", type=float, default=450.0, help="no part begins that would end after them")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU")
    arguments = parser.parse_args(words)
    if not (arguments.smoke or torch.cuda.is_available()):
        say("bench/gpu.py: no CUDA device on this machine; --smoke runs the same code, tiny, on a CPU")
        return 0
    scale, device = (SMOKE, torch.device("cpu")) if arguments.smoke else (REAL, torch.device("cuda", 0))
    name = "CPU" if arguments.smoke else torch.cuda.get_device_name(device)
    if device.type == "cuda":  # as in training
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if arguments.smoke:
            stack.enter_context(mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")))
        store = TokenStore(arguments.data or synthetic(Path(folder), scale))
        bench = Bench(scale, store, device, arguments.seconds, started)
        say(f"{name}, torch {torch.__version__}, {bench.precision}, T={scale.seq_len}")
        say(f"target on one H100 or H200: {TARGET:,} tokens/s for plain GPT-2 124M")
        found = bench.run()
    facts = {"device": name, "torch": torch.__version__, "precision": bench.precision, "target": TARGET}
    found = facts | {"scale": asdict(scale), "data": "a store" if arguments.data else "synthetic"} | found
    found["seconds"] = time.perf_counter() - started
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    failed = sum(not check["holds"] for check in found["checks"])
    say(f"{len(found['checks'])} checks, {failed} failed; {len(found['parts'])} parts in {found['seconds']:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
