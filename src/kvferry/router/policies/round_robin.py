"""Everyone in turn: the candidate whose turn is longest ago; those that never had one go first.

Turns belong to instances, not to positions in a list, so candidates that come and go do not unsettle the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.router.policies.base import Asked, Leg, LegPolicy, T


class RoundRobin(LegPolicy):
    """All are equal, and between equals it is a matter of turns."""

    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """The same for all."""
        return [0.0] * len(targets)
