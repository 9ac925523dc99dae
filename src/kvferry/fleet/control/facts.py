"""The observed instances of a fleet, and the steps that change them. `spec` defines names, roles and revisions; times
are seconds of one clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvferry.fleet.spec.fleet_spec import MemberRole


class Phase(Enum):
    """The phase of an instance in its life cycle."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """Gets no new requests. Some requests still run, or its tickets may still be used."""
    DRAINED = "drained"
    FAILED = "failed"
    """Has ended without being stopped, or hangs."""


@dataclass(frozen=True)
class ObservedInstance:
    """An instance. `since`: time at which its phase began. `outstanding`: number of requests and tickets that have not
    ended. `unit`: its unit, in replica mode."""

    name: str
    role: MemberRole
    revision: str
    phase: Phase
    since: float
    unit: str = ""
    outstanding: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Failure:
    """A member of this role and revision failed, or did not serve in time."""

    role: MemberRole
    revision: str
    at: float
    reason: str


@dataclass(frozen=True)
class Start:
    """Start an instance."""

    name: str
    role: MemberRole
    revision: str
    reason: str
    unit: str = ""


@dataclass(frozen=True)
class Drain:
    """Send an instance no new requests. It is stopped when its running requests have ended."""

    name: str
    reason: str


@dataclass(frozen=True)
class StopMember:
    """End an instance now, and forget it. `failed`: it counts as a failure."""

    name: str
    reason: str
    failed: bool = False


@dataclass(frozen=True)
class SwitchRole:
    """Give a running instance the other role."""

    name: str
    role: MemberRole
    reason: str


Step = Start | Drain | StopMember | SwitchRole


@dataclass(frozen=True)
class MemberStatus:
    """The status of a member, for people. `detail`: the reason of its failure, or what it waits for."""

    name: str
    role: MemberRole
    revision: str
    phase: str
    for_s: float
    url: str = ""
    unit: str = ""
    outstanding: int = 0
    detail: str = ""


@dataclass(frozen=True)
class RoleStatus:
    """Numbers of members of a role. `updated`: ready in the desired revision. `failed`: the reason why none is started
    at the moment, or empty; `given_up`: none will be started later either, unless something changes."""

    desired: int
    ready: int
    updated: int
    starting: int
    draining: int
    failed: str = ""
    given_up: bool = False
