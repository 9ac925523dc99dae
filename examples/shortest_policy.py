"""A router policy of one's own: each leg goes to the instance with the fewest tokens before it.

    PYTHONPATH=examples kvferry router … --policy shortest_policy:Shortest --policy-option decode_tokens=300

`test_shortest_policy.py` runs the contract suite on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.router.choice.policies.base import Leg, LegPolicy, PolicyContext, PromptTraits
from kvferry.router.instances.load import Candidates, T, Vector


@dataclass(frozen=True)
class ShortestSettings:
    """What `--policy-option` may set."""

    decode_tokens: int = 500
    """As how many tokens of prefill an answer counts that an instance is writing."""


class Shortest(LegPolicy):
    """Knows only what an instance has to do, not what is in its cache."""

    Settings = ShortestSettings

    def __init__(self, context: PolicyContext, settings: ShortestSettings) -> None:
        super().__init__(context, settings)
        self._decode_tokens = settings.decode_tokens

    def score(self, traits: PromptTraits, leg: Leg, targets: Candidates[T]) -> Vector:
        """Tokens before this request, on each."""
        return targets.weighed(prefill_tokens=1, num_decodes=self._decode_tokens)
