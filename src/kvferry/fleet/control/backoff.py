"""Backoff between the starts of instances that fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from kvferry.core.clock import doubling_waits
from kvferry.fleet.control.facts import Failure, ObservedInstance, Phase
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole, seconds

SETTLED_S = 60.0
"""Seconds for which a member must have served to count as recovered. Earlier failures then no longer count."""


@dataclass(frozen=True)
class StartBackoff:
    """The reason why no member of a role is started now. `is_permanent`: none will be started later either, unless
    something changes."""

    reason: str
    is_permanent: bool = False


def start_backoff(
    fleet: DesiredFleet, role: MemberRole, members: Iterable[ObservedInstance], failures: Iterable[Failure], now: float
) -> StartBackoff | None:
    """The reason why no member of this role may be started now, after failures in a row; None: one may be started."""
    revision, failing = fleet.revision, fleet.failure
    settled = [
        member.since
        for member in members
        if (member.role, member.revision, member.phase) == (role, revision, Phase.READY)
        and now - member.since >= SETTLED_S
    ]
    row = [
        failure
        for failure in failures
        if (failure.role, failure.revision) == (role, revision) and failure.at > max(settled, default=-1e18)
    ]
    if not row:
        return None
    if len(row) >= failing.crash_loop:
        return StartBackoff(f"failed {_times(len(row))}, and is not started again: {row[-1].reason}", is_permanent=True)
    first, longest = map(seconds, failing.backoff)
    wait_s = row[-1].at + next(islice(doubling_waits(first, longest), len(row) - 1, None)) - now
    if wait_s <= 0:
        return None
    return StartBackoff(f"failed {_times(len(row))}, next start in {wait_s:.1f} s: {row[-1].reason}")


def record_failure(failures: list[Failure], failure: Failure, max_failures: int) -> None:
    """Add a failure. Of its role and revision, the last `max_failures` are kept, which is as many as are counted."""
    same = [before for before in failures if (before.role, before.revision) == (failure.role, failure.revision)]
    if len(same) >= max_failures:
        failures.remove(same[0])
    failures.append(failure)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times in a row"
