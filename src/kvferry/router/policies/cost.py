"""The least predicted time: queue, the uncached part of the prompt, transfer, and the company while decoding.

Every term is in seconds, from speeds that the router has measured (`router.cost`). Beside the request's own time there
is what it does to others, without which a short queue elsewhere would be reason enough to compute a long prompt once
more: everyone behind waits for it, and the blocks it makes push others out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.router.policies.base import Asked, Leg, LegPolicy, PolicyContext, T, Target


@dataclass(frozen=True)
class CostSettings:
    """Weights of what is not the request's own time."""

    others: float = 9.0
    """Seconds that each second of computing a prompt costs other requests."""
    pressure: float = 1.0
    """Seconds that count for each second of prefill whose tokens an instance's cache has taken in lately, beyond those
    of the least filled one: what is in it is pushed out sooner. 0: only queues count."""


class Cost(LegPolicy):
    """See the module. The terms of P and of D add up, so the best pair is made of the best of each."""

    Settings = CostSettings

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        assert isinstance(settings, CostSettings)
        self._settings = settings

    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """Seconds of the leg, and of what it costs others."""
        cached, weights = self.context.index.match(asked.prefix), self._settings
        if len(targets) == 1:
            return [self._cost(leg, targets[0], (1.0 + weights.others) * self._uncached(asked, cached, targets[0]))]
        now = self.context.clock.monotonic()
        recent = [one.load.recent_tokens(now) for one in targets]
        least = min(recent)
        return [
            self._cost(
                leg,
                one,
                (1.0 + weights.others) * self._uncached(asked, cached, one) + weights.pressure * (taken - least),
            )
            for one, taken in zip(targets, recent, strict=True)
        ]

    @staticmethod
    def _uncached(asked: Asked, cached: Mapping[Any, int], target: Target) -> int:
        return max(0, asked.num_tokens - cached.get(target, 0))

    def _cost(self, leg: Leg, target: Target, num_tokens: float) -> float:
        """`num_tokens`: the leg's own and what they stand for."""
        estimates, load = self.context.estimates, target.load
        token_s = estimates.token_s(target.name)
        # Decode has to fetch what prefill has to compute.
        work_s = estimates.hand_off.slope if leg == "decode" else token_s
        seconds = token_s * load.prefill_tokens + work_s * num_tokens
        return seconds if leg == "prefill" else seconds + estimates.company_s(load.num_decodes + load.num_prefills)
