"""Autoscaling of one fleet: measures the traffic, decides the counts of instances, and stores them.

Owns the counts of a fleet with `[scale]`. They are stored in the ledger, so that they outlive the controller. The spec
is not changed, and limits them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.messages.traffic import FleetPlan, ScaleDecision, TrafficReport
from kvferry.fleet.control.facts import ObservedInstance, Phase
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.scaling.predictor import LatencyTargets
from kvferry.fleet.scaling.scaler import RECENT_S, FleetSnapshot, ScalingDecision, ScalingMemory, decide
from kvferry.fleet.scaling.scaling_rules import DECODE, NOTHING, PREFILL, Counts, ScalingRules
from kvferry.fleet.scaling.traffic import DecodeCapacity
from kvferry.fleet.scaling.traffic_meter import TrafficMeter
from kvferry.fleet.spec.fleet_settings import router_keys
from kvferry.fleet.spec.fleet_spec import MOST, DesiredFleet, MemberRole, RoleSpec, ScaleSpec, seconds

logger = logging.getLogger(__name__)


class Scaling:
    """The counts of one fleet. Without `[scale]`, they are the spec's counts."""

    clock_step_s = 5.0
    """If the wall clock and the monotonic clock differ by more than these seconds in their progress, the wall clock was
    set, or the machine was suspended."""
    max_decisions = 32

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger, self._clock = ledger, clock
        self._memory: ScalingMemory | None = ledger.scaled_counts()
        self._meter: TrafficMeter | None = None
        self._decided_at = -1e18
        self._wall_ahead_s = 0.0
        """Seconds by which the wall clock was ahead of the monotonic clock at the last reading."""
        self._decision: ScalingDecision | None = None
        self._decisions = deque[ScaleDecision](maxlen=self.max_decisions)
        self._starting: dict[str, float] = {}
        self._starts_s: float | None = None

    def adopt(self, plan: FleetPlan | None) -> None:
        """Continue from the plan that an earlier controller has sent to the routers. It may have run on another
        machine, so that the time of its decision is not known here."""
        if plan is not None and not self._decisions:
            self._decisions.extend(plan.decisions)
        if plan is None or plan.goal is None or plan.recommends:
            return
        prefill = plan.desired.get(PREFILL, 0)
        planned = ScalingMemory(prefill, sum(plan.desired.values()) - prefill, changed_at=self._clock.wall())
        if self._memory is None or self._memory.counts != planned.counts:
            self._memory = planned

    # The desired counts.

    def desired_fleet(self, fleet: DesiredFleet) -> DesiredFleet:
        """The fleet with the decided counts."""
        if fleet.scale is None:
            if self._memory is not None:
                self._ledger.remove_scaled_counts()
            self._memory = self._meter = self._decision = None
            return fleet
        rules = rules_of(fleet, fleet.scale)
        if self._memory is None:
            counts = counts_of(fleet)
            self._memory = ScalingMemory(counts.prefill, counts.decode)
        if fleet.scale.recommend:
            return fleet
        return with_counts(fleet, rules.nearest(self._memory.counts))

    def plan(self, fleet: DesiredFleet) -> FleetPlan:
        """The plan for the routers. `fleet`: the result of `desired_fleet`."""
        scale, memory = fleet.scale, self._memory
        if scale is None or memory is None:
            return FleetPlan(_by_role(fleet, counts_of(fleet)))
        recommends = scale.recommend
        counts = memory.counts if recommends else counts_of(fleet)
        return FleetPlan(
            desired=_by_role(fleet, counts),
            attained=None if self._decision is None else self._decision.attained,
            goal=scale.attainment,
            starts_s=self._start_s(scale) if seconds(scale.idle) and not recommends else 0.0,
            ttft_s=0.0 if recommends else seconds(scale.ttft),
            itl_s=0.0 if recommends else seconds(scale.itl),
            recommends=recommends,
            decisions=tuple(self._decisions),
        )

    @property
    def has_decided(self) -> bool:
        """True if this controller, or an earlier one, has decided about the counts."""
        return self._memory is not None

    @property
    def last_decision(self) -> str:
        """The last decision, in words; empty if there was none."""
        return "" if self._decision is None else f"{self._decision.what}: {self._decision.reason}"

    # The decisions.

    def is_due(self, fleet: DesiredFleet) -> bool:
        """True if it is time to read the routers' reports and to decide again. A fleet without instances decides more
        often."""
        if fleet.scale is None:
            return False
        asleep = self._memory is not None and self._memory.counts == NOTHING
        interval_s = seconds(fleet.scale.interval)
        return self._clock.monotonic() - self._decided_at >= (min(1.0, interval_s) if asleep else interval_s)

    async def decide(
        self,
        fleet: DesiredFleet,
        seen: Sequence[ObservedInstance],
        reports: Mapping[str, TrafficReport],
        capacity: DecodeCapacity,
    ) -> None:
        """Decide by the routers' reports. `seen`: the observed instances; `capacity`: the capacity of one decode
        instance. If this fails, the counts stay as they are, and the fleet is still managed."""
        try:
            await self._decide(fleet, seen, reports, capacity)
        except Exception:
            logger.exception("scaling: nothing could be decided from what the routers report")

    async def _decide(
        self,
        fleet: DesiredFleet,
        seen: Sequence[ObservedInstance],
        reports: Mapping[str, TrafficReport],
        capacity: DecodeCapacity,
    ) -> None:
        scale, now, wall = fleet.scale, self._clock.monotonic(), self._clock.wall()
        if scale is None or self._memory is None:
            return
        self._decided_at = now
        self._record_starts(seen)
        if self._meter is None:
            self._meter = TrafficMeter(seconds(scale.interval), wall)
        elif abs(wall - now - self._wall_ahead_s) > self.clock_step_s:
            logger.warning("the clock was set by %.0f s; requests are measured anew", wall - now - self._wall_ahead_s)
            self._meter.clock_was_set(wall)
            self._memory = msgspec.structs.replace(self._memory, changed_at=wall)  # nothing is released for a while
        self._wall_ahead_s = wall - now
        ready_at = {instance.name: wall - (now - instance.since) for instance in seen if instance.phase is Phase.READY}
        self._meter.record(reports, ready_at, wall, seconds(scale.warm))
        if not reports:
            return
        memory = self._memory
        if scale.recommend:
            counts = counts_of(fleet)
            memory = msgspec.structs.replace(memory, prefill=counts.prefill, decode=counts.decode)
        rules = rules_of(fleet, scale)
        since = max(memory.changed_at, wall - RECENT_S)
        measured = replace(
            self._meter.measured(capacity, wall, hold_s=seconds(scale.hold)),
            attained=self._meter.attained(rules.targets, since, wall),
        )
        snapshot = FleetSnapshot(
            ready=_count_by_role(instance for instance in seen if instance.phase is Phase.READY),
            draining=sum(instance.phase is Phase.DRAINING for instance in seen),
            starts_s=self._start_s(scale),
        )
        self._adopt_decision(await asyncio.to_thread(decide, rules, memory, measured, snapshot, wall), scale)

    def _adopt_decision(self, decision: ScalingDecision, scale: ScaleSpec) -> None:
        before, self._decision = self._decision, decision
        changes = self._memory is None or decision.memory.counts != self._memory.counts
        is_newly_unreachable = decision.what == "unreachable" and (before is None or before.what != decision.what)
        if changes or is_newly_unreachable:
            self._decisions.append(ScaleDecision(self._clock.wall(), decision.what, decision.reason))
            action = "recommend" if scale.recommend else "scale"
            logger.info("%s: %s: %s", action, decision.what, decision.reason)
            self._ledger.record(action, decision.what, decision.reason)
        if decision.memory != self._memory:
            self._memory = decision.memory
            try:
                self._ledger.write_scaled_counts(decision.memory)
            except OSError as error:
                logger.warning("the counts cannot be saved for the next controller: %s", error)

    # Starts.

    def _record_starts(self, seen: Sequence[ObservedInstance]) -> None:
        """Measure the start times of the instances that serve now."""
        for instance in seen:
            if instance.phase is Phase.STARTING:
                self._starting.setdefault(instance.name, instance.since)
            elif (began := self._starting.pop(instance.name, None)) is not None and instance.phase is Phase.READY:
                took_s = max(0.0, instance.since - began)
                before = self._starts_s
                self._starts_s = took_s if before is None else max(took_s, 0.7 * before + 0.3 * took_s)
        present = {instance.name for instance in seen}
        self._starting = {name: since for name, since in self._starting.items() if name in present}

    def _start_s(self, scale: ScaleSpec) -> float:
        return seconds(scale.starts) if self._starts_s is None else self._starts_s


