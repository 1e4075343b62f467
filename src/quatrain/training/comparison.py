"""What the runs of an ablation show: means, spreads, and which differences stand out from the noise.

The variants share their seeds, and with them the order of the data, so a difference is tested in pairs (the paired
t-test): what one seed does to every variant alike cancels.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from quatrain.errors import QuatrainError, UsageError

NOISE_DEVIATIONS = 2.0  # a difference below so many standard deviations of the base is noise
TESTED = "paired t-test (the variants share their seeds)"
SAME_SIZE = 0.05  # variants whose parameters differ by a larger share are no fair comparison

Verdict = Literal["base", "better", "worse", "noise", "diverged", "one seed"]


class Point(NamedTuple):
    """A validation: training seconds exclude evaluations."""

    step: int
    tokens: int
    loss: float
    seconds: float
    deviation: float | None = None  # of the loss over the seeds, in a mean curve


@dataclass(frozen=True)
class Outcome:
    """What one run of a variant gave."""

    variant: str
    seed: int
    parameters: int
    curve: tuple[Point, ...] = ()  # validations by step; empty if it diverged
    train_loss: float = math.nan  # mean over the last steps
    tokens_per_second: float = math.nan  # median over the steps
    diverged: str = ""  # what was not finite, and where


@dataclass(frozen=True)
class Noise:
    """What another seed alone does to the base: the measure of every difference."""

    seeds: int
    val_loss: float
    val_deviation: float | None  # None for one seed
    train_loss: float
    train_deviation: float | None

    @property
    def threshold(self) -> float | None:
        """Differences of the validation loss below it are noise."""
        return None if self.val_deviation is None else NOISE_DEVIATIONS * self.val_deviation


@dataclass(frozen=True)
class Row:
    """A variant beside the base. Where a seed diverged, nothing is said of the others but their losses."""

    variant: str
    parameters: int
    parameters_share: float  # more than the base's (negative: fewer), as a share of those
    losses: tuple[float | None, ...]  # final validation loss of each seed; None: diverged
    verdict: Verdict
    mean: float | None = None  # of the losses
    deviation: float | None = None  # of the losses; None for one seed
    difference: float | None = None  # of the means, from the base's
    p_paired: float | None = None
    p_welch: float | None = None
    train_loss: float | None = None
    tokens_to_loss: float | None = None
    seconds_to_loss: float | None = None
    tokens_per_second: float | None = None
    curve: tuple[Point, ...] = ()  # mean over the seeds
    diverged: tuple[str, ...] = ()  # what was not finite

    @property
    def another_size(self) -> bool:
        """Whether its parameters differ so much that its loss is no fair comparison."""
        return abs(self.parameters_share) > SAME_SIZE


@dataclass(frozen=True)
class Comparison:
    """All rows, the base first."""

    noise: Noise
    to_loss: float
    rows: tuple[Row, ...]


def require_scipy() -> None:
    """Raise `UsageError` unless p-values can be computed here: asked before hours of training."""
    try:
        import scipy.stats  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "ablate with several seeds needs the library 'scipy': pip install 'quatrain[ablate]'"
        ) from error


def noise_of(base: Sequence[Outcome]) -> Noise:
    """The base's mean and standard deviation; raises `QuatrainError` where it diverged."""
    for outcome in base:
        if outcome.diverged:
            raise QuatrainError(
                f"the base itself diverged (seed {outcome.seed}), there is nothing to compare with: {outcome.diverged}"
            )
    losses, trained = [one.curve[-1].loss for one in base], [one.train_loss for one in base]
    return Noise(len(base), fmean(losses), _deviation(losses), fmean(trained), _deviation(trained))


