"""The files of a fleet that outlive its controllers: its desired state, earlier revisions, and each step taken.

    wanted.json       the desired state and its earlier revisions; written by commands, under a lock
    history.jsonl     one step or event a line, the oldest first; bounded
    status.json       the status that the controller has observed last
    scaled.json       the desired counts of a fleet with [scale]
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
from kvferry.fleet.control.file_leadership import FileLeadership, LeaderRecord, holder, is_held, lock_file
from kvferry.fleet.scaling.scaler import ScalingMemory
from kvferry.fleet.spec.fleet_spec import DesiredFleet

logger = logging.getLogger(__name__)

_LOCKED_S, _RETRY_INTERVAL_S = 5.0, 0.02
"""Maximum seconds to wait for another process that changes the desired state, which takes milliseconds; seconds between
two attempts to lock it."""


class DesiredState(msgspec.Struct, frozen=True):
    """The desired state of a fleet. `earlier`: its earlier specs, the last one first. `deleted`: True if the fleet must
    end. `number` grows with each change. `source`: the file that a controller follows, as `kvferry fleet run` does.
    `directory`: the folder that the spec was applied in, where its relative paths begin."""

    fleet: DesiredFleet
    earlier: tuple[DesiredFleet, ...] = ()
    deleted: bool = False
    number: int = 0
    source: str = ""
    directory: str = msgspec.field(default="", name="place")
    """Its name in the file is `place`, as in files of earlier versions."""


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step that was taken, or a change of a member's state. `at`: seconds since 1970."""

    at: float
    what: str
    name: str = ""
    reason: str = msgspec.field(default="", name="why")


class FleetStatus(msgspec.Struct, frozen=True):
    """The status that the controller has observed last. `url`: the URL for clients; empty until they are served.
    `trouble`: the reasons why the fleet does not reach its desired state. `passing`: True if all of these are problems
    of the backend, such as a cluster that does not answer, and end when it recovers."""

    at: float
    pid: int
    """Process id of that controller."""
    number: int
    url: str
    roles: dict[str, RoleStatus]
    members: tuple[MemberStatus, ...]
    trouble: tuple[str, ...] = ()
    passing: bool = False
    decided: str = ""
    """The last decision of `[scale]`, in words."""
    settled: bool = False
    started: int = 0
    """The start time of that controller's process, as in `started_at`."""


