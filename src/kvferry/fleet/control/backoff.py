"""When instances are started again after failures."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.fleet.control.facts import Failure, Observed, Phase
from kvferry.fleet.control.spec import Role, WantedFleet, seconds

SETTLED_S = 60.0
"""Who has served for so long has recovered: failures before that count no longer."""


def held_back(
    fleet: WantedFleet, role: Role, members: Iterable[Observed], failures: Iterable[Failure], now: float
) -> str:
    """Why no instance of this role is started now, after failures in a row; empty if one may be."""
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
        return ""
    if len(row) >= failing.crash_loop:
        return f"{len(row)} failures in a row, the last: {row[-1].reason}"
    first, longest = map(seconds, failing.backoff)
    wait_s = row[-1].at + min(first * 2.0 ** (len(row) - 1), longest) - now
    return f"failed {len(row)} times in a row, next start in {wait_s:.1f} s: {row[-1].reason}" if wait_s > 0 else ""
