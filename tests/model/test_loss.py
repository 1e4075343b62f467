import math

import pytest
import torch

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
