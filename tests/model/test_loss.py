import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quatrain.model import loss as loss_module
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.loss import HeadLoss, summed_loss
from quatrain.tokens.loader import Batch, batch_of
from quatrain.tokens.packing import IGNORED


def target_losses(gpt: GPT, batch: Batch) -> torch.Tensor:
    """The loss of each target, one after the other."""
    one = [
        [Batch(batch.inputs[row : row + 1], only(batch.targets, row, t), 1, *packed(batch, row)) for t in range(12)]
        for row in range(len(batch.inputs))
    ]
    return torch.stack([torch.stack([summed_loss(gpt, each) for each in row]) for row in one])


def only(targets: torch.Tensor, row: int, place: int) -> torch.Tensor:
    kept = torch.full_like(targets[row : row + 1], IGNORED)
    kept[0, place] = targets[row, place]
    return kept


def packed(batch: Batch, row: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    one = slice(row, row + 1)
    return (None, None) if batch.documents is None else (batch.documents[one], batch.positions[one])


CONFIG = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=12, vocab_size=11)
EOT = 10


def model(**switches) -> GPT:
    return GPT(ModelConfig(**{**vars(CONFIG), **switches}), torch.Generator().manual_seed(0)).eval()


def a_batch(packing="concat", rows: int = 3) -> Batch:
    windows = torch.randint(0, 11, (rows, 13), generator=torch.Generator().manual_seed(1))
    return batch_of(windows.numpy(), packing, EOT, torch.device("cpu"))


def ignoring(batch: Batch, ignored: torch.Tensor) -> Batch:
    targets = batch.targets.masked_fill(ignored, IGNORED)
    return Batch(batch.inputs, targets, int((~ignored).sum()), batch.documents, batch.positions)


@pytest.mark.parametrize("packing", ["concat", "document"])
def test_the_loss_is_minus_the_log_of_each_targets_probability(packing):
    gpt, batch = model(), a_batch(packing)
    with torch.no_grad():
        losses = target_losses(gpt, batch)
        probabilities = gpt(batch.inputs, batch.documents, batch.positions).double().softmax(dim=-1)
        expected = -probabilities.gather(-1, batch.targets[..., None])[..., 0].log()
        assert losses.dtype == torch.float32
        assert losses.shape == batch.targets.shape
        torch.testing.assert_close(losses.double(), expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(summed_loss(gpt, batch), losses.sum(), atol=1e-5, rtol=0)


def test_the_document_mask_reaches_the_loss():
    gpt = model()
    packed, plain = a_batch("document"), a_batch("concat")
    assert not torch.equal(target_losses(gpt, packed), target_losses(gpt, plain))


def test_ignored_targets_count_nothing():
    gpt, batch = model(), a_batch()
    ignored = torch.rand(batch.targets.shape, generator=torch.Generator().manual_seed(2)) < 0.4
    losses, expected = target_losses(gpt, ignoring(batch, ignored)), target_losses(gpt, batch)
    assert not losses[ignored].any()
    assert torch.equal(losses[~ignored], expected[~ignored])
    torch.testing.assert_close(summed_loss(gpt, ignoring(batch, ignored)), expected[~ignored].sum())


def test_case_46_a_row_without_targets_leaves_loss_and_gradients_of_the_others_alone():
    gpt, batch = model(), a_batch()
    ignored = torch.zeros(batch.targets.shape, dtype=torch.bool)
    ignored[1] = True
    two_rows = Batch(batch.inputs[[0, 2]], batch.targets[[0, 2]], 24)
    gradients = []
    for each in (ignoring(batch, ignored), two_rows):
        gpt.zero_grad()
        summed_loss(gpt, each).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in gpt.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=0)
    assert summed_loss(gpt, ignoring(batch, torch.ones_like(ignored))).item() == 0  # and no nan


@pytest.mark.parametrize("vocab_multiple", [1, 64, 1024])
def test_a_fresh_model_starts_at_ln_of_the_true_vocabulary(vocab_multiple):
    gpt, batch = model(vocab_multiple=vocab_multiple), a_batch(rows=40)
    mean = summed_loss(gpt, batch).item() / batch.valid
    assert math.log(11) - 0.03 < mean < math.log(11) + 0.03


