"""A fleet's counts follow what is asked for: measures, decides, and keeps what was decided.

Owns the counts of a fleet with `[scale]`. They outlive the controller in the ledger, beside what users want: the spec
is not changed, and bounds them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.messages.traffic import Decided, FleetPlan, TrafficReport
from kvferry.fleet.control.facts import ObservedInstance, Phase
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.scaling.predictor import LatencyTargets
from kvferry.fleet.scaling.scaler import RECENT_S, FleetSnapshot, ScalingDecision, ScalingMemory, decide
from kvferry.fleet.scaling.scaling_rules import DECODE, NOTHING, PREFILL, Counts, ScalingRules
from kvferry.fleet.scaling.traffic import DecodeCapacity
from kvferry.fleet.scaling.traffic_meter import TrafficMeter
from kvferry.fleet.spec.fleet_spec import MOST, DesiredFleet, MemberRole, RoleSpec, ScaleSpec, seconds

logger = logging.getLogger(__name__)

_MAX_DECISIONS = 32
_CLOCK_STEP_S = 5.0
"""A wall clock that goes on by so much more or less than the monotonic one has been set, or the machine was asleep."""


class Scaling:
    """The counts of one fleet, whether it has `[scale]` or not; without it, they are those of the spec."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger, self._clock = ledger, clock
        self._memory: ScalingMemory | None = ledger.scaled()
        self._measuring: TrafficMeter | None = None
        self._decided_at = -1e18
        self._wall_ahead_s = 0.0
        """How far the wall clock was ahead of the monotonic one when it was looked at last."""
        self._decision: ScalingDecision | None = None
        self._decisions = deque[Decided](maxlen=_MAX_DECISIONS)
        self._starting: dict[str, float] = {}
        self._starts_s: float | None = None

    def adopt(self, plan: FleetPlan | None) -> None:
        """Go on from what an earlier controller has told the routers, which may have been on another machine: then
        nobody here knows when it decided that."""
        if plan is not None and not self._decisions:
            self._decisions.extend(plan.decisions)
        if plan is None or plan.goal is None or plan.recommends:
            return
        prefill = plan.desired.get(PREFILL, 0)
        there = ScalingMemory(prefill, sum(plan.desired.values()) - prefill, changed_at=self._clock.wall())
        if self._memory is None or self._memory.counts != there.counts:
            self._memory = there

    # What is wanted.

    def wanted(self, fleet: DesiredFleet) -> DesiredFleet:
        """The fleet with the counts that were decided."""
        if fleet.scale is None:
            if self._memory is not None:
                self._ledger.forget_scaled()
            self._memory = self._measuring = self._decision = None
            return fleet
        rules = rules_of(fleet, fleet.scale)
        if self._memory is None:
            there = counts_of(fleet)
            self._memory = ScalingMemory(there.prefill, there.decode)
        if fleet.scale.recommend:
            return fleet
        return with_counts(fleet, rules.nearest(self._memory.counts))

    def plan(self, fleet: DesiredFleet) -> FleetPlan:
        """What routers show, and follow. `fleet`: as `wanted` gives it."""
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
    def is_decided(self) -> bool:
        """Whether this controller, or an earlier one, has decided about the counts."""
        return self._memory is not None

    @property
    def told(self) -> str:
        """What was decided last, in words; empty if nothing was."""
        return "" if self._decision is None else f"{self._decision.what}: {self._decision.why}"

    # What is decided.

    def is_due(self, fleet: DesiredFleet) -> bool:
        """Whether it is time to ask the routers and to decide again. A fleet that has nothing looks more often."""
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
        room: DecodeCapacity,
    ) -> None:
        """Decide by what the routers report. `seen`: the instances; `room`: what one decode instance takes. If
        that fails, the counts stay as they are: the fleet is looked after in any case."""
        try:
            await self._decide(fleet, seen, reports, room)
        except Exception:
            logger.exception("scaling: nothing could be decided from what the routers report")

    async def _decide(
        self,
        fleet: DesiredFleet,
        seen: Sequence[ObservedInstance],
        reports: Mapping[str, TrafficReport],
        room: DecodeCapacity,
    ) -> None:
        scale, now, wall = fleet.scale, self._clock.monotonic(), self._clock.wall()
        if scale is None or self._memory is None:
            return
        self._decided_at = now
        self._note_starts(seen)
        if self._measuring is None:
            self._measuring = TrafficMeter(seconds(scale.interval), wall)
        elif abs(wall - now - self._wall_ahead_s) > _CLOCK_STEP_S:
            logger.warning("the clock was set by %.0f s; requests are measured anew", wall - now - self._wall_ahead_s)
            self._measuring.clock_was_set(wall)
            self._memory = msgspec.structs.replace(self._memory, changed_at=wall)  # nothing is released for a while
        self._wall_ahead_s = wall - now
        ready_at = {one.name: wall - (now - one.since) for one in seen if one.phase is Phase.READY}
        self._measuring.note(reports, ready_at, wall, seconds(scale.warm))
        if not reports:
            return
        memory = self._memory
        if scale.recommend:
            there = counts_of(fleet)
            memory = msgspec.structs.replace(memory, prefill=there.prefill, decode=there.decode)
        rules = rules_of(fleet, scale)
        since = max(memory.changed_at, wall - RECENT_S)
        measured = replace(
            self._measuring.measured(room, wall, hold_s=seconds(scale.hold)),
            attained=self._measuring.attained(rules.targets, since, wall),
        )
        situation = FleetSnapshot(
            ready=_counted(one for one in seen if one.phase is Phase.READY),
            draining=sum(one.phase is Phase.DRAINING for one in seen),
            starts_s=self._start_s(scale),
        )
        self._take(await asyncio.to_thread(decide, rules, memory, measured, situation, wall), scale)

    def _take(self, made: ScalingDecision, scale: ScaleSpec) -> None:
        before, self._decision = self._decision, made
        changes = self._memory is None or made.memory.counts != self._memory.counts
        is_said = made.what == "unreachable" and (before is None or before.what != made.what)
        if changes or is_said:
            self._decisions.append(Decided(self._clock.wall(), made.what, made.why))
            what = "recommend" if scale.recommend else "scale"
            logger.info("%s: %s: %s", what, made.what, made.why)
            self._ledger.note(what, made.what, made.why)
        if made.memory != self._memory:
            self._memory = made.memory
            try:
                self._ledger.write_scaled(made.memory)
            except OSError as error:
                logger.warning("the counts cannot be saved for the next controller: %s", error)

    # Starts.

    def _note_starts(self, seen: Sequence[ObservedInstance]) -> None:
        """How long those took that serve now."""
        for one in seen:
            if one.phase is Phase.STARTING:
                self._starting.setdefault(one.name, one.since)
            elif (began := self._starting.pop(one.name, None)) is not None and one.phase is Phase.READY:
                took_s = max(0.0, one.since - began)
                before = self._starts_s
                self._starts_s = took_s if before is None else max(took_s, 0.7 * before + 0.3 * took_s)
        here = {one.name for one in seen}
        self._starting = {name: since for name, since in self._starting.items() if name in here}

    def _start_s(self, scale: ScaleSpec) -> float:
        return seconds(scale.starts) if self._starts_s is None else self._starts_s


