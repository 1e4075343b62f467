"""Claim: losses are those of cross entropy, and greedy decoding takes the first of the likeliest ids."""

from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quatrain.inference import predictions as module
from quatrain.inference.forward import Forward
from quatrain.inference.predictions import predictions
from quatrain.model.config import ModelConfig


class Table:
    """A head whose logits are the hidden states."""

    config = ModelConfig(vocab_size=6)

    def logits(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("at_once", [1, 13, 1 << 20])
def test_losses_and_greed_are_those_of_all_logits_at_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", {"cpu": at_once})
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (500, 6), generator=generator).float()  # the largest is often there twice
    targets = torch.randint(0, 6, (500,), generator=generator)
    found = predictions(cast(Forward, Table()), logits, targets)
    assert torch.allclose(found.losses, F.cross_entropy(logits, targets, reduction="none"), atol=1e-6)
    assert torch.equal(found.greedy, logits.argmax(dim=-1) == targets)
    largest = logits.gather(1, targets[:, None])[:, 0] == logits.amax(dim=-1)
    assert int((largest & ~found.greedy).sum()) > 50  # ties that another id wins