def test_under_bf16_the_softmax_is_fp32():
    gpt, batch = model(), a_batch()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logits = gpt(batch.inputs)
        assert logits.dtype == torch.bfloat16
        losses = target_losses(gpt, batch)
        assert summed_loss(gpt, batch).dtype == losses.dtype == torch.float32
    expected = logits.float().logsumexp(-1) - logits.float().gather(-1, batch.targets[..., None])[..., 0]
    torch.testing.assert_close(losses, expected, atol=1e-6, rtol=0)


def test_the_loss_of_a_bf16_model_is_summed_in_fp32():
    gpt, batch = model().to(torch.bfloat16), a_batch(rows=40)
    assert gpt(batch.inputs).dtype == torch.bfloat16
    losses = target_losses(gpt, batch)
    assert summed_loss(gpt, batch).dtype == losses.dtype == torch.float32
    torch.testing.assert_close(summed_loss(gpt, batch), losses.sum(), atol=1e-2, rtol=0)


# The loss in chunks against the plain one over all logits


def plain_loss(gpt: GPT, batch: Batch) -> torch.Tensor:
    """The same from all logits at once."""
    logits = gpt(batch.inputs, batch.documents, batch.positions).float()
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")


def with_gradients(gpt: GPT, loss: Callable[[GPT, Batch], torch.Tensor], batch: Batch) -> list[torch.Tensor]:
    """A loss and its gradient by each parameter, of the mean."""
    gpt.zero_grad()
    found = loss(gpt, batch) / max(1, batch.valid)
    found.backward()
    return [found.detach(), *(parameter.grad for parameter in gpt.parameters())]


