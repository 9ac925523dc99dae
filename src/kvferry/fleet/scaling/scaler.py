"""How many instances of each role there are to be: the cheapest that keep the goal. A function: it remembers nothing
but what it is given, so the same facts give the same decision.

    nothing there     the first request brings one of each role
    no request        for long: nothing is kept, of either role
    too little known  nothing is changed
    goal not kept     the cheapest change that keeps it: prompts are deflected to decode, instances change their role
                      (if that is clearly better than what is kept as it is), new ones start
    out of reach      what is nearest to the goal for the least; and it is said
    goal kept         after a while, the cheapest that would have kept it for all that came lately, with some to spare

Nothing is asked of what instances hold or have in use, which says little about latency: all is predicted from what is
asked for and how long it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from kvferry.core.settings.units import percent
from kvferry.fleet.scaling.demand import Demand
from kvferry.fleet.scaling.predictor import Prediction, Predictor, Topology, quantiles_of
from kvferry.fleet.scaling.scaling_rules import NOTHING, Counts, ScalingRules
from kvferry.fleet.scaling.traffic import PhaseTimes, Workload

What = Literal["hold", "measure", "deflect", "role", "start", "release", "zero", "wake", "unreachable", "limits"]

_DEFLECTED = (0.25, 0.5, 0.75, 0.9)
"""Shares of prompts that may be deflected."""
RECENT_S = 30.0
"""Seconds, or the time of a start if that is longer, whose requests also count by themselves."""
_STICKY = 0.002
"""How much better another threshold must be to replace the one that is used."""
_CLEARLY = 0.05
"""How much better another division of as many instances must be: predictions are off by some points."""
_NEAREST = 0.005
"""How much nearer to a goal out of reach something must come to be worth an instance."""


class ScalingMemory(msgspec.Struct, frozen=True):
    """What is kept between decisions. `from_tokens`: uncached tokens from which prompts are computed on prefill
    instances; None: as routers see fit. `changed_at`: when the counts were changed last."""

    prefill: int
    decode: int
    from_tokens: int | None = None
    changed_at: float = -1e18

    @property
    def counts(self) -> Counts:
        """Instances wanted."""
        return Counts(self.prefill, self.decode)


@dataclass(frozen=True)
class TargetShare:
    """The share of some requests that was within both targets. `num`: of how many it is known."""

    share: float = 0.0
    num: int = 0

    def is_known(self, rules: ScalingRules) -> bool:
        """Whether these are enough requests to go by."""
        return self.num >= max(1, rules.least_requests)

    @property
    def at_most(self) -> float:
        """A standard deviation more, because what so few requests say is partly chance."""
        return self.share + math.sqrt(self.share * (1.0 - self.share) / self.num)


@dataclass(frozen=True)
class MeasuredTraffic:
    """What is known of the requests. `workload`, `times`: None until `num_known` requests are enough. `idle_s`: since
    the last one came. `num_waiting`: that wait for an instance to start. `attained`: of those that came lately, since
    the counts are what they are."""

    demand: Demand
    num_known: int = 0
    workload: Workload | None = None
    times: PhaseTimes | None = None
    idle_s: float = 0.0
    num_waiting: int = 0
    attained: TargetShare = TargetShare()


@dataclass(frozen=True)
class FleetSnapshot:
    """`ready`: instances that serve; `draining`: that are leaving; `starts_s`: how long one takes to start."""

    ready: Counts
    draining: int = 0
    starts_s: float = 30.0


@dataclass(frozen=True)
class ScalingDecision:
    """What is wanted from now on, and why, in one line. `attained`: the share of requests expected within the targets;
    None: not known."""

    memory: ScalingMemory
    what: What
    why: str
    attained: float | None = None


def decide(
    rules: ScalingRules, memory: ScalingMemory, measured: MeasuredTraffic, seen: FleetSnapshot, now: float
) -> ScalingDecision:
    """The decision now, in seconds of the clock of `memory.changed_at`."""
    here = memory.counts
    if here == NOTHING:
        return _wake(rules, memory, measured, now)
    if not rules.allows(here):
        there = rules.nearest(here)
        if there != here:
            return _changed(memory, there, now, "limits", f"{here} is not within the limits")
    if rules.idle_s and measured.idle_s >= rules.idle_s and rules.allows(NOTHING):
        return _changed(memory, NOTHING, now, "zero", f"no request for {measured.idle_s:.0f} s")
    if measured.workload is None or measured.times is None or measured.num_known < rules.least_requests:
        why = f"of the {rules.least_requests} requests that it takes to decide, {measured.num_known} are known"
        return ScalingDecision(memory, "measure", why)
    outlook = Forecast(rules, expected_workloads(measured.workload, measured.demand, seen.starts_s), measured.times)
    memory, deflects = _threshold(memory, outlook, seen)
    expected = outlook.best(here)
    if expected.attained < rules.goal:
        return _more(rules, memory, measured, outlook, expected, now)
    return _less(rules, memory, measured, seen, outlook, now) or ScalingDecision(
        memory,
        "deflect" if deflects else "hold",
        f"{deflects or 'enough'}: {outlook.told(here, expected)}",
        expected.attained,
    )


def expected_workloads(workload: Workload, demand: Demand, starts_s: float) -> list[Workload]:
    """What an instance that starts now will have to serve: what came lately, all of it again, so that capacity for
    bursts is held while they recur; and what came last, at the rate that it will have grown to."""
    recent_s = max(RECENT_S, starts_s)
    return [workload, workload.last(recent_s).faster(demand.growth(recent_s, starts_s))]


class Forecast:
    """What any counts would attain for each of some workloads, at least."""

    def __init__(self, rules: ScalingRules, workloads: Sequence[Workload], times: PhaseTimes) -> None:
        self.rules, self.workload = rules, workloads[-1]
        self._predictors = [Predictor(one, times, rules.targets, rules.overflows) for one in workloads]
        self._best: dict[Counts, float] = {}
        self.thresholds = [0.0, *quantiles_of(workloads[0].prompt_tokens, _DEFLECTED)] if rules.deflect else [0.0]

    def at(self, counts: Counts, from_tokens: float) -> Prediction:
        """The prediction for these counts with this threshold."""
        topology = Topology(counts.prefill, counts.decode, from_tokens)
        return min((one.predict(topology) for one in self._predictors), key=_rank)

    def best_threshold(self, counts: Counts) -> float:
        """The one with which most is attained; the lowest of those that are as good."""
        if not counts.prefill:
            return 0.0
        if counts not in self._best:
            found = 0.0
            for one in self.thresholds[1:]:
                if _rank(self.at(counts, one)) > _rank(self.at(counts, found)):
                    found = one
            self._best[counts] = found
        return self._best[counts]

    def best(self, counts: Counts) -> Prediction:
        """The prediction for these counts with the best threshold."""
        return self.at(counts, self.best_threshold(counts))

    def told(self, counts: Counts, expected: Prediction) -> str:
        """What is expected of these counts, in words."""
        targets = self.rules.targets
        within = f"TTFT {targets.ttft_s:g} s and ITL {1000 * targets.itl_s:g} ms"
        return (
            f"{percent(expected.attained)} % expected within {within}"
            f" at {self.workload.rate:.2f} requests/s with {counts}"
        )


def _rank(one: Prediction) -> tuple[float, float]:
    """Higher is better; of those that attain nothing, the one that is asked for the least."""
    return round(one.attained, 3), -one.busiest


def _threshold(memory: ScalingMemory, outlook: Forecast, seen: FleetSnapshot) -> tuple[ScalingMemory, str]:
    """Deflect prompts to decode where that helps the instances that serve now; says so if it is new."""
    if not outlook.rules.deflect or not seen.ready.prefill or not seen.ready.decode:
        return replace_from(memory, None), ""
    used, best = float(memory.from_tokens or 0), 0.0
    before = outlook.at(seen.ready, used)
    if outlook.at(seen.ready, 0.0).attained < outlook.rules.goal:
        best = outlook.best_threshold(seen.ready)
        if not _is_better(outlook.at(seen.ready, best), before):
            best = used
    if best == used:
        return memory, ""
    if not best:
        return replace_from(memory, None), "no prompts need to be deflected to decode any more"
    told = f"prompts below {best:.0f} tokens go to decode (before: {percent(before.attained)} %)"
    return replace_from(memory, int(best)), told


def _is_better(one: Prediction, other: Prediction) -> bool:
    """Clearly so; of two that attain nothing, the one that is asked for less."""
    return one.attained >= other.attained + _STICKY or (
        one.attained >= other.attained and one.busiest < 0.9 * other.busiest and other.attained < _STICKY
    )


def replace_from(memory: ScalingMemory, from_tokens: int | None) -> ScalingMemory:
    """The memory with another threshold."""
    return msgspec.structs.replace(memory, from_tokens=from_tokens)


def _more(
    rules: ScalingRules,
    memory: ScalingMemory,
    measured: MeasuredTraffic,
    outlook: Forecast,
    expected: Prediction,
    now: float,
) -> ScalingDecision:
    """Decide what to do, as the goal is not expected to be kept."""
    here = memory.counts
    least = rules.price(here)
    attained = measured.attained
    clearly = _CLEARLY + (attained.at_most if attained.is_known(rules) else expected.attained)
    there_is = [one for one in rules.topologies if rules.price(one) >= least and rules.can_become(here, one)]
    reachable = [one for one in there_is if rules.price(one) > least or outlook.best(one).attained >= clearly]
    largest = rules.largest((*reachable, here))  # more of either role is never worse
    nearest = max(largest, key=lambda one: _rank(outlook.best(one)))
    most = outlook.best(nearest)
    found = _cheapest_that_holds(rules, outlook, here, reachable) if most.attained >= rules.goal else None
    if found is not None:
        instead = outlook.told(found, outlook.best(found))
        if rules.price(found) > least and attained.is_known(rules) and attained.share >= rules.goal:
            other = _cheapest_that_holds(rules, outlook, here, there_is)
            if other is not None and rules.price(other) == least:  # nothing is started for what a role may do
                why = f"{percent(attained.share)} % were kept: {outlook.told(here, expected)}"
                return ScalingDecision(memory, "hold", why, expected.attained)
        what: What = "role" if rules.price(found) == least else "start"
        why = f"{instead}; {percent(expected.attained)} % with {here}"
        return _changed(memory, found, now, what, why, outlook.best(found).attained)
    there = next((one for one in (here, *reachable) if _is_as_near(outlook.best(one), most)), nearest)
    best = outlook.told(there, outlook.best(there))
    why = f"{100 * rules.goal:g} % cannot be kept within the limits; the best is {best}"
    if there == here:
        return ScalingDecision(memory, "unreachable", why, expected.attained)
    return _changed(memory, there, now, "unreachable", why, outlook.best(there).attained)


def _is_as_near(one: Prediction, most: Prediction) -> bool:
    """Whether it attains as much as the best; where nothing is attained, whether its queues end, or are as long."""
    if most.attained >= _NEAREST:
        return one.attained >= most.attained - _NEAREST
    return one.busiest <= max(0.9, most.busiest + 1e-9)


def _cheapest_that_holds(rules: ScalingRules, outlook: Forecast, here: Counts, among: list[Counts]) -> Counts | None:
    """The cheapest counts that reach the goal; at the same price, those that change the fewest instances, and then
    those that attain the most."""
    found: list[Counts] = []
    for one in among:  # the cheapest first
        if found and rules.price(one) > rules.price(found[0]):
            break
        if outlook.best(one).attained >= rules.goal:
            found.append(one)

    def merit(one: Counts) -> tuple[int, float]:
        moved = abs(one.prefill - here.prefill) + abs(one.decode - here.decode)
        return -moved, round(outlook.best(one).attained, 3)

    return max(found, key=merit, default=None)


def _less(
    rules: ScalingRules,
    memory: ScalingMemory,
    measured: MeasuredTraffic,
    seen: FleetSnapshot,
    outlook: Forecast,
    now: float,
) -> ScalingDecision | None:
    """The goal is kept: maybe with fewer, which would also have kept it for what came lately."""
    here = memory.counts
    if now - memory.changed_at < rules.cool_down_s or seen.draining or seen.ready != here:
        return None
    if measured.demand.known_s < rules.cool_down_s:
        return None  # nobody knows what was needed before
    spare = replace(rules, goal=rules.goal + (1.0 - rules.goal) / 2.0)
    cheaper = [one for one in rules.topologies if rules.price(one) < rules.price(here) and rules.can_become(here, one)]
    there = _cheapest_that_holds(spare, outlook, here, cheaper)
    if there is None:
        return None
    attained = outlook.best(there)
    why = f"{outlook.told(there, attained)}; {here} are not needed"
    return _changed(memory, there, now, "release", why, attained.attained)


def _wake(rules: ScalingRules, memory: ScalingMemory, measured: MeasuredTraffic, now: float) -> ScalingDecision:
    if not measured.num_waiting and measured.idle_s >= min(rules.idle_s or 1e18, 60.0):
        return ScalingDecision(memory, "hold", "no request: nothing is kept")
    first = rules.topologies[0] if rules.topologies else NOTHING
    return _changed(memory, first, now, "wake", f"{max(1, measured.num_waiting)} requests wait for an instance")


def _changed(
    memory: ScalingMemory, there: Counts, now: float, what: What, why: str, attained: float | None = None
) -> ScalingDecision:
    new = msgspec.structs.replace(memory, prefill=there.prefill, decode=there.decode, changed_at=now)
    return ScalingDecision(new, what, f"{memory.counts} → {there}: {why}", attained)