def compare(outcomes: Sequence[Outcome], to_loss: float | None = None) -> Comparison:
    """The table of an ablation; the first outcome's variant is the base, and all variants have its seeds in order.

    `to_loss` is the loss to which tokens and seconds are told; None: the base's mean final validation loss.
    """
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.variant, []).append(outcome)
    base = next(iter(groups.values()))
    noise = noise_of(base)
    wanted = noise.val_loss if to_loss is None else to_loss
    return Comparison(noise, wanted, tuple(_row(group, base, noise, wanted) for group in groups.values()))


def _row(group: Sequence[Outcome], base: Sequence[Outcome], noise: Noise, to_loss: float) -> Row:
    first = group[0]
    share = (first.parameters - base[0].parameters) / base[0].parameters
    messages = tuple(one.diverged for one in group if one.diverged)
    if messages:
        losses = tuple(None if one.diverged else one.curve[-1].loss for one in group)
        return Row(first.variant, first.parameters, share, losses, "diverged", diverged=messages)
    known, usual = ([one.curve[-1].loss for one in runs] for runs in (group, base))
    is_base = first.variant == base[0].variant
    difference = None if is_base else fmean(known) - noise.val_loss
    curve = mean_curve([one.curve for one in group])
    tokens, seconds = reached(curve, to_loss) or (None, None)
    return Row(
        first.variant,
        first.parameters,
        share,
        tuple(known),
        verdict(difference, noise),
        mean=fmean(known),
        deviation=_deviation(known),
        difference=difference,
        p_paired=None if is_base else p_paired(known, usual),
        p_welch=None if is_base else p_welch(known, usual),
        train_loss=fmean(one.train_loss for one in group),
        tokens_to_loss=tokens,
        seconds_to_loss=seconds,
        tokens_per_second=fmean(one.tokens_per_second for one in group),
        curve=curve,
    )


def verdict(difference: float | None, noise: Noise) -> Verdict:
    """What a difference of mean losses from the base's is worth; None is the base."""
    if difference is None:
        return "base"
    if noise.threshold is None:
        return "one seed"
    if difference == 0 or abs(difference) < noise.threshold:
        return "noise"
    return "better" if difference < 0 else "worse"


def mean_curve(curves: Sequence[Sequence[Point]]) -> tuple[Point, ...]:
    """The mean over the seeds at each step that all of them were validated at, with the standard deviation."""
    by_step = [{point.step: point for point in curve} for curve in curves]
    shared = sorted(set[int].intersection(*(set(points) for points in by_step)))
    groups = ([points[step] for points in by_step] for step in shared)
    return tuple(
        Point(
            group[0].step,
            group[0].tokens,
            fmean(point.loss for point in group),
            fmean(point.seconds for point in group),
            _deviation([point.loss for point in group]),
        )
        for group in groups
    )


def reached(curve: Sequence[Point], loss: float) -> tuple[float, float] | None:
    """Tokens and seconds at which a curve first is down at a loss, on straight lines between its points; or None."""
    before: Point | None = None
    for point in curve:
        if point.loss <= loss:
            if before is None:
                return float(point.tokens), point.seconds
            share = (before.loss - loss) / (before.loss - point.loss)
            tokens = before.tokens + share * (point.tokens - before.tokens)
            return tokens, before.seconds + share * (point.seconds - before.seconds)
        before = point
    return None


def p_paired(some: Sequence[float], others: Sequence[float]) -> float | None:
    """Two-sided p-value of the paired t-test; None below two pairs, or where the samples are equal."""
    return _p_value("ttest_rel", some, others)


def p_welch(some: Sequence[float], others: Sequence[float]) -> float | None:
    """Two-sided p-value of Welch's t-test, which knows nothing of pairs; None as in `p_paired`."""
    return _p_value("ttest_ind", some, others, equal_var=False)


def _p_value(test: str, some: Sequence[float], others: Sequence[float], **options: bool) -> float | None:
    if len(some) < 2:
        return None
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of samples without spread: what comes out is looked at
        value = float(getattr(stats, test)(some, others, **options).pvalue)
    return value if math.isfinite(value) else None


def _deviation(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None
