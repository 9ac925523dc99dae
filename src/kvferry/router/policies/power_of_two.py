"""The less loaded of two that chance picks (Mitzenmacher 2001): nearly as even as the least loaded, and where several
routers share a fleet and each sees its own requests only, they do not all run to the same instance."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvferry.router.policies.base import Asked, Leg, LegPolicy, T
from kvferry.router.policies.least_loaded import work


class PowerOfTwo(LegPolicy):
    """By `work`, of two."""

    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """What the two have to do; the others are out."""
        drawn = set(self.context.random.sample(range(len(targets)), min(2, len(targets))))
        return [work(one, leg) if index in drawn else math.inf for index, one in enumerate(targets)]
