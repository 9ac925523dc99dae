"""The work that an instance has been given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_HALF_LIFE_S = 1800.0
"""After which what an instance's cache has taken in counts half."""


@dataclass
class InstanceLoad:
    """The work that the router has given to one instance. Written by the `Work` of each leg, or by a simulator."""

    prefill_tokens: float = 0.0
    """Of prompts that it computes or that wait there, without what it had cached."""
    num_prefills: int = 0
    num_decodes: int = 0
    _recent: float = 0.0
    _recent_at: float = 0.0

    def note_taken(self, num_tokens: float, now: float) -> None:
        """At `now` on the policy's clock, the instance's cache takes in this many more tokens, computed or handed
        over."""
        self._recent = num_tokens + self._recent * math.exp2((self._recent_at - now) / _HALF_LIFE_S)
        self._recent_at = now

    def recent_tokens(self, now: float) -> float:
        """Tokens that the instance's cache has taken in recently; older ones count less."""
        return self._recent * math.exp2((self._recent_at - now) / _HALF_LIFE_S)


def recent_tokens(loads: Sequence[InstanceLoad], now: float) -> list[float]:
    """`InstanceLoad.recent_tokens` of each."""
    return [load._recent * math.exp2((load._recent_at - now) / _HALF_LIFE_S) for load in loads]
