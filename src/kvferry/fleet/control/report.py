"""How a fleet is, for people: from what its controller has seen.

Owns what was told last, and whether the fleet was ever up.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from kvferry.core.clock import Clock
from kvferry.fleet.control.backend import Member
from kvferry.fleet.control.backoff import held_back
from kvferry.fleet.control.dry_run import explain_blocked_roll
from kvferry.fleet.control.facts import Failure, MemberStatus, ObservedInstance, Phase, RoleStatus
from kvferry.fleet.control.follower import ChangeRefused
from kvferry.fleet.control.ledger import FleetStatus, Ledger
from kvferry.fleet.display import Display
from kvferry.fleet.processes.start_time import started_at
from kvferry.fleet.spec.fleet_spec import DesiredFleet

_ANSWERING = ("decode", "both")


@dataclass(frozen=True)
class FleetView:
    """What a controller has seen in one round. `instances` and `routers`: what they are to be. `is_stalled`: nothing
    moves, and there is nothing to do. `trouble`: the backend's."""

    instances: DesiredFleet
    routers: DesiredFleet
    members: Sequence[Member]
    seen: Sequence[ObservedInstance]
    failures: Sequence[Failure]
    is_stalled: bool
    trouble: str
    now: float

    @property
    def has_routers(self) -> bool:
        """Whether clients are served by routers."""
        return self.routers.role["router"].count > 0

    @property
    def url(self) -> str:
        """Where clients are served; empty as long as they are not."""
        serving = (one for one in self.members if one.role == "router" or not self.has_routers)
        return next((one.url for one in serving if one.url), "")


class StatusReporter:
    """Reports the status of one fleet."""

    def __init__(self, ledger: Ledger, display: Display, clock: Clock) -> None:
        self._ledger, self._display, self._clock = ledger, display, clock
        self._told: FleetStatus | None = None
        self.is_up = False
        """Whether everything that is wanted has once served."""

    def status(self, sight: FleetView, number: int, refused: ChangeRefused, decided: str) -> FleetStatus:
        """The status of the fleet; whoever waits for it to be up is told once it is. `number`: of the change that is
        followed; `decided`: by `[scale]`."""
        roles = {
            name: one for fleet in (sight.instances, sight.routers) for name, one in _role_status(fleet, sight).items()
        }
        if not self.is_up and all(one.ready >= one.desired for one in roles.values()):
            self._up(sight)
        given_up = [f"{role}: {one.failed}" for role, one in roles.items() if one.given_up]
        stalled = [] if any(one.failed for one in roles.values()) else _why_stalled(sight)
        refused_why = [f"the change is refused: {refused.why}"] if refused.number else []
        lasting = (*refused_why, *given_up, *stalled)
        return FleetStatus(
            at=self._clock.wall(),
            pid=os.getpid(),
            started=started_at(os.getpid()),
            number=max(number, refused.number),
            url=sight.url,
            roles=roles,
            members=_member_status(sight),
            trouble=(sight.trouble, *lasting) if sight.trouble else lasting,
            passing=bool(sight.trouble) and not lasting,
            decided=decided,
            settled=not refused.number and _is_settled(sight, roles),
        )

    def write(self, status: FleetStatus) -> None:
        """Write it down, unless nothing but times has changed. Raises `OSError`."""
        if self._told is None or _timeless(status) != _timeless(self._told):
            self._ledger.write_status(status)
            self._told = status

    def _up(self, sight: FleetView) -> None:
        self.is_up = True
        if sight.has_routers and sight.instances.num_instances:
            self._display.members({one.name: one.url for one in sight.members if one.role != "router"})
        self._display.up(sight.url)
        self._ledger.note("up", why=sight.url)


def is_hopeless(status: FleetStatus) -> bool:
    """Whether no instance is left that could answer, and those that could are not started again."""
    alive = (Phase.READY.value, Phase.STARTING.value)
    if any(one.role in _ANSWERING and one.phase in alive for one in status.members):
        return False
    return any(one.given_up for role, one in status.roles.items() if role in _ANSWERING)


def _role_status(fleet: DesiredFleet, sight: FleetView) -> dict[str, RoleStatus]:
    """How many members each role that is wanted has, and what keeps others from being started."""
    if fleet.unit is None:
        desired = {role: one.count for role, one in fleet.role.items()}
    else:
        desired = {role: number * fleet.unit.count for role, number in fleet.unit.members.items()}
    found: dict[str, RoleStatus] = {}
    for role, number in desired.items():
        here = [one for one in sight.seen if one.role == role]
        ready = [one for one in here if one.phase is Phase.READY]
        held = held_back(fleet, role, sight.seen, sight.failures, sight.now)
        found[role] = RoleStatus(
            desired=number,
            ready=len(ready),
            updated=sum(one.revision == fleet.revision for one in ready),
            starting=sum(one.phase is Phase.STARTING for one in here),
            draining=sum(one.phase in (Phase.DRAINING, Phase.DRAINED) for one in here),
            failed="" if held is None else held.why,
            given_up=held is not None and held.for_good,
        )
    return found


def _member_status(sight: FleetView) -> tuple[MemberStatus, ...]:
    """All members by name."""
    urls = {one.name: one.url for one in sight.members}
    return tuple(
        MemberStatus(
            name=one.name,
            role=one.role,
            revision=one.revision,
            phase=one.phase.value,
            for_s=round(sight.now - one.since, 1),
            url=urls.get(one.name, ""),
            unit=one.unit,
            outstanding=one.outstanding,
            detail=one.reason,
        )
        for one in sorted(sight.seen, key=lambda one: one.name)
    )


def _is_settled(sight: FleetView, roles: dict[str, RoleStatus]) -> bool:
    """Whether everything is as it is to be, and of the revision that is wanted."""
    revisions = {sight.instances.revision, sight.routers.revision}
    return all(one.ready == one.desired for one in roles.values()) and all(
        one.phase is Phase.READY and one.revision in revisions for one in sight.seen
    )


def _why_stalled(sight: FleetView) -> list[str]:
    """Why instances of another revision stay, of a fleet in which nothing moves and nothing can be done; empty if there
    are none, or the fleet is paused."""
    fleet = sight.instances
    old = sorted(one.name for one in sight.seen if one.role != "router" and one.revision != fleet.revision)
    return [explain_blocked_roll(fleet, old)] if sight.is_stalled and old and not fleet.roll.pause else []


def _timeless(status: FleetStatus) -> FleetStatus:
    return msgspec.structs.replace(status, at=0.0, members=tuple(replace(one, for_s=0.0) for one in status.members))
