"""The less loaded of two instances chosen at random (Mitzenmacher 2001). The load is nearly as even as with the least
loaded instance, and several routers that each see only their own requests do not all choose the same one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvferry.router.choice.policies.base import Asked, Leg, LegPolicy, T
from kvferry.router.choice.policies.least_loaded import work


class PowerOfTwo(LegPolicy):
    """By `work`, of two."""

    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """The work of the two that were drawn; the others are never chosen."""
        drawn = set(self.context.random.sample(range(len(targets)), min(2, len(targets))))
        return [work(one, leg) if index in drawn else math.inf for index, one in enumerate(targets)]
