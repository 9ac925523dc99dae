"""How long ranks wait for each other after one has failed in a step; the same on all of them."""

from __future__ import annotations

BEHIND_S, MAX_BEHIND_S = 5.0, 30.0
"""How much longer than this rank another one may take to reach the same point of the step, before it is taken to be
blocked in a collective and not merely slow; and the bound of the whole wait."""


def patience_s(seconds: float) -> float:
    """Seconds to wait after a failure that came `seconds` after the beginning of the step."""
    return min(MAX_BEHIND_S, BEHIND_S + seconds)
