"""The status of a fleet, for people, from the observations of its controller.

Owns the status that was written last, and whether the fleet was ever up.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import msgspec

from kvferry.core.clock import Clock
from kvferry.fleet.control.backend import Member
from kvferry.fleet.control.backoff import start_backoff
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
    """The observations of one round. `instances` and `routers`: their desired state. `is_stalled`: no member changes
    its phase, and there is no step to take. `trouble`: the backend's."""

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
        """True if clients are served by routers."""
        return self.routers.role["router"].count > 0

    @property
    def url(self) -> str:
        """The URL at which clients are served; empty as long as they are not."""
        serving = (member for member in self.members if member.role == "router" or not self.has_routers)
        return next((member.url for member in serving if member.url), "")


class StatusReporter:
    """Reports the status of one fleet."""

    def __init__(self, ledger: Ledger, display: Display, clock: Clock) -> None:
        self._ledger, self._display, self._clock = ledger, display, clock
        self._written: FleetStatus | None = None
        self.is_up = False
        """True once all desired members have served."""

    def status(self, view: FleetView, number: int, refused: ChangeRefused, decided: str) -> FleetStatus:
        """The status of the fleet; once it is up, the display shows it. `number`: of the followed change; `decided`:
        the last decision of `[scale]`."""
        roles = {
            name: status
            for fleet in (view.instances, view.routers)
            for name, status in _role_status(fleet, view).items()
        }
        if not self.is_up and all(status.ready >= status.desired for status in roles.values()):
            self._up(view)
        given_up = [f"{role}: {status.failed}" for role, status in roles.items() if status.given_up]
        stalled = [] if any(status.failed for status in roles.values()) else _why_stalled(view)
        refusal = [f"the change is refused: {refused.reason}"] if refused.number else []
        lasting = (*refusal, *given_up, *stalled)
        return FleetStatus(
            at=self._clock.wall(),
            pid=os.getpid(),
            started=started_at(os.getpid()),
            number=max(number, refused.number),
            url=view.url,
            roles=roles,
            members=_member_status(view),
            trouble=(view.trouble, *lasting) if view.trouble else lasting,
            passing=bool(view.trouble) and not lasting,
            decided=decided,
            settled=not refused.number and _is_settled(view, roles),
        )

    def write(self, status: FleetStatus) -> None:
        """Write it to the ledger, unless only times have changed. Raises `OSError`."""
        if self._written is None or _without_times(status) != _without_times(self._written):
            self._ledger.write_status(status)
            self._written = status

    def _up(self, view: FleetView) -> None:
        self.is_up = True
        if view.has_routers and view.instances.num_instances:
            self._display.members({member.name: member.url for member in view.members if member.role != "router"})
        self._display.up(view.url)
        self._ledger.record("up", reason=view.url)


def is_hopeless(status: FleetStatus) -> bool:
    """True if no instance that could answer is left, and none is started again."""
    alive = (Phase.READY.value, Phase.STARTING.value)
    if any(member.role in _ANSWERING and member.phase in alive for member in status.members):
        return False
    return any(role_status.given_up for role, role_status in status.roles.items() if role in _ANSWERING)


def _role_status(fleet: DesiredFleet, view: FleetView) -> dict[str, RoleStatus]:
    """The status of each desired role."""
    if fleet.unit is None:
        desired = {role: role_spec.count for role, role_spec in fleet.role.items()}
    else:
        desired = {role: number * fleet.unit.count for role, number in fleet.unit.members.items()}
    statuses: dict[str, RoleStatus] = {}
    for role, number in desired.items():
        members = [status for status in view.seen if status.role == role]
        ready = [status for status in members if status.phase is Phase.READY]
        held = start_backoff(fleet, role, view.seen, view.failures, view.now)
        statuses[role] = RoleStatus(
            desired=number,
            ready=len(ready),
            updated=sum(status.revision == fleet.revision for status in ready),
            starting=sum(status.phase is Phase.STARTING for status in members),
            draining=sum(status.phase in (Phase.DRAINING, Phase.DRAINED) for status in members),
            failed="" if held is None else held.reason,
            given_up=held is not None and held.is_permanent,
        )
    return statuses


def _member_status(view: FleetView) -> tuple[MemberStatus, ...]:
    """All members by name."""
    urls = {member.name: member.url for member in view.members}
    return tuple(
        MemberStatus(
            name=instance.name,
            role=instance.role,
            revision=instance.revision,
            phase=instance.phase.value,
            for_s=round(view.now - instance.since, 1),
            url=urls.get(instance.name, ""),
            unit=instance.unit,
            outstanding=instance.outstanding,
            detail=instance.reason,
        )
        for instance in sorted(view.seen, key=attrgetter("name"))
    )


def _is_settled(view: FleetView, roles: dict[str, RoleStatus]) -> bool:
    """True if all members are ready, in the desired numbers and revision."""
    revisions = {view.instances.revision, view.routers.revision}
    return all(status.ready == status.desired for status in roles.values()) and all(
        instance.phase is Phase.READY and instance.revision in revisions for instance in view.seen
    )


def _why_stalled(view: FleetView) -> list[str]:
    """The reason why instances of another revision stay in a stalled fleet; empty if there are none, or the fleet is
    paused."""
    fleet = view.instances
    old = sorted(
        instance.name for instance in view.seen if instance.role != "router" and instance.revision != fleet.revision
    )
    return [explain_blocked_roll(fleet, old)] if view.is_stalled and old and not fleet.roll.pause else []


def _without_times(status: FleetStatus) -> FleetStatus:
    return msgspec.structs.replace(
        status, at=0.0, members=tuple(replace(member, for_s=0.0) for member in status.members)
    )
