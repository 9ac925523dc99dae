"""What is known of a fleet's members: the backend's knowledge of processes, joined with the routers' of requests.

Owns what was declared to the routers and what they answered, and since when each member is in its phase.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from kvferry.core.errors import ConfigError
from kvferry.core.messages.traffic import FleetPlan, TrafficReport
from kvferry.fleet.control.backend import Member, MemberSpec, MemberState
from kvferry.fleet.control.facts import ObservedInstance, Phase
from kvferry.fleet.control.router_client import RouterClient, View, capacity_of
from kvferry.fleet.scaling.traffic import DecodeCapacity
from kvferry.fleet.scaling.traffic_meter import LOOK_BACK_S, MAX_ASKED
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole


class Observer:
    """`starting`, `draining` and `stopping` are the names of members for which a step is being taken; the controller
    writes them."""

    def __init__(self, front: RouterClient) -> None:
        self._front = front
        self._views: Mapping[str, View] | None = None
        """How the routers see the fleet's instances, or saw them when one answered last; None: there is no router. What
        operators have added to the routers is not here, although it may be called as a member that is starting."""
        self._since: dict[str, tuple[Phase, float]] = {}
        self.starting: dict[str, ObservedInstance] = {}
        """Members that are being started, and that the backend does not know of yet."""
        self.draining: set[str] = set()
        self.stopping: set[str] = set()
        self._adopted: set[str] = set()
        """Members that served when this controller began: they do not start, whatever a new router knows of them."""
        self.switching: dict[str, MemberRole] = {}
        """Members that change to this role and are drained for it; they count as starting in it."""
        self.withdrawn: set[str] = set()
        """Members that change their role and that the routers are to forget meanwhile."""

    @property
    def has_routers(self) -> bool:
        """Whether there is a router that serves, although it may not answer at the moment."""
        return self._views is not None

    async def adopt(self, members: Sequence[Member]) -> None:
        """Learn from the routers what an earlier controller has told them. Raises `ConfigError` for one that does not
        hold the same token: neither would listen to the other."""
        self._adopted = {one.name for one in members if one.state is MemberState.SERVING}
        routers = routers_of(members)
        for router in routers:
            if why := await self._front.why_not(router):
                raise ConfigError(f"the router of this fleet at {router} {why}")
        urls = {one.name: one.url for one in members}
        for router in routers:
            if (shown := await self._front.views(router)) is not None:
                self._views = views = {name: one for name, one in shown.items() if one.url == urls.get(name)}
                self.draining = {name for name, view in views.items() if view.draining}
                return

    async def declare(self, fleet: DesiredFleet, members: Sequence[Member], plan: FleetPlan | None = None) -> None:
        """Tell the routers which instances serve, which of them are leaving, and what the fleet is to be. While none
        answers, what they said last holds: they may have requests everywhere, and know of no other instances."""
        if routers := routers_of(members):
            before = self._views or {}
            serving = _admitted(fleet, members, set(before))
            serving = [one for one in serving if one.name not in self.withdrawn]
            shown = await self._front.declare(routers, serving, self.draining | self.switching.keys(), plan)
            names = {one.name for one in serving}
            self._views = before if shown is None else {name: one for name, one in shown.items() if name in names}
        else:
            self._views = None

    async def plan(self, members: Sequence[Member]) -> FleetPlan | None:
        """What routers were told last that the fleet is to be; None: nothing, or none of them answers."""
        plans = await asyncio.gather(*(self._front.plan(one) for one in routers_of(members)))
        return next((one for one in plans if one is not None), None)

    async def traffic(self, members: Sequence[Member]) -> dict[str, TrafficReport]:
        """What the routers that answer have seen of requests, by their URL."""
        routers = routers_of(members)
        reports = await asyncio.gather(*(self._front.traffic(one, LOOK_BACK_S, MAX_ASKED) for one in routers))
        return {router: one for router, one in zip(routers, reports, strict=True) if one is not None}

    def room(self) -> DecodeCapacity:
        """What one decode instance takes, as far as they have said so."""
        return capacity_of((self._views or {}).values())

    def begin(self, member: MemberSpec, now: float) -> None:
        """Note that a member is being started."""
        self._adopted.discard(member.name)
        self.starting[member.name] = ObservedInstance(
            member.name, member.role, member.revision, Phase.STARTING, now, member.unit
        )

    def is_drained(self, name: str) -> bool:
        """Whether nothing runs at a member any more, as the routers said last."""
        view = (self._views or {}).get(name)
        return view is not None and view.drained

    def is_known(self, name: str) -> bool:
        """Whether the routers know a member, as they said last."""
        return name in (self._views or {})

    def changes_role(self, name: str) -> None:
        """Note that its role changes: it is ready again once the routers say so."""
        self._since.pop(name, None)
        self._adopted.discard(name)

    def observe(self, members: Sequence[Member], now: float) -> list[ObservedInstance]:
        """All members, those that are being started included."""
        here = {one.name for one in members}
        for name in self.starting.keys() & here:
            del self.starting[name]
        self.draining &= here
        seen = [self._observed(one, now) for one in members]
        self._since = {one.name: (one.phase, one.since) for one in seen}
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

    def _phase(self, member: Member, view: View | None) -> Phase:
        name = member.name
        if name in self.switching and member.state is not MemberState.ENDED and name not in self.stopping:
            return Phase.STARTING
        if view is not None and view.draining:  # an operator may have told the routers
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
        if view is None or view.state == "new":  # a router that has just come has not looked at it yet
            return Phase.READY if name in self._adopted else Phase.STARTING
        return Phase.READY if view.state == "up" else Phase.STARTING


def _hand_off_trouble(member: Member, view: View | None) -> str:
    if view is None or not view.no_hand_off or member.state is not MemberState.SERVING:
        return ""
    return f"takes part in no hand-off: {view.no_hand_off}"


def routers_of(members: Iterable[Member]) -> list[str]:
    """Where the routers that serve answer their controller."""
    routers = (one for one in members if one.role == "router" and one.state is MemberState.SERVING)
    return [one.health_url for one in routers if one.health_url]


def _admitted(fleet: DesiredFleet, members: Sequence[Member], known: set[str]) -> list[Member]:
    """The instances that clients' requests may go to: they serve, and so do all others of their unit, or did."""
    serving = [one for one in members if one.role != "router" and one.state is MemberState.SERVING]
    if fleet.unit is None:
        return serving
    size = sum(fleet.unit.members.values())
    num = {unit: sum(one.unit == unit for one in serving) for unit in {one.unit for one in serving}}
    whole = {one.unit for one in serving if one.name in known or num[one.unit] >= size}
    return [one for one in serving if one.unit in whole]
