import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quatrain.inference import products
from quatrain.inference.products import Int8, Int8Packed, Packed, Plain, fastest, product_of, resolved

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _probed_anew():
    fastest.cache_clear()
    yield
    fastest.cache_clear()


def operands(rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(*shape, generator=generator) for shape in ((rows, 96), (64, 96), (64,)))


@pytest.mark.parametrize("kind", [Plain, Packed])
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_products_of_floats(kind: type, dtype: str, tolerance: float, rows: int) -> None:
    x, weight, bias = operands(rows)
    expected = F.linear(x, weight, bias)
    assert float((kind(weight, bias, dtype)(x) - expected).norm() / expected.norm()) < tolerance
    assert kind(weight, None, dtype)(x).shape == (rows, 64)


def by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """int8 by whole numbers: a scale for each output channel and for each row."""
    scales = weight.abs().amax(1) / 127, x.abs().amax(1, keepdim=True) / 127
    whole = [(weight / scales[0][:, None]).round().long(), (x / scales[1]).round().long()]
    return (whole[1] @ whole[0].T) * scales[1] * scales[0] + bias


@pytest.mark.parametrize("kind", [Int8, Int8Packed])
def test_int8_is_the_product_of_whole_numbers(kind: type) -> None:
    x, weight, bias = operands()
    assert torch.allclose(kind(weight, bias, "int8")(x), by_hand(x, weight, bias), atol=1e-4)
    exact = F.linear(x, weight, bias)
    assert 1e-3 < float((kind(weight, bias, "int8")(x) - exact).norm() / exact.norm()) < 2e-2


@pytest.mark.parametrize("kind", [Int8, Int8Packed])
def test_rows_are_quantized_for_themselves_and_zeros_are_no_numbers_to_divide_by(kind: type) -> None:
    x, weight, bias = operands()
    product = kind(weight, bias, "int8")
    alone = product(x[:1])
    x[1:] *= 1e6
    x[2] = 0
    together = product(x)
    assert torch.equal(together[:1], alone)
    assert torch.equal(together[2], bias)


def test_a_kernel_that_saturates_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Int8Packed, "__call__", lambda self, x: Int8.__call__(self, x).clamp(max=1e5))
    monkeypatch.setattr(Int8Packed, "pack", Int8.pack)
    assert fastest("int8", "cpu") is Int8
    monkeypatch.setattr(Int8, "__call__", lambda self, x: x[:, :1].expand(-1, 32))
    fastest.cache_clear()
    assert fastest("int8", "cpu") is Plain


def test_where_int8_does_not_run_it_is_bf16_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(Int8, "pack", missing)
    monkeypatch.setattr(Int8Packed, "pack", missing)
    assert resolved("int8", CPU) == "bf16"
    x, weight, bias = operands()
    assert product_of(weight, bias, "int8")(x).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_probe_takes_what_is_right(dtype: str) -> None:
    assert fastest(dtype, "cpu") in products.WAYS[dtype]
    assert resolved(dtype, CPU) == dtype
