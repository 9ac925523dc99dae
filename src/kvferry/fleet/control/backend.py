"""What carries out the steps of a fleet: a backend starts its members somewhere, and says what has become of them.

A backend decides nothing. It keeps what `members` reports where a later controller finds it: members outlive the
controller that started them, and the next one takes them up by `open`. To write one, see `docs/extending.md`; it is
done when `kvferry.testing.backends` passes with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvferry.core.errors import KvferryError
from kvferry.fleet.control.spec import MemberRole, WantedFleet


class NotStarted(KvferryError):
    """A member could not be started; the message says why."""


@dataclass(frozen=True)
class MemberSpec:
    """What to start. `name` is unique in the fleet. `revision` names its settings, which the backend has from the
    recipe; `unit`: members of one unit are placed together."""

    name: str
    role: MemberRole
    revision: str
    unit: str = ""


class MemberState(Enum):
    """What a backend knows of a member's process."""

    STARTING = "starting"
    SERVING = "serving"
    """It answers requests at `url`."""
    ENDED = "ended"
    """Its process is gone, although nobody stopped it."""


@dataclass(frozen=True)
class Member:
    """One that was started and not stopped. `role`: as it was started, or as `assign` changed it. `url`: where it
    answers requests; `health_url`: where this process alone does, if others answer at `url` too. `reason`: why it has
    ended; `is_misconfigured`: it ended because its settings are wrong, and would do so again; `last_lines` of its
    log."""

    name: str
    role: MemberRole
    revision: str
    state: MemberState
    unit: str = ""
    url: str = ""
    health_url: str = ""
    bootstrap_port: int | None = None
    reason: str = ""
    is_misconfigured: bool = False
    last_lines: tuple[str, ...] = ()


class Watcher(Protocol):
    """Told of what members write and do, while it happens."""

    def line(self, name: str, text: str) -> None:
        """A line of a member's log."""

    def progress(self, name: str, what: str, fraction: float) -> None:
        """A member has done `fraction` (0 to 1) of its start, and is now doing `what`."""

    def ready(self, name: str, url: str) -> None:
        """A member serves at `url`."""


class FleetBackend(Protocol):
    """One fleet's members. Used by one event loop. Every method that waits has a deadline of its own."""

    changed: asyncio.Event
    """Set whenever `members` would answer something else; who waits for it clears it."""

    @property
    def num_routers(self) -> int:
        """How many routers there are to be, where the fleet does not say."""

    def use(self, fleet: WantedFleet) -> None:
        """This is wanted from now on, and what is started is started for it. Called once before `open`, and for each
        change. Raises `ConfigError` if it cannot be run here; what was wanted before holds then."""

    async def open(self) -> None:
        """Take up what an earlier controller has left. Called once, first. Raises `ConfigError` for what makes it
        impossible to run any member here."""

    def members(self) -> Sequence[Member]:
        """All members that were started and not stopped, those that have ended by themselves included."""

    async def start(self, member: MemberSpec) -> None:
        """Begin to start a member; returns when it is in `members`. Raises `NotStarted`."""

    async def stop(self, name: str, grace_s: float) -> None:
        """End a member, which has `grace_s` seconds for its running requests, and forget it. Returns when it is gone;
        it may be called again meanwhile with less grace. Does nothing for a name that is not here."""

    async def assign(self, name: str, role: MemberRole) -> None:
        """Note that a member has another role from now on."""

    async def close(self) -> None:
        """Let go of the members, which stay as they are."""
