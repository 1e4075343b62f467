"""Outcomes of runs that were never made, for the tests of what is shown of them."""

import math

from quatrain.training.comparison import Outcome, Point


def outcome(variant: str, seed: int, *losses: float, parameters: int = 100, diverged: str = "") -> Outcome:
    """A run validated every 10 steps of 8 tokens, a second each."""
    curve = tuple(Point(10 * n, 80 * n, loss, 10.0 * n) for n, loss in enumerate(losses))
    return Outcome(variant, seed, parameters, curve, losses[-1] if losses else math.nan, 8.0, diverged)


def group(variant: str, *finals: float, **settings: int) -> list[Outcome]:
    return [outcome(variant, seed, 5.0, 4.0, final, **settings) for seed, final in enumerate(finals)]
