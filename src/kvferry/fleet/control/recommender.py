"""Recommends how many instances a fleet needs, if something else starts them, such as Deployments with an autoscaler.
The instances register at the routers themselves.

    look      at the instances and the traffic that the routers report
    decide    as the controller of a fleet does (`desired_counts`)
    send      the plan to all routers, whose metrics show it (`kvferry_fleet_desired_instances`)

It starts and stops nothing, and needs only the routers. When it begins, it continues from the plan that the routers
have received last; if they have none, it waits until all instances have had time to register.
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
from kvferry.fleet.control.router_client import RouterClient, RouterInstanceView, capacity_of
from kvferry.fleet.scaling.scaling_rules import PREFILL, Counts
from kvferry.fleet.scaling.traffic_meter import LOOK_BACK_S, MAX_REQUESTS
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole, read_fleet
from kvferry.fleet.spec.spec_file import SpecFile

logger = logging.getLogger(__name__)

REGISTERS_S = 30.0
"""Seconds after the first answer of a router in which all serving instances register: two leases."""


def read_recommended(path: Path) -> DesiredFleet:
    """Read a spec to recommend counts for. Instances keep the role that they were started for. Raises `ConfigError`."""
    fleet = read_fleet(path)
    if fleet.scale is None:
        raise ConfigError(f"{path}: there is no table [scale], which says what counts are to reach")
    if fleet.unit is not None:
        raise ConfigError(f'{path}: counts are recommended for mode = "pooling"; units have no count of their own here')
    roles = {name: msgspec.structs.replace(role_spec, can_be=()) for name, role_spec in fleet.role.items()}
    return msgspec.structs.replace(fleet, role=roles)


class Recommender:
    """Recommends the counts of one fleet. `registers_s`: see `REGISTERS_S`."""

    poll_interval_s = 1.0

    def __init__(
        self,
        spec: SpecFile,
        routers: Sequence[str],
        ledger: Ledger,
        router_client: RouterClient,
        clock: Clock,
        *,
        registers_s: float = REGISTERS_S,
    ) -> None:
        self._spec, self._routers, self._router_client, self._clock = spec, routers, router_client, clock
        self._scaling, self._has_begun = Scaling(ledger, clock), False
        self._registers_s, self._answered_at, self._is_answered = registers_s, 0.0, True
        self._since: dict[str, tuple[Phase, float]] = {}
        self._verified: set[str] = set()
        """Routers that are known to have the same token."""

    async def run(self) -> None:
        """Recommend until cancelled. Raises `ConfigError` for a router with another token."""
        while True:
            await self.look()
            await asyncio.sleep(self.poll_interval_s)

    async def look(self) -> FleetPlan | None:
        """Do one round. Returns the plan that was sent to the routers. None: it is not known yet."""
        fleet = await self._spec.follow()
        views = await self._views()
        if not views:
            return None
        seen = self._observe(views)
        counts = await self._begin(fleet, seen)
        if counts is None:
            return None
        desired = self._scaling.desired_fleet(with_counts(fleet, counts))
        if self._scaling.is_due(desired):
            capacity = capacity_of(view for each in views.values() for view in each.values())
            await self._scaling.decide(desired, seen, await self._traffic(views), capacity)
            desired = self._scaling.desired_fleet(with_counts(fleet, counts))
        plan = self._scaling.plan(desired)
        await asyncio.gather(*(self._router_client.send_plan(router, plan) for router in views))
        return plan

    async def _begin(self, fleet: DesiredFleet, seen: Sequence[ObservedInstance]) -> Counts | None:
        """The counts to continue from; None: not known yet."""
        registered = Counts(
            sum(instance.role == PREFILL for instance in seen), sum(instance.role != PREFILL for instance in seen)
        )
        if self._has_begun:
            return registered
        is_recommended_only = fleet.scale is not None and fleet.scale.recommend
        plans = await asyncio.gather(*(self._router_client.plan(router) for router in self._routers))
        plan = next((plan for plan in plans if plan is not None), None)
        self._scaling.adopt(plan)
        now = self._clock.monotonic()
        self._answered_at = self._answered_at or now
        if plan is None and not (self._scaling.has_decided or is_recommended_only):
            if now - self._answered_at < self._registers_s:
                return None
            desired = counts_of(fleet)
            registered = Counts(max(desired.prefill, registered.prefill), max(desired.decode, registered.decode))
        elif plan is not None and not is_recommended_only:
            prefill = plan.desired.get(PREFILL, 0)
            registered = Counts(prefill, sum(plan.desired.values()) - prefill)
        self._has_begun = True
        return registered

    async def _views(self) -> dict[str, Mapping[str, RouterInstanceView]]:
        """The instances of each router that answers, by name."""
        for router in [router for router in self._routers if router not in self._verified]:
            if reason := await self._router_client.rejection_reason(router):  # without its token, it shows no addresses
                raise ConfigError(f"the router at {router} {reason}")
        views = await asyncio.gather(*(self._router_client.views(router) for router in self._routers))
        answered = {
            router: router_views
            for router, router_views in zip(self._routers, views, strict=True)
            if router_views is not None
        }
        self._verified |= answered.keys()
        if bool(answered) is not self._is_answered:
            self._is_answered = bool(answered)
            if answered:
                logger.warning("a router answers again")
            else:
                logger.warning("no router answers; nothing is recommended until one does")
        return answered

    def _observe(self, views: Mapping[str, Mapping[str, RouterInstanceView]]) -> list[ObservedInstance]:
        """Each instance once, by its URL, because routers have different numbers for the instances."""
        now, seen = self._clock.monotonic(), dict[str, ObservedInstance]()
        for view in (view for each in views.values() for view in each.values()):
            phase = _phase(view)
            before = seen.get(view.url)
            if before is not None and phase is not Phase.DRAINING:
                phase = before.phase if before.phase is not Phase.STARTING else phase
            role: MemberRole = "prefill" if view.role == PREFILL else "decode"
            seen[view.url] = ObservedInstance(view.url, role, "", phase, now)
        for url, instance in seen.items():
            before_phase, since = self._since.get(url, (None, now))
            seen[url] = replace(instance, since=since if before_phase is instance.phase else now)
        self._since = {url: (instance.phase, instance.since) for url, instance in seen.items()}
        return list(seen.values())

    async def _traffic(self, views: Mapping[str, Mapping[str, RouterInstanceView]]) -> dict[str, TrafficReport]:
        """The traffic report of each router, with the instances' URLs as their names."""
        reports = await asyncio.gather(
            *(self._router_client.traffic(router, LOOK_BACK_S, MAX_REQUESTS) for router in views)
        )
        answered = {router: report for router, report in zip(views, reports, strict=True) if report is not None}
        for router, report in answered.items():
            urls = {name: view.url for name, view in views[router].items()}
            for request in report.requests:
                request.prefill = urls.get(request.prefill, request.prefill)
                request.decode = urls.get(request.decode, request.decode)
        return answered


def _phase(view: RouterInstanceView) -> Phase:
    if view.draining:
        return Phase.DRAINING
    return Phase.READY if view.state == "up" else Phase.STARTING
