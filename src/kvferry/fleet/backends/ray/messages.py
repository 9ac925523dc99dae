"""What a controller and the actors of a fleet say to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.fleet.backends.ray.placing import ActorResources, Bundle
from kvferry.fleet.control.backend import Member, MemberSpec, Recipe
from kvferry.fleet.spec.fleet_spec import DesiredFleet


@dataclass(frozen=True)
class Order:
    """What an actor is to run. It is sent to the actor alone, since `make_recipe` has the fleet's token: what an actor
    is created with, Ray keeps. `needs`: of each actor; `bundle`: the member's place in a placement group. `rank` and
    `joins`: of the actor of a further rank of the member, and the address of rank 0 (`HOST:PORT`)."""

    member: MemberSpec
    fleet: DesiredFleet
    namespace: str
    make_recipe: Callable[[DesiredFleet], Recipe]
    number: int
    needs: ActorResources
    token: str
    bundle: Bundle | None = None
    rank: int = 0
    joins: str = ""


@dataclass(frozen=True)
class LogLine:
    """A line of the member's log."""

    text: str


@dataclass(frozen=True)
class MemberProgress:
    """The member has done `fraction` (0 to 1) of its start, and is now doing `what`."""

    what: str
    fraction: float


FleetSettings = LogLine | MemberProgress


@dataclass(frozen=True)
class MemberUpdate:
    """`member`: as it is now. `told`: what it has said since, oldest first; some are left out if there were many.
    `number`: what to ask with the next time."""

    member: Member
    told: tuple[FleetSettings, ...]
    number: int


@dataclass(frozen=True)
class ActorIdentity:
    """Who an actor is. `answer`: its proof that it holds the fleet's token (`core.keys`). `number`: the instance's.
    `news`: the member as it is, without what it has said so far."""

    answer: bytes
    number: int
    bundle: Bundle | None
    news: MemberUpdate
