"""Tokens and seconds to the loss of the plain AdamW recipe: for it, for AdamW at its best rate, for speedrun-cpu.

The target is what `shakespeare` (lr 1e-3) reaches in its 2,000 steps on the full validation split, its mean over the
seeds. The other two have a schedule that ends about where they reach it; their rates and lengths were chosen on seed
100, which is none of those reported (`--sweep` prints such a choice). A run that misses the target is run again with
the next longer schedule, and the longer one counts. Seconds are CPU time of one thread, which other work on the machine
touches little, without evaluations.

`--gutenberg` takes the three to books with GPT-2's vocabulary: the embedding is tied in all, so that the parameters are
equal, and a validation reads 16,384 targets. There the best rate of AdamW, of a sweep of its own, is the plain one.

Run: python bench/learn.py [--gutenberg] [--sweep] [--seeds 1 2 3]   (17 minutes of CPU; books 40)
"""

import argparse
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from quatrain.inference.scoring import score
from quatrain.model.device import Precision, pick_precision
from quatrain.model.gpt import GPT
from quatrain.model.pretrained import parameter_count
from quatrain.recipes.config import RunConfig
from quatrain.recipes.named import RECIPES
from quatrain.tokens.config import PrepareConfig
from quatrain.tokens.loader import Loader
from quatrain.tokens.store import TokenStore
from quatrain.tokens.writer import prepare
from quatrain.training.optim import build_optimizer
from quatrain.training.schedule import learning_rate, momentum
from quatrain.training.step import Step

SHARED = Path(os.environ.get("QUATRAIN_SHARED", "../shared/data"))
BEST_ADAMW, BEST_ADAMW_OF_BOOKS = 6e-3, 1e-3
SWEEP_SEED = 100
EVAL_EVERY, EVALUATED = 8, 0.9  # evaluations from this share of a schedule on


class Contender(NamedTuple):
    """A configuration, the lengths of its schedule in the order in which they are tried, and the rates of its sweep."""

    name: str
    config: RunConfig
    lengths: tuple[int, ...]
    rates: tuple[float, ...] = ()


class Corpus(NamedTuple):
    """What is trained on, and what a validation reads of it."""

    store: TokenStore
    eval_tokens: int | None
    contenders: tuple[Contender, ...]


class Point(NamedTuple):
    """Where a run is."""

    tokens: int
    seconds: float
    loss: float


def shakespeare(folder: Path) -> Corpus:
    """The plain recipes as they stand."""
    source = SHARED / "tinyshakespeare.txt"
    prepare([source], folder, PrepareConfig(tokenizer="char", val_tail=0.1))
    plain, fast = (RECIPES[name]().config for name in ("shakespeare", "speedrun-cpu"))
    return Corpus(
        TokenStore(folder),
        None,
        (
            Contender("adamw, lr 1e-3", plain, (plain.train.steps,)),
            adamw(plain, BEST_ADAMW, (1050, 1150, 1300, 1500), (2e-3, 4e-3, 6e-3, 8e-3)),
            Contender("speedrun-cpu", fast, (fast.train.steps, 320, 360), (2.5e-3, 5e-3, 1e-2)),
        ),
    )


def gutenberg(folder: Path) -> Corpus:
    """The same with 1.8M parameters beside an embedding of 50,257 rows; rates as they were."""
    prepare([SHARED / "gutenberg_100mb.jsonl.zst"], folder, PrepareConfig(tokenizer="gpt2", val_fraction=0.02))
    plain, fast = (transferred(RECIPES[name]().config) for name in ("shakespeare", "speedrun-cpu"))
    plain = plain.with_values("optim", warmup=20)
    return Corpus(
        TokenStore(folder),
        16_384,
        (
            Contender("adamw, lr 1e-3", plain, (400,)),
            adamw(plain, BEST_ADAMW_OF_BOOKS, (360, 400, 440), (5e-4, 1e-3, 2e-3)),
            Contender("speedrun-cpu", fast, (100, 120, 140, 160, 200), (2.5e-3, 5e-3, 1e-2)),
        ),
    )


def adamw(plain: RunConfig, lr: float, lengths: tuple[int, ...], rates: tuple[float, ...]) -> Contender:
    """The plain recipe at its best rate."""
    return Contender(f"adamw, best lr {lr:g}", rate(plain, lr), lengths, rates)


def transferred(config: RunConfig) -> RunConfig:
    """A recipe for characters at the size for books."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, n_embd=192, block_size=128, tied=True),
        data=dataclasses.replace(config.data, seq_len=128),
        train=dataclasses.replace(config.train, tokens_per_step=1024, micro_batch=8, precision="auto"),
    )


def rate(config: RunConfig, lr: float) -> RunConfig:
    """Another highest rate, and for cosine the same fall to a tenth."""
    return config.with_values("optim", lr=lr, min_lr=lr / 10 if config.optim.schedule == "cosine" else 0.0)


def lasting(config: RunConfig, steps: int) -> RunConfig:
    """The same schedule in another length; all of wsd's beyond its warmup is cooldown."""
    optim, train = config.optim, dataclasses.replace(config.train, steps=steps)
    if optim.schedule == "wsd":
        optim = dataclasses.replace(optim, cooldown=steps - optim.warmup)
    return dataclasses.replace(config, optim=optim, train=train)


