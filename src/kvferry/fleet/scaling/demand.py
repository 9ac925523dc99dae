"""How many requests come: lately, soon, and at most in a while. Counted when they arrive, whatever becomes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_RECENT_BINS = 3
"""Bins that are *now*."""
_SURE = 2.0
"""Standard deviations of a Poisson count beyond which a change is one."""
_MOST_GROWTH = 2.0
"""A trend is followed no further than to so many times the rate of now."""


@dataclass(frozen=True)
class Demand:
    """Arrivals in bins of `bin_s` seconds each, the oldest first."""

    counts: Sequence[float]
    bin_s: float

    @property
    def known_s(self) -> float:
        """For how long arrivals have been counted."""
        return len(self.counts) * self.bin_s

    def mean(self, for_s: float) -> float:
        """Requests a second in the last `for_s` seconds, as far as they are known."""
        counts = self._last(for_s)
        return sum(counts) / (len(counts) * self.bin_s) if counts else 0.0

    def now(self) -> float:
        """Requests a second: of the last bins if they differ from the last minute's by more than chance, or that."""
        longer, recent = self.mean(60.0), self.mean(_RECENT_BINS * self.bin_s)
        chance = math.sqrt(max(longer, 1e-9) / (_RECENT_BINS * self.bin_s))
        return recent if abs(recent - longer) > _SURE * chance else longer

    def soon(self, within_s: float) -> float:
        """The highest rate that is expected within so many seconds, if what has begun goes on."""
        now = self.now()
        before = self._last(_RECENT_BINS * self.bin_s, skip=_RECENT_BINS)
        if not before:
            return now
        earlier = sum(before) / (len(before) * self.bin_s)
        chance = math.sqrt(max(earlier, 1e-9) / (_RECENT_BINS * self.bin_s))
        grows = now - earlier
        if grows <= _SURE * chance:
            return now
        return min(now + grows / (_RECENT_BINS * self.bin_s) * within_s, _MOST_GROWTH * now)

    def highest(self, for_s: float) -> float:
        """The highest rate in the last `for_s` seconds, each taken over a few bins."""
        counts = self._last(for_s)
        width = min(len(counts), 2 * _RECENT_BINS)
        if not width:
            return 0.0
        sums = (sum(counts[place : place + width]) for place in range(len(counts) - width + 1))
        return max(sums) / (width * self.bin_s)

    def _last(self, for_s: float, skip: int = 0) -> Sequence[float]:
        number = max(1, round(for_s / self.bin_s))
        end = len(self.counts) - skip
        return self.counts[max(0, end - number) : max(0, end)]
