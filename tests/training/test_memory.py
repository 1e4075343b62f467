"""The memory of a step, by formula, against what torch keeps and allocates in real steps of tiny models."""

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from quatrain.model.config import ModelConfig
from quatrain.model.device import autocast
from quatrain.model.gpt import GPT
from quatrain.tokens.loader import Batch
from quatrain.training.config import OptimConfig
from quatrain.training.memory import HEAP, Memory, Run, kept_by_token, memory_of
from quatrain.training.optim import build_optimizer
from quatrain.training.step import Step

TINY = ModelConfig(n_layer=2, n_head=4, n_embd=64, block_size=128, vocab_size=300)
B, T = 2, 75  # B T is the size of no weight
SWITCHES = [
    [{}, {"position": "rope"}],
    [{}, {"norm": "rmsnorm"}],
    [{}, {"mlp": "swiglu"}, {"mlp": "relu2"}],
    [{}, {"qk_norm": True}],
    [{}, {"n_kv_head": 2}],
    [{}, {"value_residual": True, "embedding_shortcut": True}],
    [{}, {"dropout": 0.1}],
]
ITEMSIZE = {"fp32": 4, "bf16": 2}


def combinations() -> list[ModelConfig]:
    found = []
    for chosen in itertools.product(*SWITCHES):
        found.append(replace(TINY, **{key: value for values in chosen for key, value in values.items()}))
    return found


def ids(model: GPT, rows: int, length: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (rows, length))


def kept(model: GPT, precision: str, documents: torch.Tensor | None = None) -> int:
    """Bytes of the storages that autograd keeps of a forward up to the last norm, weights and their casts left out."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    casts = {shape for weight in model.parameters() for shape in (weight.shape, weight.shape[::-1]) if weight.dim()}
    storages: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        cast = tensor.dtype == torch.bfloat16 and tensor.shape in casts
        if tensor.untyped_storage().data_ptr() not in weights and not cast:
            storages[tensor.untyped_storage().data_ptr()] = tensor  # held, so that its place is not used again
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, autocast(torch.device("cpu"), precision):
        model.train().hidden(ids(model, B, T), documents)
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_what_autograd_keeps_whatever_the_switches(precision: str) -> None:
    for config in combinations():
        counted = kept(GPT(config), precision)
        by_formula = B * T * kept_by_token(Run(config, B, T, ITEMSIZE[precision]))
        assert by_formula == pytest.approx(counted, rel=0.04), config


def test_activations_within_documents_are_what_autograd_keeps() -> None:
    documents = (torch.arange(T) // 40).expand(B, T).contiguous()
    run = Run(TINY, B, T, 4, packing="document")
    assert B * T * kept_by_token(run) == pytest.approx(kept(GPT(TINY), "fp32", documents), rel=0.04)


def test_every_switch_of_memory_changes_the_formula() -> None:
    plain = kept_by_token(Run(TINY, B, T, 2, cpu=False))
    for switch in [{"position": "rope"}, {"mlp": "swiglu"}, {"qk_norm": True}, {"n_kv_head": 2}, {"dropout": 0.1},
                   {"value_residual": True}, {"embedding_shortcut": True}]:  # fmt: skip
        assert kept_by_token(Run(replace(TINY, **switch), B, T, 2, cpu=False)) != plain, switch


def planned(config: ModelConfig, rows: int, length: int, precision: str, muon: bool, micro_steps: int) -> Memory:
    shapes = {name: tuple(weight.shape) for name, weight in GPT(config).named_parameters()}
    return memory_of(Run(config, rows, length, ITEMSIZE[precision], muon, micro_steps > 1), shapes)


def allocated(config: ModelConfig, rows: int, length: int, precision: str, muon: bool, micro_steps: int) -> int:
    """The most bytes of tensors in a second step, by the profiler of torch's allocator."""
    model = GPT(config).train()
    optimizer = build_optimizer(model, OptimConfig(kind="muon" if muon else "adamw"))
    step = Step(model, optimizer, precision, 1.0, 0)

    def run(number: int) -> None:
        batches = [Batch(ids(model, rows, length), ids(model, rows, length), rows * length) for _ in range(micro_steps)]
        step(number, 1e-3, batches, rows * length * micro_steps)

    run(0)
    optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run(1)
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    weights = sum(weight.numel() for weight in model.parameters())
    moments = sum(value.numel() for state in optimizer.state.values() for value in state.values())
    return max(itertools.accumulate(sizes)) + 4 * (weights + moments)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("muon", "micro_steps"), [(False, 1), (True, 2)])
@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (replace(TINY, n_layer=4, n_embd=128), 8),  # activations are the most
        (replace(TINY, vocab_size=20_000), 1),  # the embedding's gradients
        (replace(TINY, vocab_size=20_000, logit_softcap=15.0, tied=False), 8),  # logits
    ],
)
def test_the_peak_is_what_torch_allocates_in_a_step(
    config: ModelConfig, rows: int, precision: str, muon: bool, micro_steps: int
) -> None:
    measured = allocated(config, rows, 128, precision, muon, micro_steps)
    by_formula = planned(config, rows, 128, precision, muon, micro_steps)
    assert by_formula.peak - by_formula.heap == pytest.approx(measured, rel=0.1)


RESIDENT = """
import re, torch
from pathlib import Path
from quatrain.model.config import ModelConfig
from quatrain.training.memory import Run, memory_of
from test_memory import *
torch.set_num_threads(1)
config = ModelConfig(n_layer=6, n_head=8, n_embd=512, vocab_size=8000)
allocated(TINY, 1, 16, "fp32", False, 1)  # loads what torch loads late
def resident(what): return 1024 * int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = resident("VmRSS")
model = GPT(config).train()
step = Step(model, build_optimizer(model, OptimConfig()), "fp32", 1.0, 0)
for number in range(2):
    step(number, 1e-3, [Batch(ids(model, 1, 512), ids(model, 1, 512), 512)], 512)
print(resident("VmHWM") - before, planned(config, 1, 512, "fp32", False, 1).peak)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no optional library: /proc tells resident memory on Linux alone")
def test_a_process_grows_by_the_planned_peak() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT], cwd=__file__.rpartition("/")[0], capture_output=True, text=True, check=True
    )
    grown, by_formula = map(int, done.stdout.split()[-2:])
    assert by_formula == pytest.approx(grown, rel=0.15)


def test_checkpointed_blocks_keep_their_inputs_and_one_block() -> None:
    deep = replace(TINY, n_layer=24)
    memory = memory_of(Run(deep, 8, 128, 2, cpu=False), {"transformer.wte.weight": (320, 64)})
    assert memory.activations_checkpointed < memory.activations / 5
    assert memory.peak_checkpointed < memory.peak
    assert memory.heap == 0
    cpu = memory_of(Run(deep, 8, 128, 2), {"transformer.wte.weight": (320, 64)})
    assert cpu.heap == pytest.approx(HEAP / (1 + HEAP) * cpu.peak, rel=1e-6)
