"""The time for which ranks wait for each other after one has failed in a step; the same on all of them."""

from __future__ import annotations

SKEW_S, MAX_WAIT_S = 5.0, 30.0
"""Seconds that another rank may be behind this one in a step before it counts as blocked in a collective, and not
merely slow; and the upper bound of the whole wait."""


def failure_wait_s(seconds: float, skew_s: float = SKEW_S) -> float:
    """Seconds to wait after a failure that came `seconds` after the beginning of the step."""
    return min(MAX_WAIT_S, skew_s + seconds)
