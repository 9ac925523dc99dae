"""The bounds and the goal of a scaler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from kvferry.fleet.scaling.predictor import LatencyTargets

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True)
class Counts:
    """Instances that prefill, and instances that answer."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        """The number of instances of both roles."""
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill} P + {self.decode} D" if self.prefill else f"{self.decode} for both phases"


NOTHING = Counts(0, 0)


@dataclass(frozen=True)
class ScalingRules:
    """`goal`: the share of requests to be within `targets`. `min_counts`, `max_counts`: bounds of each role's
    instances; `budget`: bound of both together, weighed by `cost` (ranks of an instance). `fewest_per_decode`,
    `most_per_decode`: bounds of the number of prefill instances for each decode instance. `aggregate`: True if there
    may be no prefill instance, so that decode instances do both phases. `overflows`: routers know the targets, and have
    a decode instance compute a prompt that would be late from prefill. `switches`: (from, to) of roles that an instance
    can change while it runs. `unit`: the instances of one unit, in replica mode.

    `cool_down_s`: seconds without a release after a change, or after requests begin to be counted. `idle_s`: seconds
    without a request until the fleet is scaled to zero; 0: never. `least_requests`: number of requests from which on
    decisions are made."""

    targets: LatencyTargets
    min_counts: Counts
    max_counts: Counts
    budget: float
    goal: float = 0.99
    cost: Counts = Counts(1, 1)
    fewest_per_decode: float = 0.0
    most_per_decode: float = float("inf")
    aggregate: bool = False
    overflows: bool = False
    switches: frozenset[tuple[str, str]] = frozenset()
    unit: Counts | None = None
    cool_down_s: float = 120.0
    idle_s: float = 0.0
    least_requests: int = 20

    def price(self, counts: Counts) -> float:
        """The price of these counts, in ranks."""
        return counts.prefill * self.cost.prefill + counts.decode * self.cost.decode

    def allows(self, counts: Counts) -> bool:
        """True if these counts are within all bounds. One role is never without the other, unless `aggregate`."""
        if counts == NOTHING:
            return self.idle_s > 0 and self.min_counts == NOTHING
        if not counts.decode or not (counts.prefill or self.aggregate):
            return False
        if not self.min_counts.prefill <= counts.prefill <= self.max_counts.prefill:
            return False
        if not self.min_counts.decode <= counts.decode <= self.max_counts.decode:
            return False
        if counts.prefill and not (self.fewest_per_decode <= counts.prefill / counts.decode <= self.most_per_decode):
            return False
        return self.price(counts) <= self.budget

    @cached_property
    def topologies(self) -> tuple[Counts, ...]:
        """All counts that are allowed and can serve, the cheapest first."""
        return tuple(sorted(self._all(), key=lambda counts: (self.price(counts), counts.prefill)))

    def _all(self) -> Iterator[Counts]:
        if self.unit is not None:
            max_units = max(
                self.max_counts.prefill // max(1, self.unit.prefill), self.max_counts.decode // max(1, self.unit.decode)
            )
            every = (Counts(self.unit.prefill * n, self.unit.decode * n) for n in steps(1, max_units))
        else:
            every = (
                Counts(p, d)
                for d in steps(max(1, self.min_counts.decode), self.max_counts.decode)
                for p in steps(self.min_counts.prefill, self.max_counts.prefill)
            )
        yield from (counts for counts in every if self.allows(counts))

    def largest(self, candidates: Iterable[Counts]) -> list[Counts]:
        """The counts for which there are no other counts that are at least as large in both roles."""
        maximal: list[Counts] = []
        for counts in sorted(candidates, key=lambda counts: (counts.prefill, counts.decode), reverse=True):
            if not maximal or counts.decode > maximal[-1].decode:
                maximal.append(counts)
        return maximal

    def can_become(self, current: Counts, target: Counts) -> bool:
        """True if a single change leads there without serving less meanwhile: instances that one role loses and the
        other gains switch their role while they run."""
        p, d = target.prefill - current.prefill, target.decode - current.decode
        if p < 0 < d:
            return (PREFILL, DECODE) in self.switches
        if d < 0 < p:
            return (DECODE, PREFILL) in self.switches
        return True

    def nearest(self, counts: Counts) -> Counts:
        """The allowed counts that differ least from these counts; these counts themselves, if they are allowed."""
        if self.allows(counts) or not self.topologies:
            return counts
        return min(
            self.topologies,
            key=lambda candidate: (
                abs(candidate.prefill - counts.prefill) + abs(candidate.decode - counts.decode),
                self.price(candidate),
            ),
        )


def steps(start: int, stop: int) -> list[int]:
    """Numbers to try: each one up to 32, then in steps of about a sixteenth."""
    numbers, number = [], start
    while number <= stop:
        numbers.append(number)
        number += max(1, number // 16 - 1)
    return numbers if not numbers or numbers[-1] == stop else [*numbers, stop]