def rules_of(fleet: DesiredFleet, scale: ScaleSpec) -> ScalingRules:
    """What `[scale]` and the roles allow."""
    targets = LatencyTargets(seconds(scale.ttft), seconds(scale.itl))
    idle_s, cool_down_s = seconds(scale.idle), seconds(scale.cool_down)
    cost, unit = Counts(1, 1), None
    if fleet.unit is not None:
        unit = _of_unit(fleet)
        max_units = MOST if fleet.unit.max is None else fleet.unit.max
        least, most = NOTHING, Counts(unit.prefill * max_units, unit.decode * max_units)
    else:
        nobody = RoleSpec(count=0, max=0)
        p, d = fleet.role.get("prefill", nobody), fleet.role.get(_answering(fleet), nobody)
        least = Counts(p.min, d.min)
        most = Counts(most_of(p, scale), most_of(d, scale))
        cost = Counts(p.tensor_parallel_size, d.tensor_parallel_size)
    budget = float(scale.budget) if scale.budget is not None else float("inf")
    return ScalingRules(
        targets=targets,
        least=least,
        most=most,
        budget=min(budget, most.prefill * cost.prefill + most.decode * cost.decode),
        goal=scale.attainment,
        cost=cost,
        fewest_per_decode=scale.fewest_per_decode,
        most_per_decode=float("inf") if scale.most_per_decode is None else scale.most_per_decode,
        aggregate=scale.aggregate or _answering(fleet) == "both",
        overflows=not scale.recommend and _may_aggregate(fleet),
        switches=frozenset(
            (one, other)
            for one, spec in fleet.role.items()
            for other in spec.can_be
            if {one, other} == {PREFILL, DECODE} and fleet.engine.kind != "sglang"  # which serves nothing meanwhile
        ),
        unit=unit,
        cool_down_s=cool_down_s,
        idle_s=idle_s,
        least_requests=scale.least_requests,
    )


