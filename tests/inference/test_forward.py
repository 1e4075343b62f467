"""Claim: the functions compute what the modules compute, for every switch, packed or not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import EOT, build, configurations, ids_of, small

from quatrain.inference import products
from quatrain.inference.forward import Forward
from quatrain.model.config import ModelConfig


@settings(max_examples=20)
@given(configurations(), st.booleans(), st.booleans())
def test_hidden_states_and_logits_are_those_of_the_modules(config: ModelConfig, documents: bool, packed: bool) -> None:
    model = build(config)
    ids = torch.tensor(ids_of(3, config.block_size))
    of = (ids == EOT).cumsum(dim=1) if documents else None
    at = torch.arange(config.block_size).flip(0).expand_as(ids) if documents else None
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        if not packed:
            patch.setattr(products, "fastest", lambda dtype, device: products.Plain)
        forward = Forward(model)
        found = forward.hidden(ids, at, documents=of)
        expected = model.hidden(ids, of, at)
        assert torch.allclose(found.view_as(expected), expected, atol=1e-4)
        assert torch.allclose(forward.logits(found).view(*ids.shape, -1), model.head(expected), atol=1e-4)


def test_dropout_is_never_applied_whatever_the_mode() -> None:
    model = small(dropout=0.5).train()
    ids = torch.tensor(ids_of(2, 8))
    forward = Forward(model)
    with torch.inference_mode():
        before = forward.hidden(ids)
        assert torch.equal(forward.hidden(ids), before)
        assert model.training
        assert torch.allclose(model.eval().hidden(ids).flatten(0, 1), before, atol=1e-4)


def test_more_ids_than_the_model_sees_are_refused() -> None:
    with pytest.raises(ValueError, match="17 ids in a row, the model sees at most block_size 16"):
        Forward(small()).hidden(torch.zeros(1, 17, dtype=torch.long))
