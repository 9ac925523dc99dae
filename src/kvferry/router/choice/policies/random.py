"""A random instance."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.router.choice.policies.base import Asked, Leg, LegPolicy, T


class RandomChoice(LegPolicy):
    """The instance with the lowest of random numbers."""

    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """Random numbers."""
        return [self.context.random.random() for _ in targets]
