"""What carries out the steps of a fleet: a backend starts its members somewhere, and says what has become of them.

A backend decides nothing. It keeps what `members` reports where a later controller finds it: members outlive the
controller that started them, and the next one takes them up by `open`. To write one, see `docs/extending.md`; it is
done when `kvferry.testing.backends` passes with it.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from kvferry.core.dependencies import require_library
from kvferry.core.errors import KvferryError
from kvferry.fleet.control.fleet_lease import FleetLease, LeaseUnknown
from kvferry.fleet.processes.cpu import Cores
from kvferry.fleet.processes.process import ProcessSpec, RouterGroup
from kvferry.fleet.spec.fleet_spec import BACKENDS, DesiredFleet, MemberRole

logger = logging.getLogger(__name__)


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
    ended; `is_misconfigured`: it ended because its settings are wrong, and would do so again; `is_leaving`: somebody
    else than its controller ends it, or has, after it has served; `last_lines` of its log."""

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
    is_leaving: bool = False
    last_lines: tuple[str, ...] = ()


class Watcher(Protocol):
    """Called with what members write and do, while it happens."""

    def line(self, name: str, text: str) -> None:
        """A line of a member's log."""

    def progress(self, name: str, what: str, fraction: float) -> None:
        """A member has done `fraction` (0 to 1) of its start, and is now doing `what`."""

    def ready(self, name: str, url: str) -> None:
        """A member serves at `url`."""


class Recipe(Protocol):
    """How the members of a fleet are run as processes."""

    @property
    def num_instances(self) -> int:
        """How many instances are wanted; cores are divided among them."""

    @property
    def num_routers(self) -> int:
        """How many routers there are to be."""

    @property
    def cores(self) -> Cores:
        """The cores of this machine that the whole fleet has."""

    @property
    def addresses(self) -> Sequence[tuple[str, int]]:
        """Where the routers listen: hosts and ports; none without routers."""

    def on_node(self, host: str) -> Recipe:
        """The same for members on this node of a cluster, whose scheduler gives them devices, and which others reach
        at `host`."""

    def instance(self, name: str, role: MemberRole, number: int, cores: Cores) -> ProcessSpec:
        """What to run for an instance. `number` is one that no other member has. Raises `KvferryError`."""

    def router_member(self, name: str, group: RouterGroup) -> ProcessSpec:
        """What to run for a router. Raises `KvferryError`."""


@dataclass(frozen=True)
class BackendContext:
    """What a backend is made with. `folder`: of this fleet alone, readable by this user only, and gone when the machine
    is. `make_recipe` raises `ConfigError` for a fleet that cannot be run. `outlives`: members go on when the backend
    is closed; otherwise they end with it. `token`: the secret of the fleet's processes. `owner`: names what the members
    belong to and end with, where there is such a thing; what is beside them is then there already."""

    folder: Path
    make_recipe: Callable[[DesiredFleet], Recipe]
    watcher: Watcher
    outlives: bool = True
    token: str = field(default="", repr=False)
    owner: str = ""


class FleetBackend(ABC):
    """One fleet's members. Used by one event loop. Every method that waits has a deadline of its own."""

    changed: asyncio.Event
    """Set whenever `members` would answer something else; whoever waits for it clears it."""
    _lease: FleetLease | None = None
    _keeping: asyncio.Task[None] | None = None
    """The task that renews it."""

    def __init__(self, context: BackendContext) -> None:
        """Does not look for members yet."""
        self.context = context
        self.changed = asyncio.Event()

    @property
    @abstractmethod
    def num_routers(self) -> int:
        """How many routers there are to be, where the fleet does not say."""

    @abstractmethod
    def use(self, fleet: DesiredFleet) -> None:
        """Set the fleet that is wanted, for which members are started from now on. Called once before `open`, and for
        each change; also without `open`, to learn whether it can be run. Raises `ConfigError` if it cannot; what was
        wanted before holds then."""

    @property
    def trouble(self) -> str:
        """What keeps every member from being started for now, and is no member's fault; empty: nothing. Those that run
        go on."""
        return ""

    async def lease(self) -> FleetLease | None:
        """Where the right to act is kept, if controllers on several machines can have this fleet. Called after
        `use`. Raises `ConfigError`. By default, all of them are on one machine, where the ledger has that right."""
        return None

    async def try_acquire(self) -> bool:
        """Take the right to act on this fleet, which one controller of all machines has at a time, until `close`;
        False: another one has it. Called after `use` and before `open`, again and again until it says yes. Raises
        `ConfigError`."""
        if self._lease is None:
            self._lease = await self.lease()
        if self._lease is None:
            return True
        try:
            if not await self._lease.try_to_take():
                return False
        except LeaseUnknown as error:
            logger.warning("whether another controller acts is not known: %s", error)
            return False
        self._keeping = asyncio.create_task(self._lease.keep())
        return True

    @property
    def is_leader(self) -> bool:
        """Whether this process still has that right; once it has not, the controller does nothing any more. Those that
        never asked for it are alone."""
        return self._lease is None or self._lease.is_held

    @property
    def acts_instead(self) -> str:
        """Who has that right, as far as it is known."""
        return (self._lease and self._lease.holder) or "another controller"

    async def give_up(self) -> None:
        """Let another controller act at once. For `close`, when nothing is done any more."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        if self._lease is not None:
            await self._lease.give_up()

    @abstractmethod
    async def open(self) -> None:
        """Take up what an earlier controller has left. Called once, first. Raises `ConfigError` for what makes it
        impossible to run any member here."""

    @abstractmethod
    def members(self) -> Sequence[Member]:
        """All members that were started and not stopped, those that have ended by themselves included."""

    @abstractmethod
    async def start(self, member: MemberSpec) -> None:
        """Begin to start a member; returns when it is in `members`. Raises `NotStarted`, also for a name that is
        there."""

    @abstractmethod
    async def stop(self, name: str, grace_s: float) -> None:
        """End a member, which has `grace_s` seconds for its running requests, and forget it. Returns when it is gone;
        it may be called again meanwhile with less grace. Does nothing for a name that is not here."""

    @abstractmethod
    async def assign(self, name: str, role: MemberRole) -> None:
        """Note that a member has another role from now on. Does nothing for a name that is not here."""

    def ends(self) -> None:
        """Everything is about to be ended, and nothing more is started: nobody is to wait for what will not come."""

    async def clear(self) -> None:
        """The fleet has ended, all its members included: leave nothing of it. By default, there is only the lease,
        which goes last: until then, nobody else acts."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        if self._lease is not None:
            await self._lease.remove()

    @abstractmethod
    async def close(self) -> None:
        """Let go of the members, which stay as they are, unless they do not outlive the backend."""

    @property
    def hangs(self) -> bool:
        """Whether `close` has left something behind that does not end: the process has to end without it."""
        return False


def backend_class(kind: str) -> type[FleetBackend]:
    """The backend that a spec names. Raises `ConfigError`."""
    if kind in ("ray", "kubernetes"):
        require_library(f"backend {kind}", kind, kind, [kind])
    found: type[FleetBackend] = BACKENDS.find(kind, FleetBackend)
    return found
