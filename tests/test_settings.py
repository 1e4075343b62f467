import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from quatrain.errors import ConfigError
from quatrain.settings import Settings, option


@dataclass(frozen=True)
class Oven(Settings):
    heat: float = option(180.0, "how hot", "degrees")
    shelf: int = option(2, "which shelf, from below")

    def mistakes(self) -> Iterator[str]:
        yield from self.at_least(0, ["heat"])
        yield from self.at_least(1, ["shelf"])


def test_an_option_carries_default_sentence_and_unit():
    heat, shelf = dataclasses.fields(Oven)
    assert (heat.default, dict(heat.metadata)) == (180.0, {"sentence": "how hot", "unit": "degrees"})
    assert (shelf.default, dict(shelf.metadata)) == (2, {"sentence": "which shelf, from below", "unit": ""})
    assert Oven() == Oven(180.0, 2)


def test_all_mistakes_are_raised_at_once():
    with pytest.raises(ConfigError) as caught:
        Oven(heat=-1.0, shelf=0)
    assert caught.value.mistakes == ["heat is -1.0, it must be at least 0", "shelf is 0, it must be at least 1"]


@pytest.mark.parametrize(("heat", "right"), [(0.0, True), (-0.001, False), (math.nan, False), (-math.inf, False)])
def test_at_least_includes_its_minimum_and_refuses_nan(heat, right):
    if right:
        assert Oven(heat=heat).heat == heat
    else:
        with pytest.raises(ConfigError, match="heat is"):
            Oven(heat=heat)


def test_a_changed_copy_is_checked_too():
    with pytest.raises(ConfigError, match="shelf"):
        dataclasses.replace(Oven(), shelf=-1)


def test_settings_without_rules_accept_everything():
    @dataclass(frozen=True)
    class Free(Settings):
        word: str = option("", "a word")

    assert Free("anything").word == "anything"
