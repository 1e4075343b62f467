"""The draw against numpy, and what cuts and penalties do to it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quatrain.inference import drawing
from quatrain.inference.drawing import choose, logprob_of, nucleus, penalised
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
    for token in sorted(kept):
        passed += probabilities[token] / held
        nearest = min(nearest, abs(passed - draw))
        if passed > draw:
            return token, nearest
    return max(kept), nearest


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


def test_ids_that_change_places_by_rounding_change_no_draw() -> None:
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0, 2.0])
    moved = logits + torch.tensor([0.0, 3e-6, -3e-6, 0.0, 1e-6])
    grid = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    for settings in ({}, {"top_p": 0.99}, {"top_k": 4}, {"min_p": 0.3}):
        one, other = (choose(row.expand(len(grid), 5), grid, 0.7, **settings) for row in (logits, moved))
        assert torch.equal(one, other)


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


# Cuts, penalties, log-probabilities


@given(
    st.integers(0, 10**6),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([0.05, 0.4, 1.0, 3.0]),
    st.sampled_from([None, 1, 7, 16, 40]),
    st.sampled_from([1.0, 0.9, 0.3]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    st.booleans(),
)
def test_the_shortlist_gives_the_id_of_the_whole_sort(
    seed: int, draw: float, temperature: float, top_k: int | None, top_p: float, min_p: float, ties: bool
) -> None:
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(seed)) * 3
    if ties:
        logits = logits.round()
    draws = torch.full((4,), draw, dtype=torch.float64)
    settings = temperature, top_k, top_p, min_p
    with pytest.MonkeyPatch.context() as patch:
        whole = choose(logits, draws, *settings)
        patch.setattr(drawing, "SHORTLIST", 16)
        assert torch.equal(choose(logits, draws, *settings), whole)


def test_the_shortlist_is_enough_where_the_model_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(2, 5000)
    logits[:, 7] = 20.0
    monkeypatch.setattr(drawing, "SHORTLIST", 16)
    monkeypatch.setattr(Tensor, "sort", _no_long_sort(Tensor.sort))
    assert choose(logits, torch.tensor([0.1, 0.9]), 1.0, top_p=0.9).tolist() == [7, 7]
    with pytest.raises(AssertionError):
        choose(torch.zeros(1, 5000), torch.tensor([0.5]), 1.0, top_p=0.9)  # and not where it is not


def _no_long_sort(sort):
    def checked(self: Tensor, *args, **options):
        assert self.shape[-1] < 100
        return sort(self, *args, **options)

    return checked


@pytest.mark.parametrize(("min_p", "expected"), [(0.2, [0.5, 0.1, 0.25, 0.15]), (0.21, [5 / 9, 0, 2.5 / 9, 1.5 / 9])])
def test_min_p_leaves_ids_of_a_share_of_the_likeliest(min_p: float, expected: list[float]) -> None:
    logits = torch.tensor([0.5, 0.1, 0.25, 0.15]).log()
    grid = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    tokens = choose(logits.double().expand(len(grid), 4), grid, 1.0, min_p=min_p - 1e-6)
    assert (torch.bincount(tokens, minlength=4) / len(grid)).tolist() == pytest.approx(expected, abs=2e-4)


def test_cuts_and_penalty_are_those_of_transformers() -> None:
    pytest.importorskip("transformers", reason="no optional library: transformers")
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        logits = torch.randn(1, 30, generator=generator) * 2
        seen = torch.randint(0, 30, (1, 6), generator=generator)
        theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.4), TemperatureLogitsWarper(0.8)])
        theirs += [TopKLogitsWarper(12), TopPLogitsWarper(0.85), MinPLogitsWarper(0.05)]
        allowed = set(theirs(seen, logits.clone())[0].isfinite().nonzero().flatten().tolist())
        grid = (torch.arange(3000, dtype=torch.float64) + 0.5) / 3000
        ours = choose(penalised(logits[0], seen[0].tolist(), 1.4).expand(3000, 30), grid, 0.8, 12, 0.85, 0.05)
        assert set(ours.tolist()) <= allowed
        assert len(allowed - set(ours.tolist())) <= 1  # an id that holds less than a step of the grid


def test_log_probabilities_and_of_equals_the_smaller_id_first() -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 2.0, 2.0])
    one = logprob_of(logits, 2, 2)
    assert one.logprob == pytest.approx(float(logits.double().log_softmax(-1)[2]))
    assert [token for token, _ in one.top] == [1, 3]
    assert len(logprob_of(logits, 0, 99).top) == 5
    assert logprob_of(logits, 0, 0).top == ()
