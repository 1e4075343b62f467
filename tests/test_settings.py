import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import pytest

from quatrain.errors import ConfigError
from quatrain.settings import Settings, coerce, option


@dataclass(frozen=True)
class Oven(Settings):
    heat: float = option(180.0, "how hot", "degrees")
    shelf: int = option(2, "which shelf, from below")

    def mistakes(self) -> Iterator[str]:
        yield from self.at_least(0, ["heat"])
        yield from self.at_least(1, ["shelf"])


@dataclass(frozen=True)
class TwoOvens(Settings):
    heats: tuple[float, float] = option((180.0, 200.0), "how hot each is", "degrees")
    mode: Literal["bake", "grill"] = option("bake", "from where the heat comes")


@dataclass(frozen=True)
class Seeded(Settings):
    seed: int = option(1, "seed of it")

    def mistakes(self) -> Iterator[str]:
        yield from self.seed_in_range()


def test_an_option_carries_default_sentence_and_unit():
    heat, shelf = dataclasses.fields(Oven)
    assert (heat.default, dict(heat.metadata)) == (180.0, {"sentence": "how hot", "unit": "degrees"})
    assert (shelf.default, dict(shelf.metadata)) == (2, {"sentence": "which shelf, from below", "unit": ""})
    assert Oven() == Oven(180.0, 2)


def test_all_mistakes_are_raised_at_once():
    with pytest.raises(ConfigError) as caught:
        Oven(heat=-1.0, shelf=0)
    assert caught.value.mistakes == ["heat is -1.0, it must be at least 0", "shelf is 0, it must be at least 1"]


def test_at_least_includes_its_minimum():
    assert Oven(heat=0.0).heat == 0
    with pytest.raises(ConfigError, match=r"^heat is -0\.001, it must be at least 0$"):
        Oven(heat=-0.001)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_told_once(number):
    with pytest.raises(ConfigError) as caught:
        Oven(heat=number, shelf=0)
    assert caught.value.mistakes == [f"heat is {number}, it must be finite", "shelf is 0, it must be at least 1"]
    with pytest.raises(ConfigError, match=r"^heats is \(180\.0, \S+\), it must be finite$"):
        TwoOvens(heats=(180.0, number))


def test_a_value_that_is_no_choice_is_told_with_the_nearest():
    with pytest.raises(ConfigError) as caught:
        TwoOvens(mode="gril")
    assert caught.value.mistakes == ["mode is 'gril', expected one of: bake, grill (did you mean 'grill'?)"]


@pytest.mark.parametrize(("seed", "right"), [(0, True), (2**63 - 1, True), (-1, False), (2**63, False)])
def test_a_seed_is_one_that_every_generator_takes(seed, right):
    if right:
        assert Seeded(seed).seed == seed
    else:
        with pytest.raises(ConfigError, match=rf"^seed is {seed}, it must be in 0 \.\. 2\^63 - 1$"):
            Seeded(seed)


def test_a_changed_copy_is_checked_too():
    with pytest.raises(ConfigError, match="shelf"):
        dataclasses.replace(Oven(), shelf=-1)


def test_settings_without_rules_accept_everything():
    @dataclass(frozen=True)
    class Free(Settings):
        word: str = option("", "a word")

    assert Free("anything").word == "anything"


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [(1, float, 1.0), (" 7 ", int, 7), ("x", str, "x"), ([0.5, 1], tuple[float, float], (0.5, 1.0))],
)
def test_coerce_gives_the_type_of_the_setting(value, kind, expected):
    assert coerce(value, kind) == expected
    assert type(coerce(value, kind)) is type(expected)
