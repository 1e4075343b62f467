"""Model FLOPs utilization, against counts made by hand."""

import pytest
import torch

from quatrain.model.config import ModelConfig
from quatrain.training import flops
from quatrain.training.flops import flops_per_token, peak_flops

GPT2 = ModelConfig(vocab_size=50257)
POSITIONS = 1024 * 768


def test_gpt2_124m_takes_six_flops_a_parameter_and_those_of_attention() -> None:
    products = 124_439_808 - POSITIONS  # the position embedding is no matrix product; the tied head is one
    assert flops_per_token(GPT2, 1024) == 6 * products + 12 * 12 * 1024 * 768
    assert flops_per_token(GPT2, 512) == 6 * products + 12 * 12 * 512 * 768


def test_an_untied_embedding_is_looked_up_and_not_multiplied() -> None:
    untied = ModelConfig(vocab_size=50257, tied=False)
    assert flops_per_token(untied, 1024) == flops_per_token(GPT2, 1024)
    assert flops_per_token(ModelConfig(vocab_size=50257, position="rope"), 1024) == flops_per_token(GPT2, 1024)


@pytest.mark.parametrize("tied", [True, False])
def test_it_is_the_same_arithmetic_whatever_names_the_weights_have_in_files(tied: bool) -> None:
    shape = {"n_layer": 2, "n_embd": 96, "n_head": 2, "vocab_size": 11, "tied": tied}
    llama = ModelConfig(position="rope", norm="rmsnorm", mlp="swiglu", bias=False, **shape)
    block = 4 * 96 * 96 + 3 * 96 * 256 + 2 * 96  # attention, gate, up and down, two norms
    assert flops_per_token(llama, 16) == 6 * (2 * block + 96 + 11 * 96) + 12 * 2 * 16 * 96


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_peak_of_a_cpu_is_that_of_a_matrix_product_in_the_runs_precision(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, clock = [], iter([0.0, 4.0, 10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr(flops.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(flops.F, "linear", lambda a, b: seen.append((a.dtype, a.shape, b.shape)))
    assert flops.measured_peak(precision, size=10, tries=3) == 2 * 10**3 / 2.0  # the best of the three
    assert set(seen) == {({"fp32": torch.float32, "bf16": torch.bfloat16}[precision], (10, 10), (10, 10))}
    monkeypatch.undo()
    assert peak_flops(torch.device("cpu"), precision) > 1e8


def test_the_peak_of_other_devices_is_not_known() -> None:
    assert peak_flops(torch.device("mps"), "fp32") is None


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA A100-SXM4-40GB", "fp16", 312e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 494.7e12),  # TF32
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("Some Other GPU", "bf16", None),
    ],
)
def test_a_peak_is_found_by_the_name_of_the_device(
    name: str, precision: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda"), precision) == peak
