"""Detects members that run and do not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvferry.fleet.control.backend import Member, MemberState
from kvferry.fleet.processes.health_check import ask_health

logger = logging.getLogger(__name__)

_CHECKS_PER_TIMEOUT = 4
"""Minimum number of health checks before a member counts as hung."""

OnHung = Callable[[str, str], Coroutine[Any, Any, None]]
"""Called with the name of a member that hangs, and the reason."""


class HangWatch:
    """Checks the health of each serving member; owns a task for each."""

    check_interval_s = 5.0
    """Maximum seconds between two checks of a member."""

    def __init__(self, on_hung: OnHung) -> None:
        self._on_hung = on_hung
        self._checks: dict[str, asyncio.Task[None]] = {}

    def follow(self, members: Sequence[Member], timeout_s: float, group: asyncio.TaskGroup) -> None:
        """Check these members from now on, and no others. `timeout_s`: seconds without an answer after which a member
        counts as hung; 0: check none."""
        serving = {member.name: member for member in members if member.state is MemberState.SERVING and timeout_s}
        for name in [name for name, task in self._checks.items() if name not in serving or task.done()]:
            self._checks.pop(name).cancel()
        for name, member in serving.items():
            if name not in self._checks:
                self._checks[name] = group.create_task(self._check(member, timeout_s, group))

    def end(self) -> None:
        """Stop checking."""
        for task in self._checks.values():
            task.cancel()
        self._checks.clear()

    async def _check(self, member: Member, timeout_s: float, group: asyncio.TaskGroup) -> None:
        """Report the member once it has not answered for `timeout_s`. Checks overlap, and each may take up to
        `timeout_s`, so that a slow member does not count as hung. A member without a `health_url` must have answered
        once before, since its health may be served elsewhere. The time is counted in pauses between checks, so that the
        time for which a machine was suspended does not count."""
        interval_s = min(self.check_interval_s, timeout_s / _CHECKS_PER_TIMEOUT)
        silent_s, has_answered = 0.0 if member.health_url else float("-inf"), False
        checks: set[asyncio.Task[int]] = set()
        try:
            while silent_s < timeout_s:
                checks.add(asyncio.create_task(ask_health(member.health_url or member.url, timeout_s)))
                await asyncio.sleep(interval_s)
                ended = {check for check in checks if check.done()}
                checks -= ended
                if any(check.result() for check in ended):
                    if silent_s or not has_answered:
                        logger.debug("%s answers GET /health", member.name)
                    silent_s, has_answered = 0.0, True
                else:
                    silent_s += interval_s
        finally:
            for check in checks:
                check.cancel()
        # In a task of its own: this one is cancelled as soon as the member is being stopped.
        group.create_task(self._on_hung(member.name, f"has not answered GET /health for {silent_s:.0f} s"))
