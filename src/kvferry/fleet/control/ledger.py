"""What is kept of a fleet between controllers: what it is to be, what it was before, and each step that was taken.

    wanted.json       the fleet, and its earlier revisions; written by whoever changes it, under a lock
    history.jsonl     one step or event a line, the oldest first; bounded
    status.json       what the controller has seen last
    scaled.json       the counts that a fleet with [scale] is to have now
    controller.lock   held by the controller that acts (`lease`); another one waits

Each file is replaced as a whole, or appended to by its one writer, so that a reader never sees half of one.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.fleet.control.facts import MemberStatus, RoleStatus
from kvferry.fleet.control.file_leadership import FileLeadership, LeaderRecord, holder, is_held, locked
from kvferry.fleet.scaling.scaler import ScalingMemory
from kvferry.fleet.spec.fleet_spec import DesiredFleet

logger = logging.getLogger(__name__)

_MAX_HISTORY_BYTES = 4 * 2**20
"""Most bytes of the history; beyond, its older half is forgotten."""
_LOCKED_S, _TRY_AGAIN_S = 5.0, 0.02
"""How long another process may change what is wanted, which takes milliseconds; and how often this is looked at."""


class DesiredState(msgspec.Struct, frozen=True):
    """What the fleet is to be. `earlier`: what it was to be before, the last first. `deleted`: it is to end. `number`
    grows with each change. `source`: the file that a controller follows, as `kvferry fleet run` does. `place`: the
    folder in which paths of the spec begin that do not say where: the one that it was applied in."""

    fleet: DesiredFleet
    earlier: tuple[DesiredFleet, ...] = ()
    deleted: bool = False
    number: int = 0
    source: str = ""
    place: str = ""


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step that was taken, or what became of a member. `at`: seconds since 1970."""

    at: float
    what: str
    name: str = ""
    why: str = ""


class FleetStatus(msgspec.Struct, frozen=True):
    """What the controller has seen last. `url`: where clients are served; empty until then. `trouble`: what keeps the
    fleet from being what it is to be. `passing`: all of it is the backend's, as when a cluster does not answer, and
    passes when that recovers."""

    at: float
    pid: int
    """Process id of the controller that has seen it."""
    number: int
    url: str
    roles: dict[str, RoleStatus]
    members: tuple[MemberStatus, ...]
    trouble: tuple[str, ...] = ()
    passing: bool = False
    decided: str = ""
    """What `[scale]` has decided, in words."""
    settled: bool = False
    started: int = 0
    """When that controller's process started, as in `started_at`."""


