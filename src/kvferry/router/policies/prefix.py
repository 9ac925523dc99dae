"""To where most of the prompt's KV is, as long as that instance has not much more to do than the others.

Without the second half, every request of a fleet that shares a system prompt would go to the instance that saw it
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.router.policies.base import Asked, Leg, LegPolicy, PolicyContext, T, Target
from kvferry.router.policies.least_loaded import work


@dataclass(frozen=True)
class PrefixSettings:
    """How uneven the instances may get for the sake of their caches."""

    slack_tokens: int = 32768
    """How many tokens more than the least busy one an instance may have computed lately."""
    slack_requests: int = 8
    """How many more requests than the least busy one it may have under way."""


class PrefixAware(LegPolicy):
    """Longest cached prefix among those that are not too busy; then the least loaded."""

    Settings = PrefixSettings

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        assert isinstance(settings, PrefixSettings)
        self._settings = settings

    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """Tokens to be computed; for who is too busy, all of them. Ties are broken by load."""
        cached = self.context.index.match(asked.prefix)
        spare = self._spare(leg, targets)
        return [
            asked.num_tokens - (cached.get(one, 0) if free else 0) + _fraction(work(one, leg))
            for one, free in zip(targets, spare, strict=True)
        ]

    def _spare(self, leg: Leg, targets: Sequence[Target]) -> list[bool]:
        now, settings = self.context.clock.monotonic(), self._settings
        recent = [one.load.recent_tokens(now) for one in targets]
        running = [one.load.num_decodes + one.load.num_prefills for one in targets]
        most_recent, most_running = min(recent) + settings.slack_tokens, min(running) + settings.slack_requests
        return [a <= most_recent and b <= most_running for a, b in zip(recent, running, strict=True)]


def _fraction(value: float) -> float:
    """Below 1, in the order of `value`."""
    return value / (1.0 + value)
