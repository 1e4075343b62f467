import ctypes
import platform
from types import SimpleNamespace

import pytest
import torch

from quatrain.errors import UsageError
from quatrain.model.device import autocast, can_compile, keep_freed_memory, pick_device, pick_precision


@pytest.fixture
def machine(monkeypatch):
    """Pretend that the machine has these devices."""

    def pretend(cuda: int = 0, mps: bool = False, capability: tuple[int, int] = (8, 0), **cpu: bool) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return pretend


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(2, True, "cuda"), (1, False, "cuda"), (0, True, "mps"), (0, False, "cpu")]
)
def test_auto_is_cuda_then_mps_then_cpu(machine, cuda, mps, expected):
    machine(cuda=cuda, mps=mps)
    assert pick_device("auto") == torch.device(expected)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps", "gpu", "cuda:x", "", "meta", "CPU"])
def test_a_device_that_is_not_there_is_refused_by_name_with_those_that_are(machine, name):
    machine()
    with pytest.raises(UsageError, match=rf"device '{name}' is not on this machine; there is cpu"):
        pick_device(name)


def test_a_named_device_that_is_there_is_taken(machine):
    machine(cuda=2, mps=True)
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("mps") == torch.device("mps")
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UsageError, match="there is cuda, mps, cpu"):
        pick_device("gpu")


def test_a_cuda_device_beyond_the_last_is_refused_with_the_number_of_devices(machine):
    machine(cuda=2)
    with pytest.raises(UsageError, match=r"'cuda:2'.*2 CUDA devices, counted from 0"):
        pick_device("cuda:2")


@pytest.mark.parametrize(
    ("device", "hardware", "expected"),
    [
        ("cuda", {"capability": (7, 5)}, "fp32"),
        ("cuda", {"capability": (8, 0)}, "bf16"),
        ("cuda", {"capability": (10, 0)}, "bf16"),
        ("mps", {}, "fp32"),
        ("cpu", {}, "fp32"),
        ("cpu", {"avx512_bf16": False, "amx_bf16": False, "avx512_f": True}, "fp32"),
        ("cpu", {"avx512_bf16": True}, "bf16"),
        ("cpu", {"amx_bf16": True}, "bf16"),
    ],
)
def test_auto_precision_is_bf16_where_the_hardware_multiplies_it(machine, device, hardware, expected):
    machine(cuda=1, mps=True, **hardware)
    assert pick_precision("auto", torch.device(device)) == expected


def test_a_wanted_precision_is_kept_but_fp16_on_a_cpu():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [pick_precision(wanted, cpu) for wanted in ("fp32", "bf16")] == ["fp32", "bf16"]
    assert pick_precision("fp16", cuda) == "fp16"
    with pytest.raises(UsageError, match=r"train\.precision fp16.*use fp32 or bf16"):
        pick_precision("fp16", cpu)


@pytest.mark.parametrize(
    ("device", "programs", "triton", "possible"),
    [
        ("cpu", ["g++"], False, True),
        ("cpu", ["clang++"], False, True),
        ("cpu", ["gcc"], True, False),
        ("cpu", [], True, False),
        ("cuda", ["gcc"], True, True),
        ("cuda", ["gcc"], False, False),
        ("cuda", ["g++"], True, False),
    ],
)
def test_compiling_needs_a_compiler_and_on_cuda_triton(monkeypatch, device, programs, triton, possible):
    monkeypatch.setattr("shutil.which", lambda program: program if program in programs else None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: triton or None)
    assert can_compile(torch.device(device)) == possible


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_computes_in_the_precision(precision, dtype):
    with autocast(torch.device("cpu"), precision):
        assert torch.nn.functional.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype == dtype


@pytest.mark.parametrize(
    ("library", "calls"),
    [(("glibc", "2.36"), [(-4, 0), (-1, -1)]), (("musl", "1.2"), []), (("", ""), [])],
)
def test_freed_memory_is_kept_where_the_c_library_is_glibc_and_others_are_left_alone(monkeypatch, library, calls):
    made: list[tuple[int, int]] = []

    def open_library(name: None) -> SimpleNamespace:
        return SimpleNamespace(mallopt=lambda option, value: made.append((option, value)))

    monkeypatch.setattr(platform, "libc_ver", lambda: library)
    monkeypatch.setattr(ctypes, "CDLL", open_library)
    keep_freed_memory()
    assert made == calls
