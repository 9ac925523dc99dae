"""The one with the least to do: tokens to be computed for prefill, answers under way for decode."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.router.policies.base import Asked, Leg, LegPolicy, T, Target


def work(target: Target, leg: Leg) -> float:
    """How much an instance has to do on a leg. A decode instance's prompts count as answers to come."""
    load = target.load
    return load.prefill_tokens if leg == "prefill" else float(load.num_decodes + load.num_prefills)


class LeastLoaded(LegPolicy):
    """By `work`."""

    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """What each has to do."""
        return [work(one, leg) for one in targets]
