"""A ladder holds the base and every change that was asked for, or says all that is wrong with it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.errors import ConfigError
from quatrain.recipes.resolve import differences, flatten, options
from quatrain.recipes.switches import FIXED, SHORT, ladder

LISTS = {
    "model.mlp": ["gelu_tanh", "swiglu", "relu2"],
    "model.bias": ["true", "false"],
    "optim.lr": ["0.001", "0.002", "1e-2", "3e-4"],
    "optim.betas": ["[0.9,0.99]", "[0.8,0.95]"],
}


def names(*switches: str, product: bool = False) -> list[str]:
    return [variant.name for variant in ladder("shakespeare", (), switches, product)[0]]


def mistakes(*switches: str, flags: tuple[str, ...] = (), product: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as error:
        ladder("shakespeare", flags, switches, product)
    return error.value.mistakes


def test_one_change_at_a_time_in_the_order_given_without_the_base_s_own_values():
    assert names("model.mlp=gelu_tanh,swiglu,relu2", "optim.lr=1e-3,0.01") == [
        "base",
        "model.mlp=swiglu",
        "model.mlp=relu2",
        "optim.lr=0.01",
    ]


def test_equal_values_are_one_and_a_switch_given_twice_has_the_values_of_both():
    assert names("optim.lr=1e-2,0.01", "optim.lr=0.010,3") == ["base", "optim.lr=0.01", "optim.lr=3.0"]


def test_a_pair_stands_in_brackets_and_dashes_are_underscores():
    assert names("optim.betas=[0.9,0.99],[0.8, 0.95]", "model.n-layer=4, 5") == [
        "base",
        "optim.betas=[0.8,0.95]",
        "model.n_layer=5",
    ]


def test_the_product_is_every_combination():
    assert names("model.mlp=swiglu", "model.bias=false", product=True) == [
        "base",
        "model.bias=false",
        "model.mlp=swiglu",
        "model.mlp=swiglu + model.bias=false",
    ]


def test_no_switch_is_the_base_alone():
    assert names() == ["base"]


@given(st.data())
def test_each_variant_differs_from_the_base_in_its_switches_and_in_nothing_else(data):
    keys = data.draw(st.lists(st.sampled_from(list(LISTS)), unique=True, min_size=1))
    given_values = {key: data.draw(st.lists(st.sampled_from(LISTS[key]), min_size=1)) for key in keys}
    switches = [f"{key}={','.join(values)}" for key, values in given_values.items()]
    usual = flatten(ladder("shakespeare")[0][0].config)
    others = {key: {value for value in values if not _same(value, usual[key])} for key, values in given_values.items()}
    if not all(others.values()):
        assert len(mistakes(*switches)) == sum(not values for values in others.values())
        return
    for product, count in ((False, sum(map(len, others.values()))), (True, _grid(others))):
        (base, *variants), _ = ladder("shakespeare", (), switches, product)
        assert len({variant.name for variant in variants}) == len(variants) == count
        for variant in variants:
            changed = differences(base.config, variant.config)
            assert changed.keys() <= set(keys)
            assert len(changed) == variant.name.count("=") == (len(changed) if product else 1)


def _grid(others: dict[str, set[str]]) -> int:
    return math.prod(len(values) + 1 for values in others.values()) - 1


def _same(word: str, value: object) -> bool:
    if isinstance(value, tuple):
        return [float(part) for part in word.strip("[]").split(",")] == list(value)
    return word == str(value).lower() or (isinstance(value, float) and float(word) == value)


def test_optim_alone_is_its_kind():
    assert SHORT["optim"] in {option.key for option in options()}
    assert mistakes("optim=adamw") == ["--switch optim.kind has no value but the base's, adamw"]
    assert "--switch optim.kind is 'adamm', expected one of: adamw" in mistakes("optim=adamm")[0]


def test_all_that_is_wrong_is_told_at_once():
    told = mistakes(
        "model.mlpp=swiglu",
        "model.mlp=swigluu",
        "optim.lr",
        "train.steps=10",
        "learning_rate=1",
        flags=("--model.x=1",),
    )
    assert len(told) == 6
    for part in (
        "no option --model.x",
        "--switch model.mlpp: no such setting (did you mean 'model.mlp'?)",
        "--switch model.mlp is 'swigluu', expected one of: gelu_tanh, swiglu, relu2 (did you mean 'swiglu'?)",
        "--switch optim.lr has no value; expected optim.lr=VALUE,VALUE",
        "--switch train.steps cannot be: an ablation compares at equal tokens",
        "--switch learning_rate: no such setting (did you mean 'optim.lr'?)",
    ):
        assert any(part in mistake for mistake in told), part


def test_what_is_wrong_only_together_is_told_with_the_variant():
    assert mistakes("model.n_head=3,2,5", "optim.min_lr=1") == [
        "model.n_head=3: model.n_embd 128 is not a multiple of n_head 3; nearest: 129",
        "model.n_head=5: model.n_embd 128 is not a multiple of n_head 5; nearest: 130",
        "optim.min_lr=1.0: optim.min_lr 1.0 is above lr 0.001",
    ]


def test_every_setting_that_is_no_switch_is_one_that_exists():
    assert FIXED.keys() <= {option.key for option in options()}
