"""Records of this user's commands that serve on this machine, so that `kvferry`, `status` and `top` find them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.core.folders.state_folder import state_folder
from kvferry.fleet.processes.start_time import started_at


class RunningCommand(msgspec.Struct, frozen=True):
    """One command that serves. `started`: start time of its process, in ticks since boot; `since`: the same in seconds
    since 1970; `log`: its log file, empty if the log is not in a file; `instances`: names of its instances."""

    pid: int
    started: int
    command: str
    url: str
    since: float
    title: str = ""
    models: tuple[str, ...] = ()
    log: str = ""
    instances: tuple[str, ...] = ()


def running_commands() -> list[RunningCommand]:
    """The commands of this user that run, the oldest first."""
    return sorted(_read_all(), key=lambda record: record.since)


def _read_all() -> Iterator[RunningCommand]:
    try:
        paths = list(_folder().glob("*.json"))
    except (OSError, ConfigError):
        return
    for path in paths:
        try:
            with path.open("rb") as file:
                record = msgspec.json.decode(file.read(65536), type=RunningCommand)
            is_running = started_at(record.pid) == record.started
        except (OSError, ValueError, msgspec.MsgspecError):
            is_running = False
        if is_running:
            yield record
        else:  # its process was killed
            with suppress(OSError):
                path.unlink()


def write_record(
    command: str,
    url: str,
    title: str,
    models: tuple[str, ...],
    log: Path | None,
    instances: tuple[str, ...] = (),
) -> Path | None:
    """Record that this process serves at `url`. Returns the file, which must be removed at the end. None: no file can
    be written."""
    pid = os.getpid()
    record = RunningCommand(
        pid,
        started_at(pid),
        command,
        url,
        SYSTEM_CLOCK.wall(),
        title.partition("\n")[0],
        models,
        "" if log is None else str(log),
        instances,
    )
    with suppress(OSError, ConfigError):
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path, draft = folder / f"{pid}.json", folder / f"{pid}.new"
        draft.write_bytes(msgspec.json.encode(record))
        draft.replace(path)
        return path
    return None


def _folder() -> Path:
    return state_folder() / "running"


class RecordedDisplay:
    """A display that also records that its command serves, while it does."""

    def __init__(self, inner: Any, command: str, title: str, models: tuple[str, ...], log: Path | None) -> None:
        self._inner, self._about = inner, (command, title, models, log)
        self._path: Path | None = None
        self._names: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def members(self, urls: Mapping[str, str]) -> None:
        """The instances with their addresses."""
        self._names = tuple(urls)
        self._inner.members(urls)

    def up(self, url: str) -> None:
        """All processes serve now, at `url`."""
        command, title, models, log = self._about
        if self._path is None:
            self._path = write_record(command, url, title, models, log, self._names)
        self._inner.up(url)

    def close(self) -> None:
        """Remove the record."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()
        self._inner.close()
