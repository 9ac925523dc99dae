"""The shortest predicted time: queue, uncached part of the prompt, transfer, and slowdown by other answers while
decoding.

Every term is in seconds, from speeds that the router has measured (`choice.cost`). The costs to other requests are
added to the request's own time: these requests wait behind it in the queue, and it evicts their blocks. Otherwise, a
long prompt would be computed again because of a slightly shorter queue elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.router.choice.policies.base import Leg, LegPolicy, PolicyContext, PromptTraits
from kvferry.router.instances.load import Candidates, T, Vector


@dataclass(frozen=True)
class CostSettings:
    """Weights of the costs beyond the request's own time."""

    others: float = 9.0
    """Seconds that each second of computing a prompt costs other requests."""
    pressure: float = 1.0
    """Seconds that count for each second of prefill that an instance's cache has stored lately, since its blocks are
    evicted sooner. 0: only queues count."""


class Cost(LegPolicy):
    """The cost of a pair is the sum of a term of P and a term of D, so that the best pair consists of the best P and
    the best D."""

    Settings = CostSettings

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        assert isinstance(settings, CostSettings)
        self._settings, self._weight = settings, 1.0 + settings.others

    def score(self, traits: PromptTraits, leg: Leg, targets: Candidates[T]) -> Vector:
        """Seconds of the leg, plus its cost to other requests in seconds."""
        estimates, cached = self.context.estimates, self.context.index.cached(traits.prefix, targets)
        token_s = estimates.any_prefill.slope
        # Decode has to fetch what prefill has to compute.
        work_s = estimates.hand_off.slope if leg == "decode" else token_s
        interference_s = 0.0 if leg == "prefill" else estimates.interference_s()
        seconds = targets.weighed(
            prefill_tokens=token_s,
            num_prefills=interference_s,
            num_decodes=interference_s,
            recent_tokens=work_s * self._settings.pressure,
            now=self.context.clock.monotonic(),
            constant=work_s * self._weight * traits.num_tokens,
        )
        seconds -= cached * (work_s * self._weight)
        slowness = estimates.slowness(targets)
        if slowness is not None and leg != "decode":
            num_tokens = targets.prefill_tokens + (traits.num_tokens - cached) * self._weight
            seconds += num_tokens * (slowness - 1.0) * token_s
        return seconds
