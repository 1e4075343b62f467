"""Means, spreads and p-values are those of the textbook; noise is called noise."""

import math
import sys
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcomes import group, outcome
from quatrain.errors import QuatrainError, UsageError
from quatrain.training.comparison import (
    NOISE_DEVIATIONS,
    Noise,
    Point,
    compare,
    mean_curve,
    noise_of,
    p_paired,
    p_welch,
    reached,
    require_scipy,
    verdict,
)

LOSSES = st.floats(0.5, 10.0)


def p_of_two_degrees(t: float) -> float:
    """Student's distribution with two degrees of freedom has a closed form."""
    return 1 - abs(t) / math.sqrt(2 + t * t)


@given(st.lists(st.tuples(LOSSES, LOSSES), min_size=3, max_size=3))
def test_the_paired_p_value_of_three_seeds_is_the_closed_form(pairs):
    differences = [one - other for one, other in pairs]
    if stdev(differences) < 1e-6:
        return
    expected = p_of_two_degrees(fmean(differences) / (stdev(differences) / math.sqrt(3)))
    assert p_paired(*zip(*pairs, strict=True)) == pytest.approx(expected, abs=1e-9)


@given(LOSSES, LOSSES, st.floats(0.01, 1.0))
def test_welch_s_p_value_of_two_and_two_of_equal_spread_is_the_closed_form(one, other, half):
    t = (one - other) / half  # each variance is 2 half^2, and each mean's is half^2 of it
    t /= math.sqrt(2)
    assert p_welch([one - half, one + half], [other - half, other + half]) == pytest.approx(
        p_of_two_degrees(t), abs=1e-6
    )


def test_pairs_that_move_together_say_more_than_welch():
    base, better = [2.50, 2.60, 2.70, 2.80], [2.45, 2.56, 2.64, 2.75]
    assert p_paired(better, base) < 0.01 < 0.1 < p_welch(better, base)


@pytest.mark.parametrize("test", [p_paired, p_welch])
def test_without_a_spread_there_is_no_p_value(test):
    assert test([2.0], [3.0]) is None
    assert test([2.0, 2.0], [2.0, 2.0]) is None


@pytest.mark.parametrize(
    ("factor", "expected"), [(-2.01, "better"), (-1.99, "noise"), (0.0, "noise"), (1.99, "noise"), (2.01, "worse")]
)
def test_a_difference_below_two_standard_deviations_of_the_base_is_noise(factor, expected):
    noise = noise_of(group("base", 2.0, 2.1, 2.3))
    assert noise.val_deviation == pytest.approx(stdev([2.0, 2.1, 2.3]))
    assert noise.threshold == pytest.approx(NOISE_DEVIATIONS * noise.val_deviation)
    assert verdict(factor * noise.val_deviation, noise) == expected


def test_where_the_base_has_no_noise_an_equal_loss_is_still_no_difference():
    silent = Noise(2, 2.0, 0.0, 2.0, 0.0)
    assert [verdict(difference, silent) for difference in (0.0, 1e-9, -1e-9)] == ["noise", "worse", "better"]


def test_one_seed_gives_no_verdict_and_no_spread():
    row = compare([*group("base", 2.0), *group("x", 1.0)]).rows[1]
    assert (row.verdict, row.deviation, row.p_paired, row.p_welch) == ("one seed", None, None, None)
    assert row.difference == -1.0


def test_a_row_holds_the_means_over_its_seeds():
    comparison = compare([*group("base", 2.0, 2.2, 2.1), *group("x=1", 1.0, 1.1, 1.2, parameters=106)])
    base, row = comparison.rows
    assert (base.verdict, base.difference, base.p_paired) == ("base", None, None)
    assert (row.mean, row.difference) == (pytest.approx(1.1), pytest.approx(-1.0))
    assert row.deviation == pytest.approx(0.1)
    assert row.verdict == "better"
    assert row.losses == (1.0, 1.1, 1.2)
    assert row.parameters_share == pytest.approx(0.06)
    assert row.another_size
    assert not base.another_size
    # From 4.0 at 80 tokens to 1.1 at 160, the base's 2.1 lies at 1.9 / 2.9 of the way.
    assert row.tokens_to_loss == pytest.approx(80 + 80 * 1.9 / 2.9)
    assert row.seconds_to_loss == pytest.approx(10 + 10 * 1.9 / 2.9)


def test_a_loss_is_reached_on_the_straight_line_between_two_points():
    curve = [Point(0, 0, 4.0, 0.0), Point(1, 100, 2.0, 3.0), Point(2, 200, 1.0, 6.0)]
    assert reached(curve, 3.0) == (50.0, 1.5)
    assert reached(curve, 1.0) == (200.0, 6.0)
    assert reached(curve, 0.9) is None
    assert reached(curve, 9.0) == (0.0, 0.0)


@given(st.lists(st.lists(LOSSES, min_size=4, max_size=4), min_size=1, max_size=5))
def test_the_base_reaches_its_own_mean_final_loss(curves):
    comparison = compare([outcome("base", seed, *losses) for seed, losses in enumerate(curves)])
    assert comparison.rows[0].tokens_to_loss is not None
    assert comparison.rows[0].tokens_to_loss <= 240


def test_a_mean_curve_has_the_steps_that_all_seeds_have():
    one = [Point(step, step, 1.0 + step, step) for step in (0, 2, 4)]
    other = [Point(step, step, 3.0 + step, step + 1.0) for step in (0, 1, 4)]
    assert mean_curve([one, other]) == (
        Point(0, 0, 2.0, 0.5, stdev([1.0, 3.0])),
        Point(4, 4, 6.0, 4.5, stdev([5.0, 7.0])),
    )


def test_a_variant_of_which_a_seed_diverged_has_no_mean_of_the_others():
    broken = [outcome("x", 0, 5.0, 4.0, 1.0), outcome("x", 1, diverged="step 3: loss is nan")]
    row = compare([*group("base", 2.0, 2.1), *broken]).rows[1]
    assert (row.verdict, row.losses, row.mean, row.p_paired, row.curve) == ("diverged", (1.0, None), None, None, ())
    assert row.diverged == ("step 3: loss is nan",)


def test_a_base_that_diverges_is_an_error_that_says_why():
    with pytest.raises(QuatrainError, match=r"the base itself diverged \(seed 1\).*step 3: loss is nan"):
        noise_of([outcome("base", 0, 2.0), outcome("base", 1, diverged="step 3: loss is nan")])


def test_without_scipy_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(UsageError, match=r"pip install 'quatrain\[ablate\]'"):
        require_scipy()
