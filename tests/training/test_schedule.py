"""The learning rate at the points that the formulas name, and as a pure function."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quatrain.training.config import OptimConfig
from quatrain.training.schedule import learning_rate

WARMUP, STEPS = 10, 110
HIGH, LOW = 1.0, 0.1


def rate(step: int, **changes: object) -> float:
    return learning_rate(step, OptimConfig(**{"lr": HIGH, "min_lr": LOW, "warmup": WARMUP} | changes), STEPS)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
@pytest.mark.parametrize(("step", "expected"), [(0, 0.1), (4, 0.5), (WARMUP - 1, HIGH), (WARMUP, HIGH)])
def test_warmup_is_the_same_line_in_every_schedule(schedule: str, step: int, expected: float) -> None:
    assert rate(step, schedule=schedule) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (35, LOW + (HIGH - LOW) * (1 + math.sqrt(0.5)) / 2),
        (60, (HIGH + LOW) / 2),
        (85, LOW + (HIGH - LOW) * (1 - math.sqrt(0.5)) / 2),
        (STEPS - 1, LOW + (HIGH - LOW) * (1 + math.cos(math.pi * 99 / 100)) / 2),
        (STEPS, LOW),
        (STEPS + 1, LOW),
        (10**9, LOW),
    ],
)
def test_cosine_falls_by_half_a_wave_and_stays_at_the_minimum(step: int, expected: float) -> None:
    assert rate(step) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("step", [WARMUP, 60, STEPS - 1, STEPS, 10**9])
def test_constant_stays(step: int) -> None:
    assert rate(step, schedule="constant") == HIGH


@pytest.mark.parametrize(
    ("cooldown", "step", "expected"),
    [
        (20, 60, HIGH),
        (20, STEPS - 20, HIGH),
        (20, STEPS - 10, (HIGH + LOW) / 2),
        (20, STEPS - 1, LOW + (HIGH - LOW) / 20),
        (20, STEPS, LOW),
        (20, 10**9, LOW),
        (0, STEPS - 22, HIGH),  # the default: a fifth of the run
        (0, STEPS - 11, (HIGH + LOW) / 2),
    ],
)
def test_wsd_is_stable_and_then_a_line_down(cooldown: int, step: int, expected: float) -> None:
    assert rate(step, schedule="wsd", cooldown=cooldown) == pytest.approx(expected, rel=1e-14)


def test_without_warmup_the_first_step_has_the_highest_rate() -> None:
    assert [rate(0, schedule=schedule, warmup=0) for schedule in ("constant", "cosine", "wsd")] == [HIGH] * 3


def test_a_run_that_is_all_warmup_ends_at_the_minimum() -> None:
    assert rate(STEPS - 1, warmup=STEPS) == HIGH
    assert rate(STEPS, warmup=STEPS) == LOW


def test_gpt2s_schedule() -> None:
    optim = OptimConfig(lr=6e-4, min_lr=6e-5, warmup=715)
    assert learning_rate(0, optim, 19_073) == pytest.approx(6e-4 / 715)
    assert learning_rate(714, optim, 19_073) == learning_rate(715, optim, 19_073) == 6e-4
    assert learning_rate(715 + (19_073 - 715) // 2, optim, 19_073) == pytest.approx(3.3e-4, rel=1e-12)
    assert learning_rate(19_073, optim, 19_073) == 6e-5


@st.composite
def schedules(draw: st.DrawFn) -> tuple[OptimConfig, int]:
    steps = draw(st.integers(1, 2000))
    warmup = draw(st.integers(0, steps))
    low, high = sorted(draw(st.tuples(*[st.floats(1e-9, 10.0)] * 2)))
    kind = draw(st.sampled_from(["constant", "cosine", "wsd"]))
    cooldown = draw(st.integers(0, steps - warmup))
    return OptimConfig(lr=high, min_lr=low, warmup=warmup, cooldown=cooldown, schedule=kind), steps


@given(schedules())
def test_rates_stay_between_minimum_and_maximum_and_only_fall_after_warmup(drawn: tuple[OptimConfig, int]) -> None:
    optim, steps = drawn
    rates = [learning_rate(step, optim, steps) for step in range(steps + 10)]
    bound = optim.lr * (1 + 1e-12)
    assert all(0 < rate <= bound for rate in rates[: optim.warmup])
    assert all(optim.min_lr * (1 - 1e-12) <= rate <= bound for rate in rates[optim.warmup :])
    assert rates[: optim.warmup] == sorted(rates[: optim.warmup])
    assert rates[optim.warmup :] == sorted(rates[optim.warmup :], reverse=True)


@given(schedules(), st.integers(0, 2**32))
def test_case_25_case_26_the_rate_depends_on_nothing_but_the_step(drawn: tuple[OptimConfig, int], seed: int) -> None:
    optim, steps = drawn
    in_order = {step: learning_rate(step, optim, steps) for step in range(0, steps + 10, 7)}
    shuffled = random.Random(seed).sample(list(in_order), len(in_order))
    assert {step: learning_rate(step, optim, steps) for step in shuffled} == in_order
