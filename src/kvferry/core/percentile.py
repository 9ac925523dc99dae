"""Percentiles of measured values, by one definition for all results that the project shows."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """The percentile of values in ascending order, by the nearest rank: the smallest value that at least this share of
    the values does not exceed. `share`: from 0 to 1. Raises `IndexError` without values."""
    rank = math.ceil(share * len(ordered) - 1e-9)  # 0.07 * 100 is a little more than 7
    return ordered[max(0, rank - 1)]
