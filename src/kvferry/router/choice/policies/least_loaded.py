"""The instance with the least work: tokens to be computed for prefill, running answers for decode."""

from __future__ import annotations

from kvferry.router.choice.policies.base import Leg, LegPolicy, PromptTraits
from kvferry.router.instances.load import Candidates, T, Vector


def work(targets: Candidates[T], leg: Leg) -> Vector:
    """Work of each instance for a leg. A prompt that a decode instance computes counts as a future answer."""
    if leg == "prefill":
        return targets.prefill_tokens
    return targets.weighed(num_prefills=1.0, num_decodes=1.0)


class LeastLoaded(LegPolicy):
    """The instance with the least work (`work`)."""

    def score(self, traits: PromptTraits, leg: Leg, targets: Candidates[T]) -> Vector:
        """The work of each target."""
        return work(targets, leg)
