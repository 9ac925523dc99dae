"""The instance that has most of the prompt's KV, as long as it does not have much more work than the others.

Without the second condition, every request with the same system prompt would go to the instance that got it first.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.router.choice.policies.base import Leg, LegPolicy, PolicyContext, PromptTraits
from kvferry.router.instances.load import Candidates, T, Vector

_TIE_BREAK = 1e-6
"""Weight of the load if prefixes are equal, in tokens of the prompt."""


@dataclass(frozen=True)
class PrefixSettings:
    """The settings of the policy: how much more load an instance may have because of cached prefixes."""

    pressure: float = 0.1
    """Tokens of the prompt that count for each token that an instance's cache has stored lately."""
    slack_requests: int = 16
    """Number of running requests that an instance may have beyond the least busy one."""


class PrefixAware(LegPolicy):
    """The longest cached prefix among the instances that are not too busy; then the least loaded."""

    Settings = PrefixSettings

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        assert isinstance(settings, PrefixSettings)
        self._settings = settings

    def score(self, traits: PromptTraits, leg: Leg, targets: Candidates[T]) -> Vector:
        """Tokens to compute (all of them for an overloaded instance), plus those that count for recent writes to its
        cache; the load only decides among equals."""
        cached = self.context.index.cached(traits.prefix, targets)
        if (busy := self.overloaded(targets)) is not None:
            cached = cached * ~busy
        is_prefill = leg == "prefill"
        scores = targets.weighed(
            prefill_tokens=_TIE_BREAK if is_prefill else 0.0,
            num_prefills=0.0 if is_prefill else _TIE_BREAK,
            num_decodes=0.0 if is_prefill else _TIE_BREAK,
            recent_tokens=self._settings.pressure,
            now=self.context.clock.monotonic(),
            constant=traits.num_tokens,
        )
        scores -= cached
        return scores

    def overloaded(self, targets: Candidates[T]) -> Vector | None:
        """Mask of the instances with more running requests than the slack allows; None if there are none."""
        running = targets.weighed(num_prefills=1.0, num_decodes=1.0)
        max_running = running[running.argmin()] + self._settings.slack_requests
        is_overloaded: Vector = running > max_running
        return is_overloaded if running[running.argmax()] > max_running else None
