"""The rate of requests, and its trend. Requests are counted on arrival, even if they fail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

_SURE = 3.0
"""Number of standard errors beyond which a slope counts as a trend."""


@dataclass(frozen=True)
class Demand:
    """Arrivals in bins of `bin_s` seconds each, the oldest first."""

    max_growth: ClassVar[float] = 2.0
    """Maximum factor by which a trend may increase the current rate."""
    trend_s: ClassVar[float] = 180.0
    """Seconds in which a trend is searched. At least half of them must be known."""

    counts: Sequence[float]
    bin_s: float

    @property
    def known_s(self) -> float:
        """Number of seconds for which arrivals have been counted."""
        return len(self.counts) * self.bin_s

    def mean(self, for_s: float) -> float:
        """Requests a second in the last `for_s` seconds, as far as they are known."""
        counts = self._last(for_s)
        return sum(counts) / (len(counts) * self.bin_s) if counts else 0.0

    def growth(self, recent_s: float, horizon_s: float) -> float:
        """The factor, 1 or more, from the rate of the last `recent_s` to the rate in `horizon_s` from now. It is more
        than 1 if a straight line through the last bins rises significantly, and fits them better than any single step
        from one rate to another. After a step, as when requests come after a pause, the rate stays as it is."""
        counts = np.asarray(self._last(self.trend_s))
        number = len(counts)
        recent = self.mean(recent_s)
        if number * self.bin_s < self.trend_s / 2 or not recent:
            return 1.0
        offset = np.arange(number) - (number - 1) / 2
        slope = float((offset * counts).sum() / (offset**2).sum())
        residual = counts - counts.mean() - slope * offset
        error = math.sqrt(
            max(float((residual**2).sum()), float(counts.sum())) / (number - 2) / float((offset**2).sum())
        )
        if slope <= _SURE * error or _step_residual(counts) <= float((residual**2).sum()):
            return 1.0
        ahead = (number - 1) / 2 + horizon_s / self.bin_s
        expected = (float(counts.mean()) + slope * ahead) / self.bin_s
        return min(max(1.0, expected / recent), self.max_growth)

    def _last(self, for_s: float) -> Sequence[float]:
        return self.counts[-max(1, round(for_s / self.bin_s)) :]


def _step_residual(counts: NDArray[np.float64]) -> float:
    """The sum of the squared distances from the nearest single step, from one mean to another."""
    before = np.arange(1, len(counts))
    sums, total = counts.cumsum()[:-1], float(counts.sum())
    explained = sums**2 / before + (total - sums) ** 2 / (len(counts) - before)
    return float((counts**2).sum() - explained.max())
