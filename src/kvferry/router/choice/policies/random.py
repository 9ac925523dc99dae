"""A random instance."""

from __future__ import annotations

import numpy as np

from kvferry.router.choice.policies.base import Leg, LegPolicy, PromptTraits
from kvferry.router.instances.load import Candidates, T, Vector


class RandomChoice(LegPolicy):
    """Gives all but one the same score."""

    def score(self, asked: PromptTraits, leg: Leg, targets: Candidates[T]) -> Vector:
        """0 for the one that was drawn."""
        found = np.ones(len(targets))
        found[self.context.random.randrange(len(targets))] = 0.0
        return found
