import math

import pytest

from quatrain.errors import ConfigError
from quatrain.model.config import ModelConfig


def test_the_defaults_are_gpt2_124m():
    config = ModelConfig()
    assert (config.n_layer, config.n_head, config.n_embd, config.block_size) == (12, 12, 768, 1024)
    assert (config.position, config.norm, config.mlp) == ("learned", "layernorm", "gelu_tanh")
    assert config.bias
    assert config.tied
    assert not config.qk_norm
    assert config.dropout == 0


@pytest.mark.parametrize(
    ("mlp", "n_embd", "width"),
    [
        ("gelu_tanh", 768, 3072),
        ("relu2", 768, 3072),
        ("swiglu", 768, 2048),  # 8/3 of the width, exactly
        ("swiglu", 1024, 2752),  # 2730.67 rounded up to a multiple of 64
        ("swiglu", 24, 64),
        ("swiglu", 25, 128),
    ],
)
def test_the_mlp_is_four_times_as_wide_or_for_swiglu_eight_thirds_rounded_up_to_64(mlp, n_embd, width):
    assert ModelConfig(mlp=mlp, n_embd=n_embd, n_head=1).mlp_width == width


@pytest.mark.parametrize(
    ("vocab_size", "multiple", "padded"),
    [(50257, 64, 50304), (50304, 64, 50304), (50305, 64, 50368), (65, 1, 65), (1, 64, 64)],
)
def test_the_vocabulary_is_padded_up_to_the_multiple(vocab_size, multiple, padded):
    assert ModelConfig(vocab_size=vocab_size, vocab_multiple=multiple).padded_vocab_size == padded


@pytest.mark.parametrize(("n_kv_head", "resolved"), [(0, 12), (12, 12), (4, 4), (1, 1)])
def test_no_kv_heads_means_as_many_as_query_heads(n_kv_head, resolved):
    assert ModelConfig(n_kv_head=n_kv_head).kv_heads == resolved


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"n_embd": 770}, "n_embd 770 is not a multiple of n_head 12; nearest: 768"),
        ({"n_embd": 5, "n_head": 8}, "n_embd 5 is not a multiple of n_head 8; nearest: 8"),
        ({"n_kv_head": 5}, "n_head 12 is not a multiple of n_kv_head 5"),
        ({"n_kv_head": 24}, "n_head 12 is not a multiple of n_kv_head 24"),
        ({"n_kv_head": -1}, "n_kv_head is -1, it must be at least 0"),
        ({"position": "rope", "n_embd": 36}, "n_embd / n_head is 3; rope turns pairs of channels, so it must be even"),
        ({"n_layer": 0}, "n_layer is 0, it must be at least 1"),
        ({"n_head": 0}, "n_head is 0, it must be at least 1"),
        ({"block_size": 0}, "block_size is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"vocab_multiple": 0}, "vocab_multiple is 0"),
        ({"dropout": 1.0}, "dropout is 1.0, it must be at least 0 and below 1"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"dropout": math.nan}, "dropout is nan, it must be finite"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0, it must be above 0"),
        ({"rope_theta": math.nan}, "rope_theta is nan, it must be finite"),
    ],
)
def test_a_shape_that_cannot_be_built_is_named_with_its_value(values, words):
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**values)
    assert words in str(caught.value)
    assert len(caught.value.mistakes) == 1


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        ModelConfig(n_embd=770, n_kv_head=5, dropout=2.0, rope_theta=-1.0)
    assert len(caught.value.mistakes) == 4
    with pytest.raises(ConfigError) as caught:
        ModelConfig(n_layer=0, n_head=0, vocab_size=-3)
    assert len(caught.value.mistakes) == 3


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"logit_softcap": -1.0}, "logit_softcap is -1.0, it must be above 0, or 0 for none"),
        ({"logit_softcap": math.nan}, "logit_softcap is nan, it must be finite"),
        ({"mlp": "relu"}, "mlp is 'relu', expected one of: gelu_tanh, swiglu, relu2 (did you mean 'relu2'?)"),
    ],
)
def test_a_switch_that_cannot_be_set_so_is_told_once(values, words):
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**values)
    assert caught.value.mistakes == [words]
