"""One step: the gradient however the batch is cut, clipping, what is not finite, and dropout."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from quatrain.errors import QuatrainError
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.loss import loss_of, summed_loss
from quatrain.tokens.config import DataConfig
from quatrain.tokens.loader import Batch, Loader, batch_of
from quatrain.tokens.packing import IGNORED
from quatrain.tokens.store import TokenStream
from quatrain.training.config import OptimConfig
from quatrain.training.optim import build_optimizer
from quatrain.training.step import Step, accumulate

ROWS, T, VOCAB, EOT = 8, 12, 50, 49


def network(dropout: float = 0.0) -> GPT:
    config = ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=T, vocab_size=VOCAB, dropout=dropout)
    return GPT(config, torch.Generator().manual_seed(3))


def windows(rows: int = ROWS, seed: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, size=(rows, T + 1))


def whole_batch(packing: str = "concat") -> Batch:
    return batch_of(windows(), packing, EOT, torch.device("cpu"))


def masked(batch: Batch) -> Batch:
    """Ignored targets, ever more of them from row to row; the last row has one that counts."""
    targets = batch.targets.clone()
    for row in range(ROWS):
        targets[row, : round(row / (ROWS - 1) * (T - 1))] = IGNORED
    return replace(batch, targets=targets, valid=int((targets != IGNORED).sum()))


def cut(batch: Batch, pieces: int) -> list[Batch]:
    """The same rows as micro-batches."""
    documents = batch.documents.chunk(pieces) if batch.documents is not None else [None] * pieces
    positions = batch.positions.chunk(pieces) if batch.positions is not None else [None] * pieces
    return [
        Batch(inputs, targets, int((targets != IGNORED).sum()), *packed)
        for inputs, targets, *packed in zip(
            batch.inputs.chunk(pieces), batch.targets.chunk(pieces), documents, positions, strict=True
        )
    ]


def gradient(model: GPT) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def gradient_of(batches: list[Batch], valid: int) -> tuple[float, Tensor]:
    model = network()
    return float(accumulate(model, batches, valid)), gradient(model)


def one_step(model: GPT, clip: float = 1.0, lr: float = 0.0, precision: str = "fp32", seed: int = 5) -> Step:
    return Step(model, build_optimizer(model, OptimConfig(lr=lr, weight_decay=0.0)), precision, clip, seed)


def bits(model: GPT, optimizer: torch.optim.Optimizer) -> bytes:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return b"".join(tensor.detach().numpy().tobytes() for tensor in [*model.parameters(), *states])


@pytest.mark.parametrize("pieces", [2, 4, 8])
@pytest.mark.parametrize("packing", ["concat", "document"])
def test_accumulated_micro_batches_give_the_gradient_of_the_large_batch(pieces: int, packing: str) -> None:
    batch = whole_batch(packing)
    loss, whole = gradient_of([batch], batch.valid)
    accumulated_loss, accumulated = gradient_of(cut(batch, pieces), batch.valid)
    assert (accumulated - whole).norm() / whole.norm() < 1e-6
    assert accumulated_loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_case_37_unevenly_ignored_targets_change_neither_loss_nor_gradient(pieces: int) -> None:
    batch = masked(whole_batch())
    loss, whole = gradient_of([batch], batch.valid)
    accumulated_loss, accumulated = gradient_of(cut(batch, pieces), batch.valid)
    assert (accumulated - whole).norm() / whole.norm() < 1e-6
    assert accumulated_loss == pytest.approx(loss, rel=1e-6)
    planted = network()  # the mean of the micro-batches' means
    for piece in cut(batch, pieces):
        (summed_loss(planted, piece) / piece.valid / pieces).backward()
    assert (gradient(planted) - whole).norm() / whole.norm() > 1e-2


@pytest.mark.parametrize("packing", ["pad", "best_fit"])
def test_case_37_packed_rows_give_the_same_gradient_in_one_batch_and_in_four(packing: str) -> None:
    lengths = np.random.default_rng(6).choice([5, 8, 9, 10, 22], 60)  # no two fill a row
    ids = np.random.default_rng(7).integers(0, EOT, int(lengths.sum()) + 1)
    borders = np.cumsum([0, *lengths])
    ids[borders] = EOT
    loader = Loader(TokenStream([ids], borders[:-1].astype(np.uint64)), DataConfig(seq_len=T, packing=packing), EOT)
    whole, pieces = loader.batch(0, 20), [loader.batch(first, 5) for first in range(0, 20, 5)]
    counts = [piece.valid for piece in pieces]
    assert sum(counts) == whole.valid < 20 * T
    assert len(set(counts)) > 1
    loss, gradient_whole = gradient_of([whole], whole.valid)
    loss_cut, gradient_cut = gradient_of(pieces, sum(counts))
    assert loss_cut == pytest.approx(loss, rel=1e-6)
    assert (gradient_cut - gradient_whole).norm() / gradient_whole.norm() < 1e-6


def test_case_46_a_row_of_padding_alone_changes_nothing() -> None:
    batch = whole_batch("document")
    assert batch.documents is not None
    assert batch.positions is not None
    nothing = Batch(
        torch.cat([batch.inputs, torch.full((1, T), EOT)]),
        torch.cat([batch.targets, torch.full((1, T), IGNORED)]),
        batch.valid,
        torch.cat([batch.documents, torch.ones(1, T, dtype=torch.int64)]),
        torch.cat([batch.positions, torch.arange(T)[None]]),
    )
    loss, expected = gradient_of([batch], batch.valid)
    for cut_up in ([nothing], cut(nothing, 9)):  # beside others, and as a micro-batch of its own
        padded_loss, found = gradient_of(cut_up, batch.valid)
        assert padded_loss == pytest.approx(loss, rel=1e-6)
        assert (found - expected).norm() / expected.norm() < 1e-6


def test_the_loss_of_a_step_is_the_mean_over_its_valid_targets() -> None:
    batch = masked(whole_batch())
    with torch.no_grad():
        logits = network()(batch.inputs).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED)
    assert one_step(network())(0, 0.0, cut(batch, 4), batch.valid).loss == pytest.approx(float(expected), rel=1e-6)


def planted_step(clip: float, precision: str = "fp32") -> tuple[float, Tensor]:
    """The norm that a step of four micro-steps reports, and its gradient, with 1e4 added in the second one."""
    model = network()
    calls = iter(range(4))

    def plant(grad: Tensor) -> Tensor:
        return grad + (1e4 * step.scaler.get_scale() if next(calls) == 1 else 0.0)

    model.get_parameter("transformer.ln_f.weight").register_hook(plant)
    step = one_step(model, clip, precision=precision)
    batch = whole_batch()
    return step(0, 0.0, cut(batch, 4), batch.valid).grad_norm, gradient(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_case_39_the_gradient_is_clipped_once_after_all_micro_steps_and_unscaling(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm, clipped = planted_step(clip=1.0, precision=precision)
    assert norm == pytest.approx(4e4, rel=1e-2)  # 16 channels of 1e4
    assert 0.999 < float(clipped.norm()) <= 1 + 1e-6
    _, unclipped = planted_step(clip=0.0, precision=precision)
    assert (clipped - unclipped / unclipped.norm()).norm() < 1e-4

    def clipped_each_time(model: GPT, batches: list[Batch], *rest: object) -> Tensor:
        for batch in batches:
            total = accumulate(model, [batch], *rest)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return total

    monkeypatch.setattr("quatrain.training.step.accumulate", clipped_each_time)
    _, wrong = planted_step(clip=1.0, precision=precision)
    assert (wrong - unclipped / unclipped.norm()).norm() > 1e-2


def test_clipping_keeps_the_direction_and_leaves_small_gradients_alone() -> None:
    batch = whole_batch()
    _, whole = gradient_of([batch], batch.valid)
    for clip, expected in [(0.01, whole * 0.01 / whole.norm()), (1e3, whole), (0.0, whole)]:
        model = network()
        assert one_step(model, clip)(0, 0.0, [batch], batch.valid).grad_norm == pytest.approx(float(whole.norm()))
        torch.testing.assert_close(gradient(model), expected, rtol=1e-4, atol=1e-9)


def test_case_39_a_gradient_within_the_norm_is_not_touched_to_the_bit_and_a_larger_one_ends_at_it() -> None:
    batch = whole_batch()
    _, whole = gradient_of([batch], batch.valid)
    norm = float(whole.norm())
    for clip in (norm * (1 + 1e-6), 1e3, 0.0):
        model = network()
        one_step(model, clip)(0, 0.0, [batch], batch.valid)
        assert torch.equal(gradient(model), whole)
    torch.nn.utils.clip_grad_norm_(model.parameters(), norm * (1 + 1e-7))  # the fault: torch's own changes bits
    assert not torch.equal(gradient(model), whole)
    model = network()
    one_step(model, norm / 3)(0, 0.0, [batch], batch.valid)
    assert norm / 3 * (1 - 1e-4) < float(gradient(model).norm()) <= norm / 3 * (1 + 1e-6)


def test_fp16_unscales_before_it_measures_the_norm() -> None:
    batch = whole_batch()
    expected = one_step(network())(0, 0.0, [batch], batch.valid)
    found = one_step(network(), precision="fp16")(0, 0.0, [batch], batch.valid)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)
    assert found.loss == pytest.approx(expected.loss, rel=1e-3)


def test_fp16_skips_an_overflowing_update_and_halves_its_scale() -> None:
    batch = whole_batch()
    model = network()
    step = one_step(model, lr=1e-3, precision="fp16")
    step(0, 1e-3, [batch], batch.valid)
    overflow = model.get_parameter("transformer.ln_f.weight").register_hook(lambda grad: grad + float("inf"))
    before, scale = bits(model, step.optimizer), step.scaler.get_scale()
    step(1, 1e-3, [batch], batch.valid)
    assert bits(model, step.optimizer) == before
    assert step.scaler.get_scale() == scale / 2
    overflow.remove()
    step(2, 1e-3, [batch], batch.valid)
    assert bits(model, step.optimizer) != before


def test_fp16_that_overflows_at_every_scale_is_told_and_not_trained_on_for_ever() -> None:
    batch = whole_batch()
    model = network()
    step = one_step(model, lr=1e-3, precision="fp16")
    step(0, 1e-3, [batch], batch.valid)
    _infinite_gradient(model)
    before = bits(model, step.optimizer)

    def for_ever() -> None:
        for number in range(1, 60):
            step(number, 1e-3, [batch], batch.valid)

    with pytest.raises(QuatrainError, match=r"fp16 gradients overflow at every scale; stopped.* bf16 or fp32"):
        for_ever()
    assert 1 / 4 < step.scaler.get_scale() < 1
    assert bits(model, step.optimizer) == before


def test_what_is_compiled_is_the_function_from_model_to_loss_and_never_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[object] = []

    def counting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", counting)
    batch, model = whole_batch(), network()
    step = Step(model, build_optimizer(model, OptimConfig(lr=0.0)), "fp32", 1.0, 5, compiled=True)
    result = step(0, 0.0, cut(batch, 2), batch.valid)
    assert compiled == [loss_of]
    assert step.model is model
    assert result == one_step(network())(0, 0.0, cut(batch, 2), batch.valid)
    assert len(compiled) == 1


def test_gradients_of_the_step_before_are_gone() -> None:
    batch = whole_batch()
    step = one_step(network())
    assert len({step(0, 0.0, cut(batch, 2), batch.valid) for _ in range(3)}) == 1


def test_every_group_gets_the_rate_of_the_step() -> None:
    batch = whole_batch()
    step = one_step(network())
    for number, lr in enumerate([0.1, 0.02]):
        step(number, lr, cut(batch, 4), batch.valid)
        assert [group["lr"] for group in step.optimizer.param_groups] == [lr, lr]


def test_muon_gets_rate_and_momentum_of_the_step_and_adamw_the_rate() -> None:
    batch, model = whole_batch(), network()
    optimizer = build_optimizer(model, OptimConfig(kind="muon", lr=0.5, weight_decay=0.0))
    step = Step(model, optimizer, "fp32", 1.0, 5)
    for number, (lr, momentum) in enumerate([(0.1, 0.85), (0.02, 0.9)]):
        step(number, lr, [batch], batch.valid, momentum)
        groups = [(group["lr"], group.get("momentum")) for part in optimizer.parts for group in part.param_groups]
        assert groups == [(lr, momentum), (lr, None), (lr, None)]


def _nan_weight(model: GPT) -> None:
    model.get_parameter("transformer.h.0.mlp.c_fc.weight").data[0, 0] = float("nan")


def _huge_weights(model: GPT) -> None:
    model.get_parameter("transformer.ln_f.weight").data.fill_(3e38)


def _nan_gradient(model: GPT) -> None:
    model.get_parameter("transformer.ln_f.weight").register_hook(lambda grad: grad * float("nan"))


def _infinite_gradient(model: GPT) -> None:
    model.get_parameter("transformer.h.1.attn.c_proj.bias").register_hook(lambda grad: grad + float("inf"))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("poison", [_nan_weight, _huge_weights, _nan_gradient, _infinite_gradient])
def test_case_40_what_is_not_finite_stops_before_the_update(poison: object, kind: str) -> None:
    batch = whole_batch()
    model = network()
    step = Step(model, build_optimizer(model, OptimConfig(kind=kind, weight_decay=0.0)), "fp32", 1.0, 5)
    step(0, 1e-3, [batch], batch.valid)
    poison(model)
    before = bits(model, step.optimizer)
    with pytest.raises(QuatrainError, match=r"step 2: .*(nan|inf).*before the update") as raised:
        step(1, 1e-3, cut(batch, 2), batch.valid)
    assert bits(model, step.optimizer) == before
    assert raised.value.exit_code == 1


def test_case_40_without_the_check_the_same_step_would_ruin_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = whole_batch()
    model = network()
    _nan_gradient(model)
    monkeypatch.setattr(Step, "_check_finite", lambda self, step, result: None)
    one_step(model, lr=1e-3)(0, 1e-3, [batch], batch.valid)
    assert any(parameter.isnan().any() for parameter in model.parameters())


def dropped(step_number: int, seed: int, micro_steps: int = 3) -> list[bytes]:
    """Which embedding channels each micro-step of a step drops."""
    model = network(dropout=0.5).train()
    seen: list[bytes] = []
    block = model.transformer["h"][0]
    block.register_forward_pre_hook(lambda module, inputs: seen.append((inputs[0] == 0).numpy().tobytes()))
    batch = batch_of(windows(rows=1), "concat", EOT, torch.device("cpu"))
    one_step(model, seed=seed)(step_number, 0.0, [batch] * micro_steps, batch.valid * micro_steps)
    return seen


def test_dropout_differs_between_micro_steps_steps_and_seeds() -> None:
    masks = [mask for seed in (1, 2) for step in (0, 1, 2) for mask in dropped(step, seed)]
    assert len(set(masks)) == len(masks) == 18


def test_case_27_dropout_is_a_function_of_seed_step_and_micro_step() -> None:
    expected = dropped(7, seed=1)
    torch.manual_seed(random.getrandbits(60))
    torch.rand(1000)
    assert dropped(7, seed=1) == expected
    assert dropped(7, seed=1, micro_steps=2) == expected[:2]
