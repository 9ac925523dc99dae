"""The less loaded of two instances chosen at random (Mitzenmacher 2001). The load is nearly as even as with the least
loaded instance, and several routers that each see only their own requests do not all choose the same one."""

from __future__ import annotations

import numpy as np

from kvferry.router.choice.policies.base import Leg, LegPolicy, PromptTraits
from kvferry.router.choice.policies.least_loaded import work
from kvferry.router.instances.load import Candidates, T, Vector


class PowerOfTwo(LegPolicy):
    """The one with less work (`work`) of two instances that are drawn at random."""

    def score(self, asked: PromptTraits, leg: Leg, targets: Candidates[T]) -> Vector:
        """The work of the two that were drawn; the others are never chosen."""
        drawn = self.context.random.sample(range(len(targets)), min(2, len(targets)))
        found = np.full(len(targets), np.inf)
        found[drawn] = work(targets, leg)[drawn]
        return found
