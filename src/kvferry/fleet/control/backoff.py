"""When instances are started again after failures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.fleet.control.facts import Failure, ObservedInstance, Phase
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole, seconds

SETTLED_S = 60.0
"""How long a member must have served to have recovered: failures before that count no longer."""

_MAX_DOUBLINGS = 64
"""A longer wait than any that can be asked for; beyond 1,023 the float overflows."""


@dataclass(frozen=True)
class StartBackoff:
    """Why no member of a role is started now. `for_good`: nor later, unless something changes."""

    why: str
    for_good: bool = False


def held_back(
    fleet: DesiredFleet, role: MemberRole, members: Iterable[ObservedInstance], failures: Iterable[Failure], now: float
) -> StartBackoff | None:
    """Whether a member of this role may be started now, after failures in a row; None if it may."""
    revision, failing = fleet.revision, fleet.failure
    settled = [
        one.since
        for one in members
        if (one.role, one.revision, one.phase) == (role, revision, Phase.READY) and now - one.since >= SETTLED_S
    ]
    row = [
        one for one in failures if (one.role, one.revision) == (role, revision) and one.at > max(settled, default=-1e18)
    ]
    if not row:
        return None
    if len(row) >= failing.crash_loop:
        return StartBackoff(f"failed {_times(len(row))}, and is not started again: {row[-1].reason}", for_good=True)
    first, longest = map(seconds, failing.backoff)
    wait_s = row[-1].at + min(first * 2.0 ** min(len(row) - 1, _MAX_DOUBLINGS), longest) - now
    if wait_s <= 0:
        return None
    return StartBackoff(f"failed {_times(len(row))}, next start in {wait_s:.1f} s: {row[-1].reason}")


def remember(failures: list[Failure], one: Failure, most: int) -> None:
    """Add a failure; of its role and revision, no more than `most` are kept, which is as many as are ever counted."""
    same = [before for before in failures if (before.role, before.revision) == (one.role, one.revision)]
    if len(same) >= most:
        failures.remove(same[0])
    failures.append(one)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times in a row"
