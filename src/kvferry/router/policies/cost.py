"""The least predicted time: queue, the uncached part of the prompt, transfer, and the company while decoding.

Every term is in seconds, from speeds that the router has measured (`router.cost`). Beside the request's own time there
is what it does to others: a token computed on an instance evicts another's there (`pressure`), and an answer slows
down the answers beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.router.policies.base import Asked, Leg, LegPolicy, PolicyContext, T, Target


@dataclass(frozen=True)
class CostSettings:
    """Weights of what is not the request's own time."""

    pressure: float = 0.02
    """Seconds of an instance's prefill that count for each second that it has computed more than the least busy one
    lately. 0: only queues count."""


class Cost(LegPolicy):
    """See the module. The terms of P and of D add up, so the best pair is made of the best of each."""

    Settings = CostSettings

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        assert isinstance(settings, CostSettings)
        self._settings = settings

    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """Seconds of the leg, and of what it costs others."""
        cached = self.context.index.match(asked.prefix)
        now = self.context.clock.monotonic()
        recent = [one.load.recent_tokens(now) for one in targets]
        least = min(recent)
        return [
            self._cost(
                leg, one, max(0, asked.num_tokens - cached.get(one, 0)), self._settings.pressure * (given - least)
            )
            for one, given in zip(targets, recent, strict=True)
        ]

    def _cost(self, leg: Leg, target: Target, uncached: int, pressure: float) -> float:
        estimates, load = self.context.estimates, target.load
        waiting = load.prefill_tokens + pressure
        if leg == "prefill":
            return estimates.prefill_s(target.name, waiting + uncached)
        company = estimates.company_s(load.num_decodes + load.num_prefills)
        if leg == "whole":
            return company + estimates.prefill_s(target.name, waiting + uncached)
        return company + estimates.token_s(target.name) * waiting + estimates.hand_off.at(uncached)