def _may_aggregate(fleet: DesiredFleet) -> bool:
    """Whether routers decide which prompts decode instances compute: unless they were given a threshold, which no
    controller changes, or SGLang's servers refuse to."""
    given = (*fleet.router.args, *fleet.args)
    is_fixed = any(one.replace("_", "-").startswith("--disaggregate-from") for one in given)
    return not is_fixed and fleet.engine.kind != "sglang"


def most_of(role: RoleSpec, scale: ScaleSpec) -> int:
    """Instances of a role, at most."""
    if role.max is not None:
        return role.max
    return (scale.budget or 0) // role.tensor_parallel_size


def _answering(fleet: DesiredFleet) -> MemberRole:
    roles = fleet.role if fleet.unit is None else fleet.unit.members
    return "both" if "both" in roles else "decode"


def _of_unit(fleet: DesiredFleet) -> Counts:
    assert fleet.unit is not None
    members = fleet.unit.members
    return Counts(members.get("prefill", 0), members.get("decode", 0) + members.get("both", 0))


def counts_of(fleet: DesiredFleet) -> Counts:
    """Instances that the fleet is to have."""
    if fleet.unit is not None:
        unit = _of_unit(fleet)
        return Counts(unit.prefill * fleet.unit.count, unit.decode * fleet.unit.count)
    answering = sum(one.count for role, one in fleet.role.items() if role != "prefill")
    return Counts(fleet.role["prefill"].count if "prefill" in fleet.role else 0, answering)


def with_counts(fleet: DesiredFleet, counts: Counts) -> DesiredFleet:
    """The fleet with so many instances; in replica mode, with so many units."""
    if fleet.unit is not None:
        number = counts.total // max(1, _of_unit(fleet).total)
        return msgspec.structs.replace(fleet, unit=msgspec.structs.replace(fleet.unit, count=number))
    by_role = _by_role(fleet, counts)
    roles = {name: msgspec.structs.replace(one, count=by_role[name]) for name, one in fleet.role.items()}
    return msgspec.structs.replace(fleet, role=roles)


def _by_role(fleet: DesiredFleet, counts: Counts) -> dict[str, int]:
    roles = fleet.role if fleet.unit is None else fleet.unit.members
    return {role: counts.prefill if role == "prefill" else counts.decode for role in roles}


def _counted(instances: Iterable[ObservedInstance]) -> Counts:
    found = [one.role for one in instances]
    return Counts(sum(one == "prefill" for one in found), sum(one in ("decode", "both") for one in found))
