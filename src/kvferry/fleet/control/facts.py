"""What is known of a fleet's instances, and the steps that change them. Names, roles and revisions are those of `spec`;
times are seconds of one clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvferry.fleet.control.spec import Role


class Phase(Enum):
    """Where an instance is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """Gets no new requests; some run, or tickets of it are outstanding."""
    DRAINED = "drained"
    FAILED = "failed"
    """Has ended, or was found hung, although nobody stopped it."""


@dataclass(frozen=True)
class Observed:
    """An instance. `since`: when its phase began. `outstanding`: requests and tickets that are not over. `unit`: the
    unit it belongs to, in replica mode."""

    name: str
    role: Role
    revision: str
    phase: Phase
    since: float
    unit: str = ""
    outstanding: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Failure:
    """A member of this role and revision failed, or did not serve in time."""

    role: Role
    revision: str
    at: float
    reason: str


@dataclass(frozen=True)
class Start:
    """Start an instance."""

    name: str
    role: Role
    revision: str
    why: str
    unit: str = ""


@dataclass(frozen=True)
class Drain:
    """Send an instance no new requests; it is stopped when what runs there has ended."""

    name: str
    why: str


@dataclass(frozen=True)
class StopMember:
    """End an instance now, and forget it. `failed`: it counts as a failure."""

    name: str
    why: str
    failed: bool = False


@dataclass(frozen=True)
class SwitchRole:
    """Let an instance that runs do the other phase."""

    name: str
    role: Role
    why: str


Step = Start | Drain | StopMember | SwitchRole