class Ledger:
    """The files of one fleet, in a folder that only its user can read: settings may contain keys."""

    max_history_bytes = 4 * 2**20
    """Maximum bytes of the history. If it is larger, its older half is removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def exists(self) -> bool:
        """True if this fleet was applied."""
        return (self.folder / "wanted.json").exists()

    # The desired state.

    def desired_state(self) -> DesiredState:
        """The desired state. Raises `ConfigError` if there is no such fleet, or its file cannot be read."""
        try:
            return msgspec.json.decode((self.folder / "wanted.json").read_bytes(), type=DesiredState)
        except FileNotFoundError as error:
            raise ConfigError(f"there is no fleet in {self.folder}; `kvferry fleet apply` makes one") from error
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self.folder / 'wanted.json'} cannot be read: {error}; apply the fleet's spec again"
            ) from error

    def apply(self, fleet: DesiredFleet, source: str = "") -> DesiredState:
        """Set the desired fleet. If its revision differs, the previous one becomes an earlier revision. A previous
        state that cannot be read is renamed."""
        with self._changing():
            before = self._previous_state()
            if isinstance(before, int) or before.deleted:
                new = DesiredState(fleet, number=1 + (before if isinstance(before, int) else before.number))
            else:
                new = _next_state(before, fleet)
            new = msgspec.structs.replace(new, source=source, directory=_working_directory())
            self._replace("wanted.json", new)
        return new

    def change(self, change: Callable[[DesiredState], DesiredFleet]) -> DesiredState:
        """Set the desired fleet to the result of `change`, which is called with the current state, under the lock.
        Raises `ConfigError` if there is no fleet, or it is to end."""
        with self._changing():
            before = self.desired_state()
            if before.deleted:
                raise ConfigError(
                    f"{before.fleet.name} is ending; once it has ended, `kvferry fleet apply` makes it anew"
                )
            new = _next_state(before, change(before))
            self._replace("wanted.json", new)
        return new

    def delete(self) -> None:
        """Record that the fleet must end."""
        with self._changing():
            before = self.desired_state()
            self._replace("wanted.json", msgspec.structs.replace(before, deleted=True, number=before.number + 1))

    def remove(self, *others: Path) -> bool:
        """Remove all files of a fleet that has ended, and these folders too. False: a controller still leads, or the
        fleet was applied again."""
        with self._changing():
            leadership = self.try_acquire()
            if leadership is None:
                return False
            try:
                if not self.desired_state().deleted:
                    return False
                for folder in (*others, self.folder):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                leadership.close()
        return True

    def _previous_state(self) -> DesiredState | int:
        """The previous desired state. If there is none, or it cannot be read: the number of its last change."""
        if not self.exists:
            return 0
        try:
            return self.desired_state()
        except ConfigError:
            (self.folder / "wanted.json").replace(self.folder / "wanted.json.unreadable")
            seen = self.status()
            return 0 if seen is None else seen.number

    # The history and the status.

    def record(self, action: str, name: str = "", reason: str = "") -> None:
        """Append an event to the history. If this fails, it is only logged: a history that cannot be written must not
        prevent steps."""
        logger.debug("%s", " ".join(filter(None, (action, name, reason))))
        try:
            self._append(action, name, reason)
        except OSError as error:
            logger.warning("the history cannot be written: %s", error)

    def _append(self, action: str, name: str, reason: str) -> None:
        path = self.folder / "history.jsonl"
        line = msgspec.json.encode(Event(SYSTEM_CLOCK.wall(), action, name, reason)) + b"\n"
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line)
            is_long = os.fstat(descriptor).st_size > self.max_history_bytes
        finally:
            os.close(descriptor)
        if is_long:
            text = path.read_bytes()
            self._replace_bytes("history.jsonl", text[text.index(b"\n", len(text) // 2) + 1 :])

    def history(self) -> Iterator[Event]:
        """All events in the history, the oldest first. Lines that cannot be read are skipped."""
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
        """Replace the status."""
        self._replace("status.json", status)

    def write_scaled_counts(self, memory: ScalingMemory) -> None:
        """Replace the decided counts."""
        self._replace("scaled.json", memory)

    def remove_scaled_counts(self) -> None:
        """Remove the decided counts of a fleet without `[scale]`; a later `[scale]` begins with the spec's counts."""
        with suppress(OSError):
            (self.folder / "scaled.json").unlink()

    def scaled_counts(self) -> ScalingMemory | None:
        """The counts that `[scale]` has decided last; None: there are none."""
        try:
            return msgspec.json.decode((self.folder / "scaled.json").read_bytes(), type=ScalingMemory)
        except (OSError, ValueError):
            return None

    def status(self) -> FleetStatus | None:
        """The status that a controller has observed last; None: there was none yet."""
        try:
            return msgspec.json.decode((self.folder / "status.json").read_bytes(), type=FleetStatus)
        except (OSError, ValueError):
            return None

    def current_status(self) -> FleetStatus | None:
        """The status, if its controller still manages the fleet; None: the last status may be outdated."""
        seen, holder = self.status(), self.controller
        if seen is None or holder is None or holder.hangs:
            return None
        return seen if (seen.pid, seen.started) == (holder.pid, holder.start_ticks) else None

    # The leadership.

    def leadership(self, *, follows_file: bool = False) -> FileLeadership:
        """The leadership on this machine, not acquired yet. `follows_file`: as in `LeaderRecord`."""
        return FileLeadership(self._lock, follows_file=follows_file)

    def try_acquire(self) -> FileLeadership | None:
        """The acquired leadership; None: another controller has it. Raises `OSError`."""
        leadership = self.leadership()
        return leadership if leadership.try_lock() else None

    @property
    def has_controller(self) -> bool:
        """True if a controller leads the fleet."""
        return is_held(self._lock)

    @property
    def controller(self) -> LeaderRecord | None:
        """The controller that leads; None: there is none, or it has not written its record yet."""
        return holder(self._lock)

    @property
    def _lock(self) -> Path:
        return self.folder / "controller.lock"

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Lock the desired state against other writers. Raises `ConfigError` if it cannot be written."""
        deadline = SYSTEM_CLOCK.monotonic() + _LOCKED_S
        try:
            while (descriptor := lock_file(self.folder / "wanted.lock")) is None:
                if SYSTEM_CLOCK.monotonic() > deadline:
                    raise ConfigError(f"another process has been changing {self.folder} for {_LOCKED_S:g} s; try again")
                time.sleep(_RETRY_INTERVAL_S)
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


def _next_state(before: DesiredState, fleet: DesiredFleet) -> DesiredState:
    earlier = before.earlier
    if fleet.revision != before.fleet.revision:
        others = [fleet_before for fleet_before in earlier if fleet_before.revision != fleet.revision]
        earlier = (before.fleet, *others)[: fleet.roll.history]
    return DesiredState(fleet, earlier, number=before.number + 1, directory=before.directory)


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return ""