def differ(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative difference of a tensor, by norms."""
    return max(
        float((one - other).norm() / other.norm().clamp(min=1e-30)) for one, other in zip(found, expected, strict=True)
    )


def lively(gpt: GPT) -> GPT:
    """Logits that are far from alike."""
    with torch.no_grad():
        for table in {gpt.transformer["wte"].weight, gpt.head_weight}:
            table *= 50
    return gpt


@pytest.fixture(params=["one chunk", "two", "a row each"])
def cuts(request, monkeypatch):
    """How many of the 36 targets are in a chunk, and in a block of it; the last of two chunks is the smaller one."""
    rows, block = {"one chunk": (1000, 7), "two": (23, 5), "a row each": (1, 1)}[request.param]
    monkeypatch.setattr(loss_module, "CHUNK", rows * 64)
    monkeypatch.setattr(loss_module, "BLOCK", block * 64)


KINDS = [{}, {"tied": False}, {"logit_softcap": 3.0}, {"tied": False, "logit_softcap": 3.0}, {"vocab_multiple": 1}]


@pytest.mark.parametrize("switches", KINDS, ids=lambda switches: "-".join(switches) or "gpt2")
@pytest.mark.parametrize("share", [0.0, 0.4], ids=["all targets", "some ignored"])
def test_loss_and_gradients_are_those_of_all_logits_at_once(cuts, switches, share):
    gpt, batch = lively(model(**switches)), a_batch("document")
    batch = ignoring(batch, torch.rand(batch.targets.shape, generator=torch.Generator().manual_seed(2)) < share)
    found, expected = (with_gradients(gpt, loss, batch) for loss in (summed_loss, plain_loss))
    assert differ(found, expected) < 1e-6
    assert not gpt.head_weight.grad[11:].any()  # the vocabulary's padding
    assert not gpt.transformer["wte"].weight.grad[11:].any()


def test_the_comparison_sees_a_softmax_over_the_padding(monkeypatch):
    gpt, batch = lively(model(tied=False)), a_batch()
    expected = with_gradients(gpt, plain_loss, batch)
    right = loss_module._losses
    monkeypatch.setattr(loss_module, "_losses", lambda logits, places, vocab, *rest: right(logits, places, 64, *rest))
    assert differ(with_gradients(gpt, summed_loss, batch), expected) > 1e-3


@pytest.mark.parametrize("switches", KINDS, ids=lambda switches: "-".join(switches) or "gpt2")
def test_case_46_without_any_target_loss_and_gradients_are_zero(cuts, switches):
    gpt, batch = model(**switches), a_batch()
    nothing = ignoring(batch, torch.ones_like(batch.targets, dtype=torch.bool))
    assert not any(tensor.any() for tensor in with_gradients(gpt, summed_loss, nothing))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_of_hundreds_of_nats_is_finite_and_exact(dtype):
    hidden = torch.tensor([[300.0, 0.0], [0.0, 512.0]], dtype=dtype, requires_grad=True)
    weight = torch.eye(2, dtype=dtype).requires_grad_()
    targets = torch.tensor([1, 1])  # the first is 300 nats away, the second is certain
    loss = HeadLoss.apply(hidden, weight, targets, 2, 0.0, True)
    loss.backward()
    assert loss.item() == 300
    assert hidden.grad.tolist() == [[1, -1], [0, 0]]
    assert weight.grad.tolist() == [[300, 0], [-300, 0]]


@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_what_comes_after_the_loss_reaches_its_gradients(cuts, factor):
    gpt, batch = lively(model()), a_batch()
    found, expected = (
        with_gradients(gpt, lambda gpt, batch, loss=loss: factor * loss(gpt, batch) + 1, batch)
        for loss in (summed_loss, plain_loss)
    )
    assert differ(found, expected) < 1e-6


def test_without_gradients_none_is_computed(monkeypatch):
    gpt, batch = model(), a_batch()
    expected = summed_loss(gpt, batch).detach()

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr(torch, "mm", never)
    monkeypatch.setattr(loss_module, "_added", never)
    with torch.no_grad():
        assert torch.equal(summed_loss(gpt, batch), expected)
    gpt.requires_grad_(False)
    assert torch.equal(summed_loss(gpt, batch), expected)
    with pytest.raises(AssertionError, match="a gradient was computed"):
        summed_loss(gpt.requires_grad_(True), batch)


@pytest.mark.parametrize("switches", KINDS, ids=lambda switches: "-".join(switches) or "gpt2")
def test_under_bf16_autocast_loss_and_gradients_are_near_those_of_fp32(cuts, switches):
    gpt, batch = model(**switches), a_batch(rows=3)
    expected = with_gradients(gpt, plain_loss, batch)
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(gpt, summed_loss, batch)
    assert found[0].dtype == torch.float32
    assert {gradient.dtype for gradient in found[1:]} == {torch.float32}  # of fp32 weights
    assert differ(found[:1], expected[:1]) < 2e-3
    together, theirs = (torch.cat([gradient.flatten() for gradient in each[1:]]) for each in (found, expected))
    assert 0 < (together - theirs).norm() < 0.02 * theirs.norm()


class Largest(TorchDispatchMode):
    """The most elements of an fp32 tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32:
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_logits_of_all_targets_are_never_held_in_fp32(precision, softcap, monkeypatch):
    """In fp32 no more than a chunk of them, in bf16 no more than a block, forward and backward."""
    chunk, block, V = 16, 4, 2048
    monkeypatch.setattr(loss_module, "CHUNK", chunk * V)
    monkeypatch.setattr(loss_module, "BLOCK", block * V)
    gpt = model(vocab_size=V, n_embd=2, block_size=8, tied=False, logit_softcap=softcap)
    windows = torch.randint(0, V, (64, 9), generator=torch.Generator().manual_seed(1))
    batch = batch_of(windows.numpy(), "concat", EOT, torch.device("cpu"))

    def largest(loss: Callable[[GPT, Batch], torch.Tensor]) -> int:
        with Largest() as seen, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            with_gradients(gpt, loss, batch)
        return seen.elements

    allowed = (chunk if precision == "fp32" else block) * V
    assert largest(plain_loss) >= 512 * V  # the fault
    assert largest(summed_loss) <= allowed
