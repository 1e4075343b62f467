"""The baseline against its definition, in fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.inference.ngram import counted, next_id

VOCABULARY = 5
PROMPTS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)


def chances_of(prompt: list[int], order: int = 0, lower: list[Fraction] | None = None) -> list[Fraction]:
    """Of every id: counts behind earlier copies of the last `order` ids, the orders below filling what is left."""
    lower = lower or [Fraction(1, VOCABULARY)] * VOCABULARY
    end = prompt[len(prompt) - order :]
    followers = [prompt[i] for i in range(order, len(prompt)) if prompt[i - order : i] == end]
    if not followers:
        return lower
    kinds = len(set(followers))
    here = [(followers.count(x) + kinds * lower[x]) / (len(followers) + kinds) for x in range(VOCABULARY)]
    return chances_of(prompt, order + 1, here)


@given(PROMPTS)
def test_chances_are_those_of_the_definition_and_sum_to_one(prompt: list[int]) -> None:
    seen, chances, unseen = next_id(np.array(prompt), VOCABULARY)
    expected = chances_of(prompt)
    found = [unseen] * VOCABULARY
    for token, chance in zip(seen, chances, strict=True):
        found[token] = chance
    assert found == pytest.approx([float(chance) for chance in expected])
    assert sum(expected) == 1


@given(PROMPTS, st.lists(st.tuples(st.integers(0, 11), st.integers(0, VOCABULARY - 1)), min_size=1, max_size=4))
def test_losses_and_greedy_choices_are_those_of_the_ids_up_to_each_place(
    row: list[int], asked: list[tuple[int, int]]
) -> None:
    asked = [(place % len(row), wanted) for place, wanted in asked]
    said = counted(row, asked, VOCABULARY)
    for (place, wanted), loss, greedy in zip(asked, said.losses, said.greedy, strict=True):
        chances = chances_of(row[: place + 1])
        best = [token for token in range(VOCABULARY) if chances[token] == max(chances)]
        assert loss == pytest.approx(-math.log(chances[wanted]))
        assert greedy == pytest.approx(float(wanted in best) / len(best))


def test_the_longest_copy_outweighs_many_shorter_ones() -> None:
    # 1 is mostly followed by 2, but behind 0 1 came 3.
    row = [0, 1, 3, 4, 1, 2, 4, 1, 2, 4, 1, 2, 0, 1]
    assert counted(row, [(len(row) - 1, 3), (len(row) - 1, 2)], VOCABULARY).greedy.tolist() == [1.0, 0.0]
