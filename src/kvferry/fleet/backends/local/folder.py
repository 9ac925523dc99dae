"""The folder of a member of a fleet on this machine; everything in it outlives the controller.

    about      its record, with its URLs; written by the controller
    process    number and start time of its process; written by the process, before it becomes the member
    messages   the start protocol (`fleet.processes.ready`), appended by the member
    log        its output, appended by the member

So a controller that dies at any moment leaves a member that the next controller finds.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvferry.fleet.processes.start_time import started_at
from kvferry.fleet.spec.fleet_spec import MemberRole

_DELETED = " (deleted)"
"""The kernel appends this to the name of an open file that was removed."""


class MemberRecord(msgspec.Struct, frozen=True):
    """The record of a member. `number`: a small number, unique among the fleet's instances on this machine.
    `is_foreign`: True for a program that is not kvferry's, which answers at `url` once it serves. Of other members,
    `url` is empty until they serve."""

    name: str
    role: MemberRole
    revision: str
    unit: str
    number: int
    cores: tuple[int, ...]
    is_foreign: bool = False
    url: str = ""
    health_url: str = ""
    bootstrap_port: int | None = None


class MemberFolder:
    """The folder of one member. Reads of missing or malformed files return None."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def messages(self) -> Path:
        """The member's start messages."""
        return self.path / "messages"

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.path / "log"

    @property
    def process(self) -> Path:
        """The file in which its process writes its process id and start time."""
        return self.path / "process"

    def make(self, record: MemberRecord) -> None:
        """Create the folder. Raises `OSError`."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700, parents=True)
        self.messages.touch()
        self.log.touch()
        self.write(record)

    def write(self, record: MemberRecord) -> None:
        """Replace its record. Raises `OSError`."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been removed: see `keep`
        draft = self.path / "about.new"
        draft.write_bytes(msgspec.json.encode(record))
        draft.replace(self.path / "about")

    def record(self) -> MemberRecord | None:
        """The record that the controller wrote."""
        try:
            return msgspec.json.decode((self.path / "about").read_bytes(), type=MemberRecord)
        except (OSError, ValueError):
            return None

    def pid(self) -> int | None:
        """The id of its process, if the process runs. The process must have the recorded start time and write its
        output to this member's log, because the file alone could name another process."""
        try:
            pid, started = map(int, self.process.read_text(encoding="utf-8").split())
            if started_at(pid) != started:
                return None
            output, log = str(Path(f"/proc/{pid}/fd/1").readlink()), os.path.realpath(self.log)
        except (OSError, ValueError):
            return None
        return pid if output in (log, f"{log}{_DELETED}") else None

    def keep(self, record: MemberRecord, pid: int) -> None:
        """Write all files again if they were removed: some systems remove a user's files in memory when the user logs
        out. Raises `OSError`."""
        if not (self.path / "about").exists():
            self.write(record)
        for path in (self.messages, self.log):
            path.touch()
        if not self.process.exists():
            draft = self.path / "process.new"
            draft.write_text(f"{pid} {started_at(pid)}\n", encoding="utf-8")
            draft.replace(self.process)

    def remove(self) -> None:
        """Forget the member."""
        shutil.rmtree(self.path, ignore_errors=True)


class FileTail:
    """Reads data that is appended to a file. `bounded`: truncate the file when it gets large."""

    max_log_bytes = 16 * 2**20
    """Once this much of a log has been read, the file is truncated."""
    max_line = 64 * 1024
    """Maximum bytes of a line; longer lines are divided."""

    def __init__(self, path: Path, *, bounded: bool = False) -> None:
        """Raises `OSError`."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._bounded, self._offset, self._rest = bounded, 0, b""

    def chunks(self) -> Iterator[bytes]:
        """The new data, in chunks of at most `max_line`."""
        while chunk := os.pread(self._descriptor, self.max_line, self._offset):
            self._offset += len(chunk)
            yield chunk
        if self._bounded and self._offset > self.max_log_bytes:
            os.ftruncate(self._descriptor, 0)
            self._offset = 0

    def lines(self, *, to_the_end: bool = False) -> Iterator[bytes]:
        """The complete new lines; with `to_the_end`, also a last one without its end of line."""
        for chunk in self.chunks():
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            yield from whole
            if len(self._rest) > self.max_line:
                yield self._rest
                self._rest = b""
        if to_the_end and self._rest:
            yield self._rest
            self._rest = b""

    def skip(self) -> None:
        """Skip the present content."""
        self._offset = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
