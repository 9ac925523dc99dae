"""The shortest predicted time: queue, uncached part of the prompt, transfer, and slowdown by other answers while
decoding.

Every term is in seconds, from speeds that the router has measured (`choice.cost`). The cost to other requests is added
to the request's own time; otherwise, a slightly shorter queue elsewhere would be reason enough to compute a long prompt
again. Everyone in the queue behind it waits for that, and its blocks evict others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.router.choice.policies.base import Asked, Leg, LegPolicy, PolicyContext, T, Target
from kvferry.router.instances.load import recent_tokens


@dataclass(frozen=True)
class CostSettings:
    """Weights of the costs beyond the request's own time."""

    others: float = 9.0
    """Seconds that each second of computing a prompt costs other requests."""
    pressure: float = 1.0
    """Seconds that count for each second of prefill whose tokens an instance's cache has taken in lately, beyond those
    of the least filled one: what is in it is pushed out sooner. 0: only queues count."""


class Cost(LegPolicy):
    """Adds up the terms of P and of D, so that the best pair consists of the best of each."""

    Settings = CostSettings

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        assert isinstance(settings, CostSettings)
        self._settings, self._weight = settings, 1.0 + settings.others

    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """Seconds of the leg, and of what it costs other requests."""
        estimates, cached = self.context.estimates, self.context.index.match(asked.prefix)
        speeds, weight, found = estimates.tokens_s([one.name for one in targets]), self._weight, list[float]()
        for one, token_s, pressure in zip(targets, speeds, self._pressure(targets), strict=True):
            load, uncached = one.load, asked.num_tokens - cached.get(one, 0)
            num_tokens = weight * uncached + pressure if uncached > 0 else pressure
            if leg == "prefill":
                found.append(token_s * load.prefill_tokens + token_s * num_tokens)
                continue
            # Decode has to fetch what prefill has to compute.
            work_s = estimates.hand_off.slope if leg == "decode" else token_s
            company_s = estimates.company_s(load.num_decodes + load.num_prefills)
            found.append(token_s * load.prefill_tokens + work_s * num_tokens + company_s)
        return found

    def _pressure(self, targets: Sequence[Target]) -> Sequence[float]:
        """Tokens that count for what each one's cache has taken in lately, beyond that of the least filled one."""
        if len(targets) == 1:
            return (0.0,)
        now = self.context.clock.monotonic()
        recent = recent_tokens([one.load for one in targets], now)
        least, pressure = min(recent), self._settings.pressure
        return [pressure * (taken - least) for taken in recent]
