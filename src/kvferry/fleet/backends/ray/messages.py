"""The messages between a controller and the actors of a fleet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.fleet.backends.ray.placing import ActorResources, Bundle
from kvferry.fleet.control.backend import Member, MemberSpec, Recipe
from kvferry.fleet.spec.fleet_spec import DesiredFleet


@dataclass(frozen=True)
class StartRequest:
    """The member that an actor is to run. It is sent to the actor alone, since `make_recipe` has the fleet's token,
    and Ray stores the arguments of an actor's constructor. `needs`: of each actor; `bundle`: the member's bundles in a
    placement group. `rank` and `rank0_address` (`HOST:PORT`): for the actor of a further
    rank."""

    member: MemberSpec
    fleet: DesiredFleet
    namespace: str
    make_recipe: Callable[[DesiredFleet], Recipe]
    number: int
    needs: ActorResources
    token: str
    bundle: Bundle | None = None
    rank: int = 0
    rank0_address: str = ""


@dataclass(frozen=True)
class LogLine:
    """A line of the member's log."""

    text: str


@dataclass(frozen=True)
class MemberProgress:
    """The member has done `fraction` (0 to 1) of its start, and is now doing `what`."""

    what: str
    fraction: float


MemberEvent = LogLine | MemberProgress


@dataclass(frozen=True)
class MemberUpdate:
    """`member`: its present state. `events`: its events since the last update, oldest first; some are left out if there
    were many. `number`: the number with which to request the next update."""

    member: Member
    events: tuple[MemberEvent, ...]
    number: int


@dataclass(frozen=True)
class ActorIdentity:
    """An actor's identity. `answer`: its proof that it has the fleet's token (`core.keys`). `number`: the instance's.
    `update`: the member as it is, without its earlier events."""

    answer: bytes
    number: int
    bundle: Bundle | None
    update: MemberUpdate
