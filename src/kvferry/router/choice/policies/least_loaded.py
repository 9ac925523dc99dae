"""The instance with the least work: tokens to be computed for prefill, running answers for decode."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.router.choice.policies.base import Asked, Leg, LegPolicy, T, Target


def work(target: Target, leg: Leg) -> float:
    """How much work an instance has, for a leg. Prompts that a decode instance computes count as answers to come."""
    load = target.load
    return load.prefill_tokens if leg == "prefill" else float(load.num_decodes + load.num_prefills)


class LeastLoaded(LegPolicy):
    """By `work`."""

    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """The work of each target."""
        return [work(one, leg) for one in targets]
