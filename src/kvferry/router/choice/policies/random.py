"""A random instance."""

from __future__ import annotations

import numpy as np

from kvferry.router.choice.policies.base import Leg, LegPolicy, PromptTraits
from kvferry.router.instances.load import Candidates, T, Vector


class RandomChoice(LegPolicy):
    """Gives the same score to all instances but one, which is drawn at random."""

    def score(self, traits: PromptTraits, leg: Leg, targets: Candidates[T]) -> Vector:
        """0 for the drawn instance, 1 for the others."""
        scores = np.ones(len(targets))
        scores[self.context.random.randrange(len(targets))] = 0.0
        return scores
