"""The draw against numpy, and what cuts and penalties do to it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quatrain.inference.drawing import choose, nucleus
from quatrain.mixing import derive


def chosen_by_numpy(
    logits: np.ndarray, draw: float, temperature: float, top_k: int | None, top_p: float
) -> tuple[int, float]:
    """The id, and how near the draw came to another one: the same rule written as a loop."""
    if temperature == 0 or top_p == 0:
        return int(np.argmax(logits)), 1.0
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    probabilities = np.exp(scaled) / np.exp(scaled).sum()
    kept: list[int] = []
    held, nearest = 0.0, 1.0
    likeliest = sorted(range(len(logits)), key=lambda token: (-probabilities[token], token))[:top_k]
    enough = top_p * sum(probabilities[token] for token in likeliest)  # a share of what top_k leaves
    for token in likeliest:
        nearest = min(nearest, abs(held - enough)) if kept else nearest
        if kept and held >= enough:
            break
        kept.append(token)
        held += probabilities[token]
    passed = 0.0
    for token in kept:
        passed += probabilities[token] / held
        nearest = min(nearest, abs(passed - draw))
        if passed > draw:
            return token, nearest
    return kept[-1], nearest


@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([0.0, 1e-300, 1e-3, 0.7, 1.0, 5.0, 1e300]),
    st.sampled_from([None, 1, 2, 3, 1000]),
    st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)),
)
def test_the_chosen_id_is_that_of_numpy(
    logits: list[float], draw: float, temperature: float, top_k: int | None, top_p: float
) -> None:
    expected, nearest = chosen_by_numpy(np.array(logits, dtype=np.float32), draw, temperature, top_k, top_p)
    found = choose(torch.tensor([logits]), torch.tensor([draw], dtype=torch.float64), temperature, top_k, top_p)
    assert (found.shape, found.dtype) == ((1,), torch.int64)
    assert int(found) == expected or nearest < 1e-9  # a draw on a border may fall to either side


def test_rows_are_chosen_independently() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, draws = torch.randn(50, 20, generator=generator), torch.rand(50, generator=generator)
    together = choose(logits, draws, 0.8, 10, 0.9)
    assert together.tolist() == [int(choose(logits[i : i + 1], draws[i : i + 1], 0.8, 10, 0.9)) for i in range(50)]


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 0.0), (1e-300, 1.0), (5e-324, 1.0)])
def test_greedy_takes_the_likeliest_and_of_equals_the_smallest_id(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[0.0, 3.0, -1.0, 3.0], [9.0, 8.0, 7.0, 6.0]])
    assert choose(logits, torch.tensor([0.0, 0.999]), temperature, None, top_p).tolist() == [1, 0]


def test_a_huge_temperature_makes_all_ids_alike() -> None:
    draws = torch.arange(4) / 4 + 0.01
    logits = torch.tensor([[80.0, -80.0, 3.0, 0.0]]).expand(4, 4)
    assert sorted(choose(logits, draws, 1e300, None, 1.0).tolist()) == [0, 1, 2, 3]


def frequencies(
    top_k: int | None = None, top_p: float = 1.0, temperature: float = 1.0, draws: Tensor | None = None
) -> Tensor:
    """Shares of the ids of probability 0.5, 0.1, 0.25, 0.15 among many draws (an even grid of them by default)."""
    logits = torch.tensor([0.5, 0.1, 0.25, 0.15]).log()
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000 if draws is None else draws
    tokens = choose(logits.expand(len(grid), 4), grid, temperature, top_k, top_p)
    return torch.bincount(tokens, minlength=4) / len(grid)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.1, 0.25, 0.15]),
        ({"top_k": 4}, [0.5, 0.1, 0.25, 0.15]),
        ({"top_k": 10**6}, [0.5, 0.1, 0.25, 0.15]),
        ({"top_k": 2}, [2 / 3, 0, 1 / 3, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_p": 0.6}, [2 / 3, 0, 1 / 3, 0]),
        ({"top_p": 0.8}, [0.5 / 0.9, 0, 0.25 / 0.9, 0.15 / 0.9]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_p": 0.8, "top_k": 2}, [2 / 3, 0, 1 / 3, 0]),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.01 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345]),
    ],
)
def test_frequencies_are_the_probabilities(settings: dict[str, float], expected: list[float]) -> None:
    assert frequencies(**settings).tolist() == pytest.approx(expected, abs=2e-4)


def test_the_draws_of_a_seed_are_uniform() -> None:
    draws = torch.tensor([derive(7, number, 5) / 2**64 for number in range(20_000)])
    expected = torch.tensor([0.5, 0.1, 0.25, 0.15])
    spread = (expected * (1 - expected) / 20_000).sqrt()
    assert ((frequencies(draws=draws) - expected).abs() < 4 * spread).all()


def test_the_nucleus_is_the_shortest_prefix_that_holds_the_probability() -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64)
    sizes = {top_p: int(nucleus(probabilities, None, top_p).sum()) for top_p in (0.0, 0.5, 0.50001, 0.75, 0.8, 1.0)}
    assert sizes == {0.0: 1, 0.5: 1, 0.50001: 2, 0.75: 2, 0.8: 3, 1.0: 4}
