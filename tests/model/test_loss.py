import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quatrain.model import loss
from quatrain.model.config import ModelConfig
from quatrain.model.gpt import GPT
from quatrain.model.loss import summed_loss
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


def plain_loss(gpt: GPT, batch: Batch) -> torch.Tensor:
    """Cross-entropy of whole logits, in fp64."""
    logits = gpt(batch.inputs, batch.documents, batch.positions).double()
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def gradients(gpt: GPT, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    gpt.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in gpt.named_parameters()}


@pytest.mark.parametrize("chunk", [1 << 27, 64 * 7, 1])  # all rows, seven, one at a time
@pytest.mark.parametrize("softcap", [0.0, 0.5])
@pytest.mark.parametrize("tied", [True, False])
def test_in_chunks_it_is_the_plain_loss_with_the_plain_gradients(chunk, softcap, tied, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK", chunk)
    monkeypatch.setattr(loss, "BLOCK", 64 * 3)
    gpt, batch = model(logit_softcap=softcap, tied=tied), a_batch()
    with torch.no_grad():
        gpt.transformer["ln_f"].weight *= 20  # logits that the cap bends
    batch = ignoring(batch, torch.rand(batch.targets.shape, generator=torch.Generator().manual_seed(2)) < 0.4)
    expected, found = plain_loss(gpt, batch), summed_loss(gpt, batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    of_plain, ours = gradients(gpt, expected), gradients(gpt, found)
    for name, gradient in of_plain.items():
        assert float((ours[name] - gradient).norm()) <= 1e-6 * float(gradient.norm()), name
    for name in {"transformer.wte.weight", "lm_head.weight"} & ours.keys():
        assert not ours[name][11:].any()  # the padding of the vocabulary


def test_a_target_that_the_model_rules_out_has_a_finite_loss():
    gpt, batch = model(), a_batch()
    with torch.no_grad():
        gpt.transformer["ln_f"].weight *= 5e4
    assert summed_loss(gpt, batch).item() > 200 * batch.valid
    assert summed_loss(gpt, batch).isfinite()


def test_the_factor_of_the_loss_reaches_the_gradient():
    gpt, batch = model(), a_batch()
    once, thrice = gradients(gpt, summed_loss(gpt, batch)), gradients(gpt, 3 * summed_loss(gpt, batch))
    for name, gradient in once.items():
        torch.testing.assert_close(thrice[name], 3 * gradient, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """Notes the largest fp32 tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.numel = max(self.numel, tensor.numel())
        return made


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fp32_logits_of_a_whole_batch_are_never_held(precision, monkeypatch):
    rows, V = 4, 4096
    monkeypatch.setattr(loss, "CHUNK", V * 12)
    monkeypatch.setattr(loss, "BLOCK", V * 2)
    gpt, batch = model(vocab_size=V), a_batch(rows=rows)
    found = {}
    for name, function in {"ours": summed_loss, "plain": plain_loss32}.items():
        with Largest() as largest, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            function(gpt, batch).backward()
        found[name] = largest.numel
    assert found["plain"] >= rows * 12 * V
    assert found["ours"] <= max(V * 12, 16 * V)  # a chunk, or the embedding's gradient


def plain_loss32(gpt: GPT, batch: Batch) -> torch.Tensor:
    logits = gpt(batch.inputs).float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), reduction="sum")


def test_without_gradients_only_the_logits_are_computed(monkeypatch):
    gpt, batch, products = model(), a_batch(), []
    monkeypatch.setattr(loss, "_added", lambda *rest: products.append(rest))
    with torch.no_grad():
        summed_loss(gpt, batch)
    assert products == []
