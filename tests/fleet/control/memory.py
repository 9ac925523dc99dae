"""A backend and routers that are in memory only: members serve, end and drain when a test says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from kvferry.core.errors import ConfigError
from kvferry.core.messages.traffic import FleetPlan, TrafficReport
from kvferry.fleet.control.backend import FleetBackend, Member, MemberSpec, MemberState, NotStarted
from kvferry.fleet.control.router_client import RouterClient, RouterInstanceView
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole


class MemoryBackend(FleetBackend):
    """`serves_at_once`: members do; otherwise, when `serve` is called."""

    def __init__(self, num_routers: int = 0) -> None:
        self.changed = asyncio.Event()
        self.num_routers = num_routers
        self.here: dict[str, Member] = {}
        self.starts: list[tuple[str, float]] = []
        self.stops: list[tuple[str, float]] = []
        self.assigned: list[tuple[str, MemberRole]] = []
        self.used: list[DesiredFleet] = []
        self.serves_at_once = True
        self.cannot_start: set[MemberRole] = set()
        self.cannot_run: set[str] = set()
        """Stamps of fleets that cannot be run."""
        self.num_opened = 0
        self.stop_takes_s = 0.0
        self.assign_during: asyncio.Event | None = None
        """A role is recorded after this has happened."""
        self.is_unreachable = False
        """Which the next start finds out."""

    def use(self, fleet: DesiredFleet) -> None:
        if fleet.stamp in self.cannot_run:
            raise ConfigError("it cannot be run here")
        self.used.append(fleet)

    async def open(self) -> None:
        self.num_opened += 1

    def members(self) -> Sequence[Member]:
        return list(self.here.values())

    async def start(self, member: MemberSpec) -> None:
        self.starts.append((member.name, time.monotonic()))
        if self.is_unreachable:
            self.trouble = "it does not answer"
        if member.role in self.cannot_start or self.trouble:
            raise NotStarted("there is no room")
        assert member.name not in self.here
        self.here[member.name] = Member(
            member.name, member.role, member.revision, MemberState.STARTING, unit=member.unit
        )
        if self.serves_at_once:
            self.serve(member.name)
        self.changed.set()

    async def stop(self, name: str, grace_s: float) -> None:
        await asyncio.sleep(self.stop_takes_s)
        if self.here.pop(name, None) is not None:
            self.stops.append((name, grace_s))
        self.changed.set()

    async def assign(self, name: str, role: MemberRole) -> None:
        if self.assign_during is not None:
            await self.assign_during.wait()
        self.assigned.append((name, role))
        self.here[name] = replace(self.here[name], role=role)
        self.changed.set()

    async def close(self) -> None:
        """There is nothing to close."""

    # What tests do to members.

    def serve(self, name: str) -> None:
        url = f"http://{name}:1"
        health = url if self.here[name].role == "router" else ""
        self.here[name] = replace(self.here[name], state=MemberState.SERVING, url=url, health_url=health)
        self.changed.set()

    def die(self, name: str, reason: str = "was killed by SIGKILL") -> None:
        self.here[name] = replace(self.here[name], state=MemberState.ENDED, reason=reason, last_lines=("last",))
        self.changed.set()

    @property
    def serving(self) -> list[str]:
        return sorted(one.name for one in self.here.values() if one.state is MemberState.SERVING)


class MemoryFront(RouterClient):
    """Routers that believe what is declared. `busy`: instances with requests; the others are drained at once."""

    def __init__(self) -> None:
        super().__init__("a token of tests")
        self.declared: dict[str, tuple[str, str]] = {}
        """Name to role and unit."""
        self.urls: dict[str, str] = {}
        self.operators: dict[str, RouterInstanceView] = {}
        """What operators have added to the routers, and maybe drained."""
        self.draining: set[str] = set()
        self.busy: set[str] = set()
        self.no_hand_off: dict[str, str] = {}
        """Why instances take part in no hand-off."""
        self.stranger = ""
        self.told: FleetPlan | None = None
        """What the fleet is to be, as routers were told last."""
        self.reported: Callable[[], TrafficReport | None] = lambda: None
        """What routers say of requests."""
        self.answers = True

    async def rejection_reason(self, router: str) -> str:
        return self.stranger

    async def views(self, router: str) -> Mapping[str, RouterInstanceView] | None:
        return self.instance_views() if self.answers else None

    async def declare(
        self,
        routers: Sequence[str],
        instances: Iterable[Member],
        draining: Iterable[str],
        plan: FleetPlan | None = None,
    ) -> Mapping[str, RouterInstanceView] | None:
        if not self.answers:
            return None
        self.told, instances = plan, list(instances)
        self.declared = {one.name: (one.role, one.unit) for one in instances}
        self.urls = {one.name: one.url for one in instances}
        self.draining = set(draining) & set(self.declared)
        return self.instance_views()

    async def plan(self, router: str) -> FleetPlan | None:
        return self.told if self.answers else None

    async def traffic(self, router: str, seconds: float, most: int) -> TrafficReport | None:
        return self.reported()

    def instance_views(self) -> dict[str, RouterInstanceView]:
        return self.operators | {
            name: RouterInstanceView(
                name=name,
                url=self.urls[name],
                role=role,
                state="up",
                in_flight=int(name in self.busy),
                draining=name in self.draining,
                drained=name in self.draining and name not in self.busy,
                no_hand_off=self.no_hand_off.get(name, ""),
            )
            for name, (role, _) in self.declared.items()
        }
