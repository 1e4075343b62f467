"""The compiled step: compiled once whatever comes between its steps, and equal to the eager one."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from quatrain.inference.config import SamplingConfig
from quatrain.inference.sampling import generate
from quatrain.inference.scoring import score
from quatrain.model.config import ModelConfig
from quatrain.model.device import can_compile
from quatrain.model.gpt import GPT
from quatrain.tokens.loader import Batch, batch_of
from quatrain.tokens.store import TokenStore
from quatrain.training.config import OptimConfig
from quatrain.training.optim import build_optimizer
from quatrain.training.schedule import learning_rate, momentum
from quatrain.training.step import Step
from switches import FASTER

# torch's own, of 2.13, while it compiles
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

CPU = torch.device("cpu")
ROWS, T = 4, 32
GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": T}
OPTIM = {
    "gpt2": OptimConfig(lr=1e-3, warmup=5),
    "faster": OptimConfig(kind="muon", lr=3e-3, warmup=5, momentum_warmup=20),
}
SHAPES = {"gpt2": GPT2, "faster": GPT2 | FASTER}


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def batches(store: TokenStore, packing: Any, step: int) -> list[Batch]:
    """Two micro-batches of a step, with other borders of documents in each."""
    draw = np.random.default_rng(step)
    ids = store.train.read(0, len(store.train)).astype(np.int64)
    rows = np.stack([ids[start : start + T + 1] for start in draw.integers(0, len(ids) - T - 1, 2 * ROWS)])
    rows[:, 1:-1][draw.random((2 * ROWS, T - 1)) < 0.1] = store.eot
    return [batch_of(half, packing, store.eot, CPU) for half in (rows[:ROWS], rows[ROWS:])]


def network(store: TokenStore, recipe: str, **switches: object) -> GPT:
    config = ModelConfig(**SHAPES[recipe] | switches, vocab_size=store.vocab_size)
    return GPT(config, torch.Generator().manual_seed(1))


def between(model: GPT, store: TokenStore, packing: Any, precision: Any) -> None:
    """What a run does between steps: validation, with a short last window, and samples of several lengths."""
    score(model, store.val, T, packing, store.eot, 3 * T + 5, precision)
    generate(model, store.tokenizer, "From", SamplingConfig(max_tokens=5, n=2), precision)


def run(
    store: TokenStore, recipe: str, packing: str, compiled: bool, precision: Any, steps: int, strict: bool = True
) -> tuple[list[float], GPT]:
    """Losses of a run; where compiled and `strict`, a second compilation is an error."""
    model, optim = network(store, recipe), OPTIM[recipe]
    step = Step(model, build_optimizer(model, optim), precision, 1.0, 5, compiled)
    losses = []
    for number in range(steps):
        model.train()
        stance = "fail_on_recompile" if compiled and strict and number else "default"
        with torch.compiler.set_stance(stance):
            cut = batches(store, packing, number)
            valid = sum(batch.valid for batch in cut)
            rate = learning_rate(number, optim, steps)
            losses.append(step(number, rate, cut, valid, momentum(number, optim)).loss)
            if number % 10 in (0, 3):
                between(model, store, packing, precision)
    return losses, model


def weights(model: GPT) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("recipe", "packing", "precision"),
    [
        ("gpt2", "concat", "fp32"),
        ("gpt2", "document", "bf16"),
        ("faster", "concat", "bf16"),
        ("faster", "document", "fp32"),
    ],
)
def test_a_step_is_compiled_once_whatever_comes_between(
    sonnets: TokenStore, recipe: str, packing: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: traced(function, backend="aot_eager"))
    losses, model = run(sonnets, recipe, packing, True, precision, 5)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    expected, eager = run(sonnets, recipe, packing, False, precision, 5)
    assert losses == pytest.approx(expected, abs=1e-4 if precision == "fp32" else 3e-2)
    if precision == "fp32":
        assert (weights(model) - weights(eager)).norm() < 1e-3 * weights(eager).norm()


def test_the_check_sees_a_second_compilation(sonnets: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: traced(function, backend="aot_eager", dynamic=False))
    step = Step(network(sonnets, "gpt2"), torch.optim.SGD([torch.zeros(1)]), "fp32", 0.0, 5, compiled=True)
    [batch, _] = batches(sonnets, "concat", 0)
    step(0, 0.0, [batch], batch.valid)
    shorter = Batch(batch.inputs[:, :-1], batch.targets[:, :-1], batch.valid)
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        step(1, 0.0, [shorter], batch.valid)


@pytest.mark.soak  # a cold compilation takes half a minute
@pytest.mark.parametrize(
    ("recipe", "packing", "precision"), list(itertools.product(OPTIM, ("concat", "document"), ("fp32", "bf16")))
)
def test_case_45_50_compiled_steps_are_within_a_tolerance_of_eager_ones(
    sonnets: TokenStore, recipe: str, packing: str, precision: str
) -> None:
    if not can_compile(CPU):
        pytest.skip("no optional library: torch.compile needs a C++ compiler")
    compiled, _ = run(sonnets, recipe, packing, True, precision, 50)
    eager, _ = run(sonnets, recipe, packing, False, precision, 50)
    assert np.isfinite(compiled).all()
    assert compiled == pytest.approx(eager, abs=1e-3 if precision == "fp32" else 5e-2)
    assert eager[-1] < eager[0] - 0.3
