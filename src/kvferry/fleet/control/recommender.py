"""Recommends how many instances a fleet needs, where others start them, such as Deployments with an autoscaler. The
instances register at the routers themselves.

    look      which instances the routers know, and what they have measured of requests
    decide    as the controller of a fleet does (`scaling`)
    tell      all routers, whose metrics show it (`kvferry_fleet_desired_instances`)

It starts and stops nothing, and needs only the routers. When it begins, it continues from the plan that the routers
were told last; if they have none, it waits until all instances have had time to register.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import ConfigError
from kvferry.core.messages.traffic import FleetPlan, TrafficReport
from kvferry.fleet.control.desired_counts import Scaling, counts_of, with_counts
from kvferry.fleet.control.facts import ObservedInstance, Phase
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.control.router_client import RouterClient, View, capacity_of
from kvferry.fleet.scaling.scaling_rules import PREFILL, Counts
from kvferry.fleet.scaling.traffic_meter import LOOK_BACK_S, MAX_ASKED
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole, read_fleet
from kvferry.fleet.spec.spec_file import SpecFile

logger = logging.getLogger(__name__)

REGISTERS_S = 30.0
"""Seconds after a router first answers in which all serving instances register: two leases."""
_LOOK_S = 1.0


def read_recommended(path: Path) -> DesiredFleet:
    """Read a spec to recommend counts for. Instances keep the role that they were started for. Raises `ConfigError`."""
    fleet = read_fleet(path)
    if fleet.scale is None:
        raise ConfigError(f"{path}: there is no table [scale], which says what counts are to reach")
    if fleet.unit is not None:
        raise ConfigError(f'{path}: counts are recommended for mode = "pooling"; units have no count of their own here')
    roles = {name: msgspec.structs.replace(one, can_be=()) for name, one in fleet.role.items()}
    return msgspec.structs.replace(fleet, role=roles)


class Recommender:
    """Recommends the counts of one fleet. `registers_s`: see `REGISTERS_S`."""

    def __init__(
        self,
        spec: SpecFile,
        routers: Sequence[str],
        ledger: Ledger,
        front: RouterClient,
        clock: Clock,
        *,
        registers_s: float = REGISTERS_S,
    ) -> None:
        self._spec, self._routers, self._front, self._clock = spec, routers, front, clock
        self._scaling, self._has_begun = Scaling(ledger, clock), False
        self._registers_s, self._answered_at, self._is_answered = registers_s, 0.0, True
        self._since: dict[str, tuple[Phase, float]] = {}
        self._met: set[str] = set()
        """Routers that are known to have the same token."""

    async def run(self) -> None:
        """Recommend until cancelled. Raises `ConfigError` for a router with another token."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> FleetPlan | None:
        """Look, decide and tell, once; returns the plan that the routers were told. None: it is not known yet."""
        fleet = await self._spec.follow()
        views = await self._views()
        if not views:
            return None
        seen = self._observe(views)
        there = await self._begin(fleet, seen)
        if there is None:
            return None
        wanted = self._scaling.wanted(with_counts(fleet, there))
        if self._scaling.is_due(wanted):
            room = capacity_of(one for each in views.values() for one in each.values())
            await self._scaling.decide(wanted, seen, await self._traffic(views), room)
            wanted = self._scaling.wanted(with_counts(fleet, there))
        plan = self._scaling.plan(wanted)
        await asyncio.gather(*(self._front.tell(one, plan) for one in views))
        return plan

    async def _begin(self, fleet: DesiredFleet, seen: Sequence[ObservedInstance]) -> Counts | None:
        """The counts from which it goes on; None: not known yet."""
        registered = Counts(sum(one.role == PREFILL for one in seen), sum(one.role != PREFILL for one in seen))
        if self._has_begun:
            return registered
        is_said_only = fleet.scale is not None and fleet.scale.recommend
        plans = await asyncio.gather(*(self._front.plan(one) for one in self._routers))
        plan = next((one for one in plans if one is not None), None)
        self._scaling.adopt(plan)
        now = self._clock.monotonic()
        self._answered_at = self._answered_at or now
        if plan is None and not (self._scaling.is_decided or is_said_only):
            if now - self._answered_at < self._registers_s:
                return None
            wanted = counts_of(fleet)
            registered = Counts(max(wanted.prefill, registered.prefill), max(wanted.decode, registered.decode))
        elif plan is not None and not is_said_only:
            prefill = plan.desired.get(PREFILL, 0)
            registered = Counts(prefill, sum(plan.desired.values()) - prefill)
        self._has_begun = True
        return registered

    async def _views(self) -> dict[str, Mapping[str, View]]:
        """The instances that each router knows which answers, by name."""
        for router in [one for one in self._routers if one not in self._met]:
            if why := await self._front.why_not(router):  # it shows no addresses to strangers
                raise ConfigError(f"the router at {router} {why}")
        views = await asyncio.gather(*(self._front.views(one) for one in self._routers))
        found = {router: one for router, one in zip(self._routers, views, strict=True) if one is not None}
        self._met |= found.keys()
        if bool(found) is not self._is_answered:
            self._is_answered = bool(found)
            if found:
                logger.warning("a router answers again")
            else:
                logger.warning("no router answers; nothing is recommended until one does")
        return found

    def _observe(self, views: Mapping[str, Mapping[str, View]]) -> list[ObservedInstance]:
        """Each instance once, by its URL: routers number them on their own."""
        now, seen = self._clock.monotonic(), dict[str, ObservedInstance]()
        for view in (one for each in views.values() for one in each.values()):
            phase = _phase(view)
            before = seen.get(view.url)
            if before is not None and phase is not Phase.DRAINING:
                phase = before.phase if before.phase is not Phase.STARTING else phase
            role: MemberRole = "prefill" if view.role == PREFILL else "decode"
            seen[view.url] = ObservedInstance(view.url, role, "", phase, now)
        for url, one in seen.items():
            before_phase, since = self._since.get(url, (None, now))
            seen[url] = replace(one, since=since if before_phase is one.phase else now)
        self._since = {url: (one.phase, one.since) for url, one in seen.items()}
        return list(seen.values())

    async def _traffic(self, views: Mapping[str, Mapping[str, View]]) -> dict[str, TrafficReport]:
        """What each router has seen of requests, with the instances' URLs as their names."""
        reports = await asyncio.gather(*(self._front.traffic(one, LOOK_BACK_S, MAX_ASKED) for one in views))
        found = {router: one for router, one in zip(views, reports, strict=True) if one is not None}
        for router, report in found.items():
            urls = {name: one.url for name, one in views[router].items()}
            for request in report.requests:
                request.prefill = urls.get(request.prefill, request.prefill)
                request.decode = urls.get(request.decode, request.decode)
        return found


def _phase(view: View) -> Phase:
    if view.draining:
        return Phase.DRAINING
    return Phase.READY if view.state == "up" else Phase.STARTING