def rules_of(fleet: DesiredFleet, scale: ScaleSpec) -> ScalingRules:
    """The scaling rules of `[scale]` and of the roles."""
    targets = LatencyTargets(seconds(scale.ttft), seconds(scale.itl))
    idle_s, cool_down_s = seconds(scale.idle), seconds(scale.cool_down)
    cost, unit = Counts(1, 1), None
    if fleet.unit is not None:
        unit = _unit_counts(fleet)
        max_units = MOST if fleet.unit.max is None else fleet.unit.max
        min_counts, max_counts = NOTHING, Counts(unit.prefill * max_units, unit.decode * max_units)
    else:
        absent = RoleSpec(count=0, max=0)
        p, d = fleet.role.get("prefill", absent), fleet.role.get(_answering_role(fleet), absent)
        min_counts = Counts(p.min, d.min)
        max_counts = Counts(max_instances(p, scale), max_instances(d, scale))
        cost = Counts(p.tensor_parallel_size, d.tensor_parallel_size)
    budget = float(scale.budget) if scale.budget is not None else float("inf")
    return ScalingRules(
        targets=targets,
        min_counts=min_counts,
        max_counts=max_counts,
        budget=min(budget, max_counts.prefill * cost.prefill + max_counts.decode * cost.decode),
        goal=scale.attainment,
        cost=cost,
        fewest_per_decode=scale.fewest_per_decode,
        most_per_decode=float("inf") if scale.most_per_decode is None else scale.most_per_decode,
        aggregate=scale.aggregate or _answering_role(fleet) == "both",
        overflows=not scale.recommend and _may_aggregate(fleet),
        switches=frozenset(
            (role, other)
            for role, spec in fleet.role.items()
            for other in spec.can_be
            if {role, other} == {PREFILL, DECODE}
            and fleet.engine.kind != "sglang"  # which serves no requests during the switch
        ),
        unit=unit,
        cool_down_s=cool_down_s,
        idle_s=idle_s,
        least_requests=scale.least_requests,
    )


