"""The observed state of a fleet's members: their processes by the backend, their requests by the routers.

Owns what was declared to the routers, their replies, and the time at which each member's phase began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from kvferry.core.errors import ConfigError
from kvferry.core.messages.traffic import FleetPlan, TrafficReport
from kvferry.fleet.control.backend import Member, MemberSpec, MemberState
from kvferry.fleet.control.facts import ObservedInstance, Phase
from kvferry.fleet.control.router_client import RouterClient, RouterInstanceView, capacity_of
from kvferry.fleet.scaling.traffic import DecodeCapacity
from kvferry.fleet.scaling.traffic_meter import LOOK_BACK_S, MAX_REQUESTS
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole


class Observer:
    """`starting`, `draining` and `stopping` are the names of members for which a step is being taken; the controller
    writes them."""

    def __init__(self, router_client: RouterClient) -> None:
        self._router_client = router_client
        self._views: Mapping[str, RouterInstanceView] | None = None
        """The routers' views of the fleet's instances, from their last reply; None: there is no router. Instances that
        operators have added are left out, because one of them may have the name of a member that starts."""
        self._since: dict[str, tuple[Phase, float]] = {}
        self.starting: dict[str, ObservedInstance] = {}
        """Members that are being started, and that the backend does not list yet."""
        self.draining: set[str] = set()
        self.stopping: set[str] = set()
        self._adopted: set[str] = set()
        """Members that served when this controller began: they are not starting, even if a new router has not seen
        them yet."""
        self.switching: dict[str, MemberRole] = {}
        """Members that change to this role and are drained for it; they count as starting in it."""
        self.withdrawn: set[str] = set()
        """Members that change their role, and that the routers must forget during the change."""

    @property
    def has_routers(self) -> bool:
        """True if there is a serving router, even if it does not answer at the moment."""
        return self._views is not None

    async def adopt(self, members: Sequence[Member]) -> None:
        """Read the declarations of an earlier controller from the routers. Raises `ConfigError` for a router with
        another token: neither would accept the other's requests."""
        self._adopted = {member.name for member in members if member.state is MemberState.SERVING}
        routers = routers_of(members)
        for router in routers:
            if reason := await self._router_client.rejection_reason(router):
                raise ConfigError(f"the router of this fleet at {router} {reason}")
        urls = {member.name: member.url for member in members}
        for router in routers:
            if (shown := await self._router_client.views(router)) is not None:
                self._views = views = {name: view for name, view in shown.items() if view.url == urls.get(name)}
                self.draining = {name for name, view in views.items() if view.draining}
                return

    async def declare(self, fleet: DesiredFleet, members: Sequence[Member], plan: FleetPlan | None = None) -> None:
        """Declare the serving and the leaving instances and the plan to the routers. While no router answers, the last
        reply is used: the routers may send requests to all instances in it, and know no other instances."""
        if routers := routers_of(members):
            before = self._views or {}
            serving = _admitted(fleet, members, set(before))
            serving = [member for member in serving if member.name not in self.withdrawn]
            shown = await self._router_client.declare(routers, serving, self.draining | self.switching.keys(), plan)
            names = {member.name for member in serving}
            self._views = before if shown is None else {name: view for name, view in shown.items() if name in names}
        else:
            self._views = None

    async def plan(self, members: Sequence[Member]) -> FleetPlan | None:
        """The plan that the routers have received last; None: none, or no router answers."""
        plans = await asyncio.gather(*(self._router_client.plan(router) for router in routers_of(members)))
        return next((plan for plan in plans if plan is not None), None)

    async def traffic(self, members: Sequence[Member]) -> dict[str, TrafficReport]:
        """The traffic reports of the routers that answer, by their URL."""
        routers = routers_of(members)
        reports = await asyncio.gather(
            *(self._router_client.traffic(router, LOOK_BACK_S, MAX_REQUESTS) for router in routers)
        )
        return {router: report for router, report in zip(routers, reports, strict=True) if report is not None}

    def decode_capacity(self) -> DecodeCapacity:
        """The capacity of one decode instance, as far as the instances have reported it."""
        return capacity_of((self._views or {}).values())

    def begin(self, member: MemberSpec, now: float) -> None:
        """Record that a member is being started."""
        self._adopted.discard(member.name)
        self.starting[member.name] = ObservedInstance(
            member.name, member.role, member.revision, Phase.STARTING, now, member.unit
        )

    def is_drained(self, name: str) -> bool:
        """True if no request runs at a member, by the routers' last reply."""
        view = (self._views or {}).get(name)
        return view is not None and view.drained

    def is_listed(self, name: str) -> bool:
        """True if the routers' last reply lists a member."""
        return name in (self._views or {})

    def begin_role_switch(self, name: str) -> None:
        """Record that a member's role changes: it is ready again once the routers report it."""
        self._since.pop(name, None)
        self._adopted.discard(name)

    def observe(self, members: Sequence[Member], now: float) -> list[ObservedInstance]:
        """All members, including those that are being started."""
        names = {member.name for member in members}
        for name in self.starting.keys() & names:
            del self.starting[name]
        self.draining &= names
        seen = [self._observed(member, now) for member in members]
        self._since = {instance.name: (instance.phase, instance.since) for instance in seen}
        return [*seen, *self.starting.values()]

    def _observed(self, member: Member, now: float) -> ObservedInstance:
        view = (self._views or {}).get(member.name)
        phase = self._phase(member, view)
        before, since = self._since.get(member.name, (None, now))
        return ObservedInstance(
            name=member.name,
            role=self.switching.get(member.name, member.role),
            revision=member.revision,
            phase=phase,
            since=since if before is phase else now,
            unit=member.unit,
            outstanding=0 if view is None else view.in_flight,
            reason=member.reason or _hand_off_trouble(member, view),
        )

    def _phase(self, member: Member, view: RouterInstanceView | None) -> Phase:
        name = member.name
        if name in self.switching and member.state is not MemberState.ENDED and name not in self.stopping:
            return Phase.STARTING
        if view is not None and view.draining:  # an operator may have drained it at the routers
            self.draining.add(name)
        if name in self.stopping:
            return Phase.DRAINED
        if member.state is MemberState.ENDED:
            return Phase.FAILED
        if name in self.draining:
            return Phase.DRAINED if view is not None and view.drained else Phase.DRAINING
        if member.state is MemberState.STARTING:
            return Phase.STARTING
        if member.role == "router" or self._views is None:
            return Phase.READY
        if self._since.get(name, (None, 0.0))[0] is Phase.READY:
            return Phase.READY
        if view is None or view.state == "new":  # a new router has not checked it yet
            return Phase.READY if name in self._adopted else Phase.STARTING
        return Phase.READY if view.state == "up" else Phase.STARTING


def _hand_off_trouble(member: Member, view: RouterInstanceView | None) -> str:
    if view is None or not view.no_hand_off or member.state is not MemberState.SERVING:
        return ""
    return f"takes part in no hand-off: {view.no_hand_off}"


def routers_of(members: Iterable[Member]) -> list[str]:
    """The URLs at which the serving routers answer their controller."""
    routers = (member for member in members if member.role == "router" and member.state is MemberState.SERVING)
    return [router.health_url for router in routers if router.health_url]


def _admitted(fleet: DesiredFleet, members: Sequence[Member], admitted: set[str]) -> list[Member]:
    """The instances that may get clients' requests: they serve, and all others of their unit serve or have served."""
    serving = [member for member in members if member.role != "router" and member.state is MemberState.SERVING]
    if fleet.unit is None:
        return serving
    size = sum(fleet.unit.members.values())
    num = {unit: sum(member.unit == unit for member in serving) for unit in {member.unit for member in serving}}
    whole = {member.unit for member in serving if member.name in admitted or num[member.unit] >= size}
    return [member for member in serving if member.unit in whole]