class Ledger:
    """One fleet's, in a folder that only its user can read: settings may contain keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exists(self) -> bool:
        """Whether somebody wanted this fleet."""
        return (self.folder / "wanted.json").exists()

    # What is wanted.

    def wanted(self) -> DesiredState:
        """What the fleet is to be. Raises `ConfigError` if there is no such fleet, or its file cannot be read."""
        try:
            return msgspec.json.decode((self.folder / "wanted.json").read_bytes(), type=DesiredState)
        except FileNotFoundError as error:
            raise ConfigError(f"there is no fleet in {self.folder}; `kvferry fleet apply` makes one") from error
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.folder / 'wanted.json'} cannot be read: {error}; apply the fleet's spec again"
            ) from error

    def want(self, fleet: DesiredFleet, source: str = "") -> DesiredState:
        """The fleet is to be this from now on. Another revision than before makes that one an earlier one. What was
        wanted before, and cannot be read, is put aside."""
        with self._changing():
            before = self._before()
            if isinstance(before, int) or before.deleted:
                new = DesiredState(fleet, number=1 + (before if isinstance(before, int) else before.number))
            else:
                new = _following(before, fleet)
            new = msgspec.structs.replace(new, source=source, place=_here())
            self._replace("wanted.json", new)
        return new

    def change(self, how: Callable[[DesiredState], DesiredFleet]) -> DesiredState:
        """The fleet is to be this from now on, as it follows from what it is to be now: nobody else changes it in
        between. Raises `ConfigError` if there is no fleet, or it is to end."""
        with self._changing():
            before = self.wanted()
            if before.deleted:
                raise ConfigError(
                    f"{before.fleet.name} is ending; once it has ended, `kvferry fleet apply` makes it anew"
                )
            new = _following(before, how(before))
            self._replace("wanted.json", new)
        return new

    def delete(self) -> None:
        """Note that the fleet is to end."""
        with self._changing():
            before = self.wanted()
            self._replace("wanted.json", msgspec.structs.replace(before, deleted=True, number=before.number + 1))

    def forget(self, *others: Path) -> bool:
        """Remove all that is kept of a fleet that has ended, and these folders too. False if a controller still acts,
        or somebody wants the fleet again."""
        with self._changing():
            leadership = self.try_acquire()
            if leadership is None:
                return False
            try:
                if not self.wanted().deleted:
                    return False
                for folder in (*others, self.folder):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                leadership.close()
        return True

    def _before(self) -> DesiredState | int:
        """What was wanted before, or, where nothing was or nobody can read it, the number of its last change."""
        if not self.exists:
            return 0
        try:
            return self.wanted()
        except ConfigError:
            (self.folder / "wanted.json").replace(self.folder / "wanted.json.unreadable")
            seen = self.status()
            return 0 if seen is None else seen.number

    # What was done.

    def note(self, what: str, name: str = "", why: str = "") -> None:
        """Append an event to the history. If that is not possible, only the log says so: a history that cannot be
        written must not keep anything from being done."""
        logger.debug("%s", " ".join(filter(None, (what, name, why))))
        try:
            self._append(what, name, why)
        except OSError as error:
            logger.warning("the history cannot be written: %s", error)

    def _append(self, what: str, name: str, why: str) -> None:
        path = self.folder / "history.jsonl"
        line = msgspec.json.encode(Event(SYSTEM_CLOCK.wall(), what, name, why)) + b"\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)
            is_long = os.fstat(descriptor).st_size > _MAX_HISTORY_BYTES
        finally:
            os.close(descriptor)
        if is_long:
            text = path.read_bytes()
            self._replace_bytes("history.jsonl", text[text.index(b"\n", len(text) // 2) + 1 :])

    def history(self) -> Iterator[Event]:
        """All events that are kept, the oldest first; lines that are not understood are passed over."""
        try:
            lines = (self.folder / "history.jsonl").read_bytes().splitlines()
        except OSError:
            return
        for line in lines:
            try:
                yield msgspec.json.decode(line, type=Event)
            except ValueError:
                continue

    def write_status(self, status: FleetStatus) -> None:
        """Replace what was seen before."""
        self._replace("status.json", status)

    def write_scaled(self, memory: ScalingMemory) -> None:
        """Replace the counts that were decided before."""
        self._replace("scaled.json", memory)

    def forget_scaled(self) -> None:
        """The fleet has no `[scale]` any more: one that has it again begins with the counts of its spec."""
        with suppress(OSError):
            (self.folder / "scaled.json").unlink()

    def scaled(self) -> ScalingMemory | None:
        """The counts that were decided last, of a fleet that is scaled by what is asked for; None: there are none."""
        try:
            return msgspec.json.decode((self.folder / "scaled.json").read_bytes(), type=ScalingMemory)
        except (OSError, ValueError):
            return None

    def status(self) -> FleetStatus | None:
        """What a controller has seen last; None: there was none yet."""
        try:
            return msgspec.json.decode((self.folder / "status.json").read_bytes(), type=FleetStatus)
        except (OSError, ValueError):
            return None

    def current_status(self) -> FleetStatus | None:
        """The status, if the controller that has seen it still looks after the fleet; None: what was seen last may be
        there no more."""
        seen, holder = self.status(), self.controller
        if seen is None or holder is None or holder.hangs:
            return None
        return seen if (seen.pid, seen.started) == (holder.pid, holder.started) else None

    # Who acts.

    def leadership(self, *, follows: bool = False) -> FileLeadership:
        """The right to act, which one controller of this machine has at a time; not acquired yet. `follows`: as in
        `LeaderRecord`."""
        return FileLeadership(self._lock, follows=follows)

    def try_acquire(self) -> FileLeadership | None:
        """The acquired right to act; None: another controller has it. Raises `OSError`."""
        leadership = self.leadership()
        return leadership if leadership.try_lock() else None

    @property
    def has_controller(self) -> bool:
        """Whether a controller acts."""
        return is_held(self._lock)

    @property
    def controller(self) -> LeaderRecord | None:
        """The controller that acts, as far as it has said who it is."""
        return holder(self._lock)

    @property
    def _lock(self) -> Path:
        return self.folder / "controller.lock"

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep others from changing what is wanted meanwhile. Raises `ConfigError` if it cannot be written."""
        deadline = SYSTEM_CLOCK.monotonic() + _LOCKED_S
        try:
            while (descriptor := locked(self.folder / "wanted.lock")) is None:
                if SYSTEM_CLOCK.monotonic() > deadline:
                    raise ConfigError(f"another process has been changing {self.folder} for {_LOCKED_S:g} s; try again")
                time.sleep(_TRY_AGAIN_S)
            try:
                yield
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written to: {error.strerror or error}") from error

    def _replace(self, name: str, value: Any) -> None:
        self._replace_bytes(name, msgspec.json.encode(value))

    def _replace_bytes(self, name: str, content: bytes) -> None:
        draft = self.folder / f"{name}.{os.getpid()}"
        try:
            draft.touch(mode=0o600)
            draft.write_bytes(content)
            draft.replace(self.folder / name)
        finally:
            draft.unlink(missing_ok=True)


def _following(before: DesiredState, fleet: DesiredFleet) -> DesiredState:
    earlier = before.earlier
    if fleet.revision != before.fleet.revision:
        kept = [one for one in earlier if one.revision != fleet.revision]
        earlier = (before.fleet, *kept)[: fleet.roll.history]
    return DesiredState(fleet, earlier, number=before.number + 1, place=before.place)


def _here() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # somebody has removed it
        return ""
