"""The instance that has most of the prompt's KV, as long as it does not have much more work than the others.

Without the second condition, every request with the same system prompt would go to the instance that got it first.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.router.choice.policies.base import Leg, LegPolicy, PolicyContext, PromptTraits
from kvferry.router.instances.load import Candidates, T, Vector

_LITTLE = 1e-6
"""Tokens of the prompt."""


@dataclass(frozen=True)
class PrefixSettings:
    """How uneven the load may become for the sake of cached prefixes."""

    pressure: float = 0.1
    """Tokens of the prompt that count for each token that an instance's cache has taken in lately."""
    slack_requests: int = 16
    """How many more requests than the least busy one it may have under way."""


class PrefixAware(LegPolicy):
    """The longest cached prefix among the instances that are not too busy; then the least loaded."""

    Settings = PrefixSettings

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        assert isinstance(settings, PrefixSettings)
        self._settings = settings

    def score(self, asked: PromptTraits, leg: Leg, targets: Candidates[T]) -> Vector:
        """Tokens to be computed (all of them for an instance that is too busy), and those that count for what its cache
        has taken in; the load only decides among equals."""
        cached = self.context.index.cached(asked.prefix, targets)
        if (busy := self.overloaded(targets)) is not None:
            cached = cached * ~busy
        is_prefill = leg == "prefill"
        scores = targets.weighed(
            prefill_tokens=_LITTLE if is_prefill else 0.0,
            num_prefills=0.0 if is_prefill else _LITTLE,
            num_decodes=0.0 if is_prefill else _LITTLE,
            recent_tokens=self._settings.pressure,
            now=self.context.clock.monotonic(),
            constant=asked.num_tokens,
        )
        scores -= cached
        return scores

    def overloaded(self, targets: Candidates[T]) -> Vector | None:
        """Which of them have more requests under way than may be; None: none."""
        running = targets.weighed(num_prefills=1.0, num_decodes=1.0)
        most = running[running.argmin()] + self._settings.slack_requests
        found: Vector = running > most
        return found if running[running.argmax()] > most else None
