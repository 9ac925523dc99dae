"""The desired number of instances of each role: the cheapest counts that keep the goal. A pure function: the same
facts give the same decision.

    scaled to zero    the first request starts one instance of each role
    no request        for long: all instances of both roles are ended
    too few requests  nothing is changed
    goal not kept     the cheapest change that keeps it: instances switch their role (if that is clearly better than
                      the present state), new ones start
    out of reach      the cheapest counts nearest to the goal; the decision says so
    goal kept         after a while, the cheapest counts that would have kept it for all recent requests, with a margin

The memory or the utilisation of instances is not used, as it says little about latency: all is predicted from the
requests and the times of their phases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from kvferry.core.settings.units import percent
from kvferry.fleet.scaling.demand import Demand
from kvferry.fleet.scaling.predictor import Prediction, Predictor, Topology
from kvferry.fleet.scaling.scaling_rules import NOTHING, Counts, ScalingRules
from kvferry.fleet.scaling.traffic import PhaseTimes, Workload

What = Literal["hold", "measure", "role", "start", "release", "zero", "wake", "unreachable", "limits"]

RECENT_S = 30.0
"""Seconds, or the time of a start if that is longer, whose requests also count by themselves."""
_MIN_GAIN = 0.05
"""Minimum gain for which the same number of instances is divided differently: predictions have errors of a few
points."""
_NEAREST = 0.005
"""Minimum gain for which an instance is added if the goal cannot be reached."""


class ScalingMemory(msgspec.Struct, frozen=True):
    """The state between two decisions. `changed_at`: time of the last change of the counts."""

    prefill: int
    decode: int
    changed_at: float = -1e18

    @property
    def counts(self) -> Counts:
        """The desired numbers of instances."""
        return Counts(self.prefill, self.decode)


@dataclass(frozen=True)
class TargetShare:
    """The share of some requests that was within both targets. `num`: number of these requests."""

    share: float = 0.0
    num: int = 0

    def is_known(self, rules: ScalingRules) -> bool:
        """True if these are enough requests to decide by."""
        return self.num >= max(1, rules.least_requests)

    @property
    def at_most(self) -> float:
        """The share plus a standard deviation, because the share of few requests is partly chance."""
        return self.share + math.sqrt(self.share * (1.0 - self.share) / self.num)


@dataclass(frozen=True)
class MeasuredTraffic:
    """The measured requests. `workload`, `times`: None until `num_known` requests are enough. `idle_s`: seconds since
    the last request. `num_waiting`: requests that wait for an instance to start. `attained`: of recent requests, since
    the last change of the counts."""

    demand: Demand
    num_known: int = 0
    workload: Workload | None = None
    times: PhaseTimes | None = None
    idle_s: float = 0.0
    num_waiting: int = 0
    attained: TargetShare = TargetShare()


@dataclass(frozen=True)
class FleetSnapshot:
    """`ready`: serving instances; `draining`: leaving instances; `starts_s`: seconds that an instance takes to
    start."""

    ready: Counts
    draining: int = 0
    starts_s: float = 30.0


@dataclass(frozen=True)
class ScalingDecision:
    """The desired state from now on, with the reason in one line. `attained`: the share of requests expected within the
    targets; None: not known."""

    memory: ScalingMemory
    what: What
    reason: str
    attained: float | None = None


def decide(
    rules: ScalingRules, memory: ScalingMemory, measured: MeasuredTraffic, seen: FleetSnapshot, now: float
) -> ScalingDecision:
    """The decision now, in seconds of the clock of `memory.changed_at`."""
    current = memory.counts
    if current == NOTHING:
        return _wake(rules, memory, measured, now)
    if not rules.allows(current):
        allowed = rules.nearest(current)
        if allowed != current:
            return _changed(memory, allowed, now, "limits", f"{current} is not within the limits")
    if rules.idle_s and measured.idle_s >= rules.idle_s and rules.allows(NOTHING):
        return _changed(memory, NOTHING, now, "zero", f"no request for {measured.idle_s:.0f} s")
    if measured.workload is None or measured.times is None or measured.num_known < rules.least_requests:
        reason = f"of the {rules.least_requests} requests that it takes to decide, {measured.num_known} are known"
        return ScalingDecision(memory, "measure", reason)
    outlook = Forecast(rules, expected_workloads(measured.workload, measured.demand, seen.starts_s), measured.times)
    expected = outlook.best(current)
    if expected.attained < rules.goal:
        return _scale_up(rules, memory, measured, outlook, expected, now)
    return _scale_down(rules, memory, measured, seen, outlook, now) or ScalingDecision(
        memory, "hold", f"enough: {outlook.describe(current, expected)}", expected.attained
    )


def expected_workloads(workload: Workload, demand: Demand, starts_s: float) -> list[Workload]:
    """The workloads that an instance which starts now will have to serve. The first is the recent one as a whole, so
    that capacity for bursts is held while they recur; the second is its last part, at the rate of its trend."""
    recent_s = max(RECENT_S, starts_s)
    return [workload, workload.last(recent_s).faster(demand.growth(recent_s, starts_s))]


class Forecast:
    """Predicts, for any counts, the worst share over some workloads."""

    def __init__(self, rules: ScalingRules, workloads: Sequence[Workload], times: PhaseTimes) -> None:
        self.rules, self.workload = rules, workloads[-1]
        self._predictors = [Predictor(workload, times, rules.targets, rules.overflows) for workload in workloads]

    def best(self, counts: Counts) -> Prediction:
        """The prediction for these counts with the workload for which it is the worst."""
        topology = Topology(counts.prefill, counts.decode)
        return min((each.predict(topology) for each in self._predictors), key=_rank)

    def describe(self, counts: Counts, expected: Prediction) -> str:
        """The expectation for these counts, in words."""
        targets = self.rules.targets
        within = f"TTFT {targets.ttft_s:g} s and ITL {1000 * targets.itl_s:g} ms"
        return (
            f"{percent(expected.attained)} % expected within {within}"
            f" at {self.workload.rate:.2f} requests/s with {counts}"
        )


def _rank(prediction: Prediction) -> tuple[float, float]:
    """Sort key: higher is better; if nothing is attained, a lower load is better."""
    return round(prediction.attained, 3), -prediction.busiest


def _scale_up(
    rules: ScalingRules,
    memory: ScalingMemory,
    measured: MeasuredTraffic,
    outlook: Forecast,
    expected: Prediction,
    now: float,
) -> ScalingDecision:
    """Decide on more capacity, because the goal is not expected to be kept."""
    current = memory.counts
    price = rules.price(current)
    attained = measured.attained
    required = _MIN_GAIN + (attained.at_most if attained.is_known(rules) else expected.attained)
    candidates = [each for each in rules.topologies if rules.price(each) >= price and rules.can_become(current, each)]
    reachable = [each for each in candidates if rules.price(each) > price or outlook.best(each).attained >= required]
    largest = rules.largest((*reachable, current))  # more of either role is never worse
    nearest = max(largest, key=lambda each: _rank(outlook.best(each)))
    best_possible = outlook.best(nearest)
    cheapest = (
        _cheapest_that_holds(rules, outlook, current, reachable) if best_possible.attained >= rules.goal else None
    )
    if cheapest is not None:
        instead = outlook.describe(cheapest, outlook.best(cheapest))
        if rules.price(cheapest) > price and attained.is_known(rules) and attained.share >= rules.goal:
            other = _cheapest_that_holds(rules, outlook, current, candidates)
            if other is not None and rules.price(other) == price:  # switching roles is enough
                reason = f"{percent(attained.share)} % were kept: {outlook.describe(current, expected)}"
                return ScalingDecision(memory, "hold", reason, expected.attained)
        action: What = "role" if rules.price(cheapest) == price else "start"
        reason = f"{instead}; {percent(expected.attained)} % with {current}"
        return _changed(memory, cheapest, now, action, reason, outlook.best(cheapest).attained)
    target = next((each for each in (current, *reachable) if _is_close_to(outlook.best(each), best_possible)), nearest)
    best = outlook.describe(target, outlook.best(target))
    reason = f"{100 * rules.goal:g} % cannot be kept within the limits; the best is {best}"
    if target == current:
        return ScalingDecision(memory, "unreachable", reason, expected.attained)
    return _changed(memory, target, now, "unreachable", reason, outlook.best(target).attained)


def _is_close_to(prediction: Prediction, best: Prediction) -> bool:
    """True if it attains as much as the best; if nothing is attained, if its queues end, or are as short."""
    if best.attained >= _NEAREST:
        return prediction.attained >= best.attained - _NEAREST
    return prediction.busiest <= max(0.9, best.busiest + 1e-9)


def _cheapest_that_holds(
    rules: ScalingRules, outlook: Forecast, current: Counts, candidates: list[Counts]
) -> Counts | None:
    """The cheapest counts that reach the goal; at the same price, the counts that change the fewest instances, and then
    the counts that attain the most."""
    cheapest: list[Counts] = []
    for counts in candidates:  # the cheapest first
        if cheapest and rules.price(counts) > rules.price(cheapest[0]):
            break
        if outlook.best(counts).attained >= rules.goal:
            cheapest.append(counts)

    def merit(counts: Counts) -> tuple[int, float]:
        moved = abs(counts.prefill - current.prefill) + abs(counts.decode - current.decode)
        return -moved, round(outlook.best(counts).attained, 3)

    return max(cheapest, key=merit, default=None)


def _scale_down(
    rules: ScalingRules,
    memory: ScalingMemory,
    measured: MeasuredTraffic,
    seen: FleetSnapshot,
    outlook: Forecast,
    now: float,
) -> ScalingDecision | None:
    """Release instances if fewer would also have kept the goal for the recent requests; None: keep all."""
    current = memory.counts
    if now - memory.changed_at < rules.cool_down_s or seen.draining or seen.ready != current:
        return None
    if measured.demand.known_s < rules.cool_down_s:
        return None  # the earlier demand is not known
    spare = replace(rules, goal=rules.goal + (1.0 - rules.goal) / 2.0)
    cheaper = [
        each
        for each in rules.topologies
        if rules.price(each) < rules.price(current) and rules.can_become(current, each)
    ]
    target = _cheapest_that_holds(spare, outlook, current, cheaper)
    if target is None:
        return None
    attained = outlook.best(target)
    reason = f"{outlook.describe(target, attained)}; {current} are not needed"
    return _changed(memory, target, now, "release", reason, attained.attained)


def _wake(rules: ScalingRules, memory: ScalingMemory, measured: MeasuredTraffic, now: float) -> ScalingDecision:
    if not measured.num_waiting and measured.idle_s >= min(rules.idle_s or 1e18, 60.0):
        return ScalingDecision(memory, "hold", "no request: nothing is kept")
    first = rules.topologies[0] if rules.topologies else NOTHING
    return _changed(memory, first, now, "wake", f"{max(1, measured.num_waiting)} requests wait for an instance")


def _changed(
    memory: ScalingMemory, target: Counts, now: float, action: What, reason: str, attained: float | None = None
) -> ScalingDecision:
    new = msgspec.structs.replace(memory, prefill=target.prefill, decode=target.decode, changed_at=now)
    return ScalingDecision(new, action, f"{memory.counts} → {target}: {reason}", attained)
