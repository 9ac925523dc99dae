"""The instance that has most of the prompt's KV, as long as it does not have much more work than the others.

Without the second condition, every request with the same system prompt would go to the instance that got it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.router.choice.policies.base import Asked, Leg, LegPolicy, PolicyContext, T
from kvferry.router.choice.policies.least_loaded import work
from kvferry.router.instances.load import recent_tokens


@dataclass(frozen=True)
class PrefixSettings:
    """How uneven the load may become for the sake of cached prefixes."""

    pressure: float = 0.1
    """Tokens of the prompt that count for each token that an instance's cache has taken in lately beyond what the least
    filled one has."""
    slack_requests: int = 16
    """How many more requests than the least busy one it may have under way."""


class PrefixAware(LegPolicy):
    """The longest cached prefix among the instances that are not too busy; then the least loaded."""

    Settings = PrefixSettings

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        assert isinstance(settings, PrefixSettings)
        self._settings = settings

    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """Tokens to be computed (all of them for an instance that is too busy) and the penalty in tokens; then the
        load."""
        cached = self.context.index.match(asked.prefix)
        now = self.context.clock.monotonic()
        taken = recent_tokens([one.load for one in targets], now)
        running = [one.load.num_decodes + one.load.num_prefills for one in targets]
        most, least = min(running) + self._settings.slack_requests, min(taken)
        return [
            asked.num_tokens
            - (cached.get(one, 0) if num <= most else 0)
            + self._settings.pressure * (given - least)
            + _fraction(work(one, leg))
            for one, num, given in zip(targets, running, taken, strict=True)
        ]


def _fraction(value: float) -> float:
    """Below 1, in the order of `value`."""
    return value / (1.0 + value)
