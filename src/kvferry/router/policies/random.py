"""Anyone, by chance."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.router.policies.base import Asked, Leg, LegPolicy, T


class RandomChoice(LegPolicy):
    """The lowest of random numbers."""

    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """Random."""
        return [self.context.random.random() for _ in targets]
