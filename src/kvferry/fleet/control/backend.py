"""The interface of backends, which carry out the steps of a fleet: they start its members and report their state.

A backend makes no decisions. It stores the information of `members` so that a later controller finds it: members
outlive the controller that started them, and the next one adopts them in `open`. `docs/extending.md` describes how to
write a backend; a backend is complete when `kvferry.testing.backends` passes with it.
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
    """A member could not be started. The message has the reason."""


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
    """The member answers requests at `url`."""
    ENDED = "ended"
    """The member's process is gone, although the member was not stopped."""


@dataclass(frozen=True)
class Member:
    """A member that was started and not stopped. `role`: the role with which it was started, or which `assign` has set.
    `url`: the URL of its API; `health_url`: a URL at which only this process answers, if other processes also answer at
    `url`. `reason`: the reason why it has ended; `is_misconfigured`: True if it has ended because its settings are
    wrong, and would end again; `last_lines`: the last lines of its log."""

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

    def progress(self, name: str, phase: str, fraction: float) -> None:
        """A member has done `fraction` (0 to 1) of its start, and is now doing `phase`."""

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
        """Hosts and ports at which the routers listen; empty without routers."""

    def on_node(self, host: str) -> Recipe:
        """A recipe for members on this node of a cluster, whose scheduler gives them devices. Other nodes reach this
        node at `host`."""

    def instance(self, name: str, role: MemberRole, number: int, cores: Cores) -> ProcessSpec:
        """The process of an instance. `number` is unique among the members. Raises `KvferryError`."""

    def router_member(self, name: str, group: RouterGroup) -> ProcessSpec:
        """The process of a router. Raises `KvferryError`."""


@dataclass(frozen=True)
class BackendContext:
    """The context of one fleet's backend. `folder`: a folder for this fleet alone, which only this user can read, and
    which is lost when the machine restarts. `make_recipe` raises `ConfigError` for a fleet that cannot be run.
    `outlives`: members continue when the backend is closed; otherwise they end with it. `token`: the secret of the
    fleet's processes."""

    folder: Path
    make_recipe: Callable[[DesiredFleet], Recipe]
    watcher: Watcher
    outlives: bool = True
    token: str = field(default="", repr=False)


class FleetBackend(ABC):
    """One fleet's members. Used by one event loop. Every method that waits has a deadline."""

    changed: asyncio.Event
    """Set whenever the result of `members` changes. The task that waits clears it."""
    leadership: Leadership | None = None
    """The leadership of the fleet, if controllers on several machines can manage it; `use` sets it, and it is acquired
    before `open`. None: all controllers are on one machine, and the ledger has the leadership."""
    num_routers: int
    """Number of routers if the fleet does not set it. Known after `use`."""
    trouble: str = ""
    """The reason why no member can be started now, if the members do not cause it; empty: none. Running members
    continue."""
    hangs: bool = False
    """True if something that `close` has tried to end does not end. The process must then exit without waiting for
    it."""

    def __init__(self, context: BackendContext) -> None:
        """Does not search for members yet."""
        self.context = context
        self.changed = asyncio.Event()

    @abstractmethod
    def use(self, fleet: DesiredFleet) -> None:
        """Set the desired fleet, for which members are started from now on. Called once before `open`, and for each
        change; also without `open`, to find out if the fleet can be run. Raises `ConfigError` if it cannot; the
        previous fleet then stays in force."""

    @abstractmethod
    async def open(self) -> None:
        """Adopt the members of an earlier controller. Called once, before all other methods but `use`. Raises
        `ConfigError` if no member can be run here."""

    @abstractmethod
    def members(self) -> Sequence[Member]:
        """All members that were started and not stopped, including those that have ended by themselves."""

    @abstractmethod
    async def start(self, member: MemberSpec) -> None:
        """Begin to start a member. Returns when it is in `members`. Raises `NotStarted`, also if the name is in use."""

    @abstractmethod
    async def stop(self, name: str, grace_s: float) -> None:
        """End a member, which has `grace_s` seconds for its running requests, and forget it. Returns when it is gone.
        May be called again before that, with a shorter time. Does nothing for an unknown name."""

    @abstractmethod
    async def assign(self, name: str, role: MemberRole) -> None:
        """Record that a member has another role from now on. Does nothing for an unknown name."""

    def begin_shutdown(self) -> None:
        """Called when all members are about to be stopped, and none will be started: clients must not wait for another
        member."""

    @abstractmethod
    async def close(self) -> None:
        """Release the leadership and the members. Members that outlive the backend continue; others are ended."""


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
