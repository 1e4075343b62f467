"""bench/gpu.py, tiny on a CPU: it is run where a GPU is at hand for minutes, so it must work the first time."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from quatrain.model import masks
from quatrain.model.masks import Causal
from quatrain.recipes.named import RECIPES
from quatrain.tokens.store import TokenStore
from quatrain.training import step as training_step

SCRIPT = Path(__file__).parents[1] / "bench" / "gpu.py"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_gpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_gpu"] = module  # where dataclasses look up the names of their types
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench(gpu: ModuleType, tmp_path: Path):
    store = TokenStore(gpu.synthetic(tmp_path, gpu.SMOKE))
    return gpu.Bench(gpu.SMOKE, store, torch.device("cpu"), limit=1e9, started=0.0)


def test_the_smoke_run_measures_every_part_and_all_checks_hold(gpu, tmp_path, capsys):
    out = tmp_path / "folder" / "gpu.json"
    assert gpu.main(["--smoke", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    names = [name for name in gpu.NAMES if name in RECIPES]
    measured = [(part["recipe"], part["compiled"], part["attention"]) for part in found["parts"]]
    assert {(name, compiled, "causal") for name in names for compiled in (True, False)} <= set(measured)
    assert {("gpt2", False, "segments"), ("gpt2", False, "dense"), ("gpt2", True, "dense")} <= set(measured)
    assert all(part["tokens_per_second"] > 0 and part["recompilations"] == 0 for part in found["parts"])
    curves = {part["recipe"]: part["losses"] for part in found["parts"] if part["compiled"] and part["losses"]}
    assert {name: len(curve) for name, curve in curves.items()} == dict.fromkeys(names, gpu.SMOKE.loss_steps)
    checked = {check["check"] for check in found["checks"]}
    assert checked >= {"mask parity of segments", "no reach of segments", "no reach of dense"}
    assert checked >= {f"compile parity of {name}" for name in names}
    assert str(tmp_path) not in out.read_text()
    told = capsys.readouterr().out
    assert "460,000 tokens/s" in told
    for name in set(gpu.NAMES) - set(names):
        assert f"{name}: left out" in told


def test_case_41_a_mask_that_is_dropped_fails_the_checks(bench, monkeypatch):
    monkeypatch.setitem(masks.WAYS, "segments", lambda documents: Causal())
    bench.mask_parity(compiled=False)
    holds = {check["check"]: check["holds"] for check in bench.found["checks"]}
    assert holds == {"mask parity of segments": False, "no reach of dense": True, "no reach of segments": False}


def test_case_45_curves_that_part_fail_the_check(gpu, bench):
    bench._compare("gpt2", True, [5.0, 4.0])
    assert bench.found["checks"] == []
    bench._compare("gpt2", False, [5.0, 4.0 + 2 * gpu.CURVES["fp32"]])
    assert [check["holds"] for check in bench.found["checks"]] == [False]


def test_a_part_that_fails_or_comes_too_late_does_not_end_the_others(gpu, bench, monkeypatch, capsys):
    def broken(*tensors):
        raise torch.OutOfMemoryError("no memory\nfor this")

    monkeypatch.setattr(training_step, "loss_of", broken)
    part = gpu.Part("gpt2", False)
    bench.attempt(str(part), False, lambda: bench.measure(part))
    assert bench.found["checks"][0] == {
        "check": str(part),
        "holds": False,
        "told": "did not run: OutOfMemoryError: no memory",
    }
    bench.limit = 0.0
    bench.attempt("another", False, lambda: pytest.fail("was run"))
    assert bench.found["left_out"] == ["another"]
    assert "another: left out" in capsys.readouterr().out


def test_the_parts_on_a_gpu_begin_with_those_of_the_target(gpu):
    parts = list(gpu.parts_of(gpu.REAL))
    assert parts[:3] == [
        gpu.Part("gpt2", True, curve=True),
        gpu.Part("gpt2", False, curve=True),
        gpu.Part("gpt2", True, "flex"),
    ]
    assert len(set(parts)) == len(parts)
    assert {part.attention for part in parts} == {"causal", "cudnn", "dense", "flex", "varlen"}


def test_without_cuda_it_says_so(gpu, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 0
    assert "--smoke" in capsys.readouterr().out
