"""How long ranks wait for each other where one has failed in a step; the same on all of them."""

from __future__ import annotations

BEHIND_S, LONGEST_BEHIND_S = 5.0, 30.0
"""How much later than this rank another may come to the same place, beside the time that this one took to get there:
a rank that is slow is told apart from one that stands in a collective."""


def patience_s(seconds: float) -> float:
    """How long to wait, in seconds, after a failure that came so many seconds into a step."""
    return min(LONGEST_BEHIND_S, BEHIND_S + seconds)