def _may_aggregate(fleet: DesiredFleet) -> bool:
    """True if routers decide which prompts decode instances compute. Not if the routers have a fixed threshold, which
    no controller changes, and not with SGLang, whose decode servers compute no prompts."""
    return "disaggregate_from" not in router_keys(fleet) and fleet.engine.kind != "sglang"


def max_instances(role: RoleSpec, scale: ScaleSpec) -> int:
    """Largest number of instances of a role."""
    if role.max is not None:
        return role.max
    return (scale.budget or 0) // role.tensor_parallel_size


def _answering_role(fleet: DesiredFleet) -> MemberRole:
    roles = fleet.role if fleet.unit is None else fleet.unit.members
    return "both" if "both" in roles else "decode"


def _unit_counts(fleet: DesiredFleet) -> Counts:
    assert fleet.unit is not None
    members = fleet.unit.members
    return Counts(members.get("prefill", 0), members.get("decode", 0) + members.get("both", 0))


def counts_of(fleet: DesiredFleet) -> Counts:
    """Numbers of instances in the spec."""
    if fleet.unit is not None:
        unit = _unit_counts(fleet)
        return Counts(unit.prefill * fleet.unit.count, unit.decode * fleet.unit.count)
    answering = sum(role_spec.count for role, role_spec in fleet.role.items() if role != "prefill")
    return Counts(fleet.role["prefill"].count if "prefill" in fleet.role else 0, answering)


def with_counts(fleet: DesiredFleet, counts: Counts) -> DesiredFleet:
    """The fleet with these numbers of instances; in replica mode, with the units that have them."""
    if fleet.unit is not None:
        number = counts.total // max(1, _unit_counts(fleet).total)
        return msgspec.structs.replace(fleet, unit=msgspec.structs.replace(fleet.unit, count=number))
    by_role = _by_role(fleet, counts)
    roles = {name: msgspec.structs.replace(role_spec, count=by_role[name]) for name, role_spec in fleet.role.items()}
    return msgspec.structs.replace(fleet, role=roles)


def _by_role(fleet: DesiredFleet, counts: Counts) -> dict[str, int]:
    roles = fleet.role if fleet.unit is None else fleet.unit.members
    return {role: counts.prefill if role == "prefill" else counts.decode for role in roles}


def _count_by_role(instances: Iterable[ObservedInstance]) -> Counts:
    roles = [instance.role for instance in instances]
    return Counts(sum(role == "prefill" for role in roles), sum(role in ("decode", "both") for role in roles))
