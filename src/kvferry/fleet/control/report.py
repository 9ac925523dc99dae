"""How a fleet is, for people: from what its controller has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from kvferry.fleet.control.backend import Member
from kvferry.fleet.control.backoff import held_back
from kvferry.fleet.control.facts import Failure, MemberStatus, Observed, Phase, RoleStatus
from kvferry.fleet.control.ledger import FleetStatus
from kvferry.fleet.control.rehearsal import no_way_to_replace
from kvferry.fleet.control.spec import WantedFleet


def role_status(
    fleet: WantedFleet, seen: Sequence[Observed], failures: Sequence[Failure], now: float
) -> dict[str, RoleStatus]:
    """For each role that is wanted, how many members there are and what keeps others from being started."""
    if fleet.unit is None:
        desired = {role: one.count for role, one in fleet.role.items()}
    else:
        desired = {role: number * fleet.unit.count for role, number in fleet.unit.members.items()}
    found: dict[str, RoleStatus] = {}
    for role, number in desired.items():
        here = [one for one in seen if one.role == role]
        ready = [one for one in here if one.phase is Phase.READY]
        held = held_back(fleet, role, seen, failures, now)
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


def member_status(seen: Sequence[Observed], members: Sequence[Member], now: float) -> tuple[MemberStatus, ...]:
    """All members by name."""
    urls = {one.name: one.url for one in members}
    return tuple(
        MemberStatus(
            name=one.name,
            role=one.role,
            revision=one.revision,
            phase=one.phase.value,
            for_s=round(now - one.since, 1),
            url=urls.get(one.name, ""),
            unit=one.unit,
            outstanding=one.outstanding,
            detail=one.reason,
        )
        for one in sorted(seen, key=lambda one: one.name)
    )


def is_settled(fleets: Sequence[WantedFleet], seen: Sequence[Observed], roles: dict[str, RoleStatus]) -> bool:
    """Whether everything is as it is to be, and of the revision that is wanted."""
    revisions = {one.revision for one in fleets}
    return all(one.ready == one.desired for one in roles.values()) and all(
        one.phase is Phase.READY and one.revision in revisions for one in seen
    )


def why_stalled(fleet: WantedFleet, seen: Sequence[Observed]) -> str:
    """Why instances of another revision stay, of a fleet in which nothing moves and nothing can be done; empty if there
    are none, or the fleet is paused."""
    old = sorted(one.name for one in seen if one.role != "router" and one.revision != fleet.revision)
    return no_way_to_replace(fleet, old) if old and not fleet.roll.pause else ""


def says_the_same(status: FleetStatus, other: FleetStatus | None) -> bool:
    """Whether nothing but times differs."""
    return other is not None and _timeless(status) == _timeless(other)


def _timeless(status: FleetStatus) -> FleetStatus:
    return msgspec.structs.replace(status, at=0.0, members=tuple(replace(one, for_s=0.0) for one in status.members))
