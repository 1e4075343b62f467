"""Sums over the rows of a pass, and the standard errors that they allow."""

import math

import numpy as np
import numpy.typing as npt

from quatrain.inference.ranks import Ranks

Floats = npt.NDArray[np.float64]


class Tally:
    """Nats and targets in some groups, with what the standard error of their ratio needs.

    Targets of one row are not independent, rows nearly are: the error is that of a ratio whose units are rows
    (Cochran 1977, section 6.4), not of so many independent targets.
    """

    def __init__(self, groups: int) -> None:
        self.nats, self.targets, self.rows = (np.zeros(groups) for _ in range(3))
        self._squares, self._products, self._weights = (np.zeros(groups) for _ in range(3))

    def add(self, nats: Floats, targets: Floats) -> None:
        """Rows: their nats and targets in each group, both (rows, groups)."""
        self.nats += nats.sum(axis=0)
        self.targets += targets.sum(axis=0)
        self.rows += (targets > 0).sum(axis=0)
        self._squares += (nats * nats).sum(axis=0)
        self._products += (nats * targets).sum(axis=0)
        self._weights += (targets * targets).sum(axis=0)

    def share(self, ranks: Ranks) -> None:
        """Add what the other ranks have, on each."""
        for name, sums in vars(self).items():
            setattr(self, name, ranks.sum(sums))

    def loss(self, group: int) -> float | None:
        """Nats per target of a group; None where it has none."""
        return float(self.nats[group] / self.targets[group]) if self.targets[group] else None

    def standard_error(self, group: int) -> float | None:
        """Of `loss`; None where fewer than two rows have a target."""
        rows, loss = self.rows[group], self.loss(group)
        if loss is None or rows < 2:
            return None
        spread = self._squares[group] - 2 * loss * self._products[group] + loss**2 * self._weights[group]
        return math.sqrt(max(0.0, spread) * rows / (rows - 1)) / float(self.targets[group])


def mean_and_error(values: Floats) -> tuple[float, float | None]:
    """The mean of independent values and its standard error (None below two values)."""
    if len(values) < 2:
        return float(values.mean()), None
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))
