"""Each instance in turn: the one that was chosen longest ago; those that were never chosen come first.

The order is kept by instance and not by position in a list, so instances may come and go.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.router.choice.policies.base import Asked, Leg, LegPolicy, T


class RoundRobin(LegPolicy):
    """Gives all the same score; among equals, the one that was chosen longest ago wins."""

    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """The same for all."""
        return [0.0] * len(targets)
