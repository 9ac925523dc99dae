"""To where most of the prompt's KV is, as long as that instance has not much more to do than the others.

Without the second half, every request of a fleet that shares a system prompt would go to the instance that saw it
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.router.policies.base import Asked, Leg, LegPolicy, PolicyContext, T
from kvferry.router.policies.least_loaded import work


@dataclass(frozen=True)
class PrefixSettings:
    """How uneven the instances may get for the sake of their caches."""

    pressure: float = 0.1
    """Tokens of the prompt that count for each token that an instance's cache has taken in lately beyond what the least
    filled one has."""
    slack_requests: int = 16
    """How many more requests than the least busy one it may have under way."""


class PrefixAware(LegPolicy):
    """Longest cached prefix among those that are not too busy; then the least loaded."""

    Settings = PrefixSettings

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        assert isinstance(settings, PrefixSettings)
        self._settings = settings

    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """Tokens to be computed (all of them, for who is too busy), and what counts like tokens; then by load."""
        cached = self.context.index.match(asked.prefix)
        now = self.context.clock.monotonic()
        taken = [one.load.recent_tokens(now) for one in targets]
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
