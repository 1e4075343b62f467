from pathlib import Path

import pytest
import torch

from quatrain.errors import UsageError
from quatrain.model import device as device_module
from quatrain.model.device import autocast, can_compile, fit_threads, pick_device, pick_precision


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
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu.max": "odd\n"}, None),
    ],
)
def test_the_cores_that_a_control_group_grants(files: dict[str, str], cores: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert device_module._granted_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("granted", "variable", "threads"),
    [(None, None, 8), (2.5, None, 2), (0.5, None, 1), (64.0, None, 8), (2.0, "8", 8)],
)
def test_no_more_threads_than_granted_cores(granted, variable, threads, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to = [8]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(device_module, "_granted_cores", lambda: granted)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    fit_threads()
    assert set_to[-1] == threads