def run(config: RunConfig, corpus: Corpus, seed: int, share: float = EVALUATED) -> Iterator[Point]:
    """Train, and give the validation loss of every few steps beyond that share of the run, and of the last."""
    store, train, optim = corpus.store, config.train, config.optim
    model = GPT(dataclasses.replace(config.model, vocab_size=store.vocab_size), torch.Generator().manual_seed(seed))
    loader = Loader(store.train, dataclasses.replace(config.data, seed=seed), store.eot)
    precision = precision_of(config)
    step = Step(model.train(), build_optimizer(model, optim), precision, optim.clip, seed)
    rows, seconds = train.tokens_per_step // config.data.seq_len, 0.0
    for number in range(train.steps):
        began = time.process_time()
        batch = loader.batch(number * rows, rows)
        step(number, learning_rate(number, optim, train.steps), [batch], batch.valid, momentum(number, optim))
        seconds += time.process_time() - began
        done = number + 1
        if done == train.steps or (done >= share * train.steps and done % EVAL_EVERY == 0):
            scored = score(model, store.val, config.data.seq_len, "concat", store.eot, corpus.eval_tokens, precision)
            yield Point(done * train.tokens_per_step, seconds, scored.loss)


def precision_of(config: RunConfig) -> Precision:
    """What auto is on this machine."""
    return pick_precision(config.train.precision, torch.device("cpu"))


def reach(contender: Contender, corpus: Corpus, seed: int, target: float) -> Point | None:
    """Where the first schedule that reaches the target does; None where none does."""
    point = Point(0, 0.0, torch.inf)
    for steps in contender.lengths:
        for point in run(lasting(contender.config, steps), corpus, seed):
            if point.loss <= target:
                print(f"{contender.name}, seed {seed}: {point.tokens:,} tokens, {point.seconds:.1f} s", flush=True)
                return point
        print(f"{contender.name}, seed {seed}: {steps} steps end at {point.loss:.4f}", flush=True)
    return None


def table(corpus: Corpus, seeds: list[int]) -> None:
    """Run everything; print who needs what."""
    plain = corpus.contenders[0]
    ends = [
        list(run(plain.config.with_values("train", steps=plain.lengths[0]), corpus, seed, 1.0))[-1] for seed in seeds
    ]
    target = fmean(point.loss for point in ends)
    print(f"target: {target:.4f}, the mean of {', '.join(f'{point.loss:.4f}' for point in ends)}\n", flush=True)
    found: dict[str, list[Point | None]] = {plain.name: [*ends]}
    for contender in corpus.contenders[1:]:
        found[contender.name] = [reach(contender, corpus, seed, target) for seed in seeds]
    print("| contender | parameters | tokens, mean | tokens, each seed | CPU seconds, mean | each seed | tokens x |")
    print("|---|---|---|---|---|---|---|")
    for contender in corpus.contenders:
        print(row_of(contender, corpus, found))


def row_of(contender: Contender, corpus: Corpus, found: dict[str, list[Point | None]]) -> str:
    """A contender's line: what it needs, and which share of the tokens of the first two contenders that is."""
    points = found[contender.name]
    needed = {name: mean_of(points, "tokens") for name, points in found.items()}
    own = needed[contender.name]
    shares = [f"{own / other:.3f}" if own and other else "-" for other in list(needed.values())[:2]]
    seconds = mean_of(points, "seconds")
    model = dataclasses.replace(contender.config.model, vocab_size=corpus.store.vocab_size)
    return (
        f"| {contender.name} | {parameter_count(model):,} | {f'{own:,.0f}' if own else 'not reached'} | "
        f"{', '.join(f'{point.tokens:,}' if point else 'not reached' for point in points)} | "
        f"{f'{seconds:.1f}' if seconds else '-'} | "
        f"{', '.join(f'{point.seconds:.1f}' if point else '-' for point in points)} | {', '.join(shares)} |"
    )


def mean_of(points: list[Point | None], field: str) -> float | None:
    """None where a seed misses the target."""
    reached = [getattr(point, field) for point in points if point]
    return fmean(reached) if len(reached) == len(points) else None


def sweep(corpus: Corpus) -> None:
    """What the rates and lengths were chosen by: the loss at the end of each schedule."""
    print(f"seed {SWEEP_SEED}\n\n| contender | lr | steps | loss |\n|---|---|---|---|", flush=True)
    for contender in corpus.contenders[1:]:
        for steps in contender.lengths:
            for lr in contender.rates:
                config = lasting(rate(contender.config, lr), steps)
                *_, end = run(config, corpus, SWEEP_SEED, 1.0)
                print(f"| {contender.config.optim.kind} | {lr:g} | {steps} | {end.loss:.4f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gutenberg", action="store_true", help="books with GPT-2's vocabulary")
    parser.add_argument("--sweep", action="store_true", help=f"choose rate and length on seed {SWEEP_SEED}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        corpus = (gutenberg if given.gutenberg else shakespeare)(Path(folder) / "store")
        sweep(corpus) if given.sweep else table(corpus, given.seeds)


if __name__ == "__main__":
    if (SHARED / "gutenberg_100mb.jsonl.zst").is_file():
        main()
    else:
        print(f"bench/learn.py: no shared data in {SHARED}")
