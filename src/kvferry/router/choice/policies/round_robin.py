"""Each instance in turn: the least recently chosen first; instances that were never chosen come before.

The order is kept by instance and not by position in a list, so instances may come and go.
"""

from __future__ import annotations

import numpy as np

from kvferry.router.choice.policies.base import Leg, LegPolicy, PromptTraits
from kvferry.router.instances.load import Candidates, T, Vector


class RoundRobin(LegPolicy):
    """Gives all instances the same score. Among equal scores, the least recently chosen instance wins."""

    def score(self, traits: PromptTraits, leg: Leg, targets: Candidates[T]) -> Vector:
        """The same score for all instances, so that the turn decides."""
        return np.zeros(len(targets))
