"""The less loaded of two instances chosen at random (Mitzenmacher 2001). The load is nearly as even as with the least
loaded instance, and several routers that each see only their own requests do not all choose the same one."""

from __future__ import annotations

import numpy as np

from kvferry.router.choice.policies.base import Leg, LegPolicy, PromptTraits
from kvferry.router.choice.policies.least_loaded import work
from kvferry.router.instances.load import Candidates, T, Vector


class PowerOfTwo(LegPolicy):
    """The instance with less work (`work`) of two that are drawn at random."""

    def score(self, traits: PromptTraits, leg: Leg, targets: Candidates[T]) -> Vector:
        """The work of the two drawn instances; infinite for the others."""
        drawn = self.context.random.sample(range(len(targets)), min(2, len(targets)))
        scores = np.full(len(targets), np.inf)
        scores[drawn] = work(targets, leg)[drawn]
        return scores
