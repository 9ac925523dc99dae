"""The interface of backends, which carry out the steps of a fleet: they start its members and report their state.

A backend decides nothing. It keeps what `members` reports where a later controller finds it: members outlive the
controller that started them, and the next one adopts them by `open`. To write a backend, see `docs/extending.md`; it
is done when `kvferry.testing.backends` passes with it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from kvferry.core.dependencies import require_library
from kvferry.core.errors import ConfigError, KvferryError
from kvferry.fleet.control.leadership import Leadership
from kvferry.fleet.processes.cpu import Cores
from kvferry.fleet.processes.process import ProcessSpec, RouterGroup
from kvferry.fleet.spec.fleet_spec import BACKENDS, KUBERNETES, DesiredFleet, MemberRole


class NotStarted(KvferryError):
    """A member could not be started; the message says why."""


@dataclass(frozen=True)
class MemberSpec:
    """A member to start. `name` is unique in the fleet. `revision` names its settings, which the backend has from the
    recipe; `unit`: members of one unit are placed together."""

    name: str
    role: MemberRole
    revision: str
    unit: str = ""


class MemberState(Enum):
    """The state of a member's process, as its backend sees it."""

    STARTING = "starting"
    SERVING = "serving"
    """It answers requests at `url`."""
    ENDED = "ended"
    """Its process is gone, although it was not stopped."""


@dataclass(frozen=True)
class Member:
    """A member that was started and not stopped. `role`: as it was started, or as `assign` changed it. `url`: where it
    answers requests; `health_url`: where this process alone does, if others answer at `url` too. `reason`: why it has
    ended; `is_misconfigured`: it ended because its settings are wrong, and would do so again; `last_lines`: of its
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
    """Receives the log lines and the progress of members, as they happen."""

    def line(self, name: str, text: str) -> None:
        """A line of a member's log."""

    def progress(self, name: str, what: str, fraction: float) -> None:
        """A member has done `fraction` (0 to 1) of its start, and is now doing `what`."""

    def ready(self, name: str, url: str) -> None:
        """A member serves at `url`."""


class Recipe(Protocol):
    """Makes the command lines of a fleet's members."""

    @property
    def num_instances(self) -> int:
        """Number of desired instances; cores are divided among them."""

    @property
    def num_routers(self) -> int:
        """Number of desired routers."""

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
        """The process of an instance. `number` is unique among the members. Raises `KvferryError`."""

    def router_member(self, name: str, group: RouterGroup) -> ProcessSpec:
        """The process of a router. Raises `KvferryError`."""


@dataclass(frozen=True)
class BackendContext:
    """The context of one fleet's backend. `folder`: of this fleet alone, readable by this user only, and lost when the
    machine restarts. `make_recipe` raises `ConfigError` for a fleet that cannot be run. `outlives`: members continue
    when the backend is closed; otherwise they end with it. `token`: the secret of the fleet's processes."""

    folder: Path
    make_recipe: Callable[[DesiredFleet], Recipe]
    watcher: Watcher
    outlives: bool = True
    token: str = field(default="", repr=False)


class FleetBackend(ABC):
    """One fleet's members. Used by one event loop. Every method that waits has a deadline of its own."""

    changed: asyncio.Event
    """Set whenever `members` would answer something else; its waiter clears it."""
    leadership: Leadership | None = None
    """The right to act, if controllers on several machines can have this fleet; set by `use`, acquired before `open`.
    Where it is None, all controllers are on one machine, and the ledger keeps that right."""
    num_routers: int
    """Number of routers where the fleet does not say; known after `use`."""
    trouble: str = ""
    """The reason why no member can be started for now, which is no member's fault; empty: none. Members that run go
    on."""
    hangs: bool = False
    """True if `close` has left something behind that does not end: the process has to end without it."""

    def __init__(self, context: BackendContext) -> None:
        """Does not look for members yet."""
        self.context = context
        self.changed = asyncio.Event()

    @abstractmethod
    def use(self, fleet: DesiredFleet) -> None:
        """Set the desired fleet, for which members are started from now on. Called once before `open`, and for each
        change; also without `open`, to learn if it can be run. Raises `ConfigError` if it cannot; the fleet before
        stays in force then."""

    @abstractmethod
    async def open(self) -> None:
        """Adopt what an earlier controller has left. Called once, first. Raises `ConfigError` for what makes it
        impossible to run any member here."""

    @abstractmethod
    def members(self) -> Sequence[Member]:
        """All members that were started and not stopped, including those that have ended by themselves."""

    @abstractmethod
    async def start(self, member: MemberSpec) -> None:
        """Begin to start a member; returns when it is in `members`. Raises `NotStarted`, also for a name that is in
        use."""

    @abstractmethod
    async def stop(self, name: str, grace_s: float) -> None:
        """End a member, which has `grace_s` seconds for its running requests, and forget it. Returns when it is gone;
        it may be called again meanwhile with less grace. Does nothing for an unknown name."""

    @abstractmethod
    async def assign(self, name: str, role: MemberRole) -> None:
        """Record that a member has another role from now on. Does nothing for an unknown name."""

    def begin_shutdown(self) -> None:
        """Every member is about to be stopped, and nothing more is started: let no client wait for another one."""

    @abstractmethod
    async def close(self) -> None:
        """Release the leadership and the members, which stay as they are, unless they do not outlive the backend."""


def backend_class(kind: str) -> type[FleetBackend]:
    """The backend that a spec names. Raises `ConfigError`."""
    if kind == KUBERNETES:
        raise ConfigError(
            'backend.kind = "kubernetes": Kubernetes starts the pods; `kvferry fleet render SPEC | kubectl apply -f -`'
            " makes and changes this fleet"
        )
    if kind == "ray":
        require_library(f"backend {kind}", kind, kind, [kind])
    backend: type[FleetBackend] = BACKENDS.find(kind, FleetBackend)
    return backend
