"""One member of a fleet as a process: its command, its environment, and how it is known that it serves."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.fleet.processes.process_settings import ProcessSettings, handed_over
from kvferry.fleet.processes.ready import READY_FLAG, StartProgress
from kvferry.http.registrar import RegistrarConfig

_LONGEST_FOLDER = 64
"""Bytes of a folder's name that leave room for those of sockets, of 107 in all."""
PROGRAM = (sys.executable, "-m", "kvferry.cli.main")
"""The command line, for a process that does what a command does."""
MEMBER = (sys.executable, "-m", "kvferry.fleet.processes.member_main")
"""A process of kvferry's that is started with its settings; what follows is its title."""
SETTINGS_FLAG = "--settings-fd"


@dataclass(frozen=True)
class ExternalServer:
    """A program that is not kvferry's and does not speak the start protocol.

    It serves when GET `url`/health is answered with 200. `steps`: patterns of log lines, and the progress that they
    mean. `sockets_in`: the variable that says where its processes put their sockets; they are then removed with what
    else is kept of the member, however it ends.
    """

    url: str
    steps: tuple[tuple[re.Pattern[str], StartProgress], ...] = ()
    sockets_in: str = ""

    def progress_of(self, line: str) -> StartProgress | None:
        """The progress that a log line means, if any."""
        return next((progress for pattern, progress in self.steps if pattern.search(line)), None)


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start. `environment` is added to the backend's own, without `hidden`.

    `settings`: those of a process of kvferry's, which are handed over when it is started (`started_with`). `foreign`:
    set for a program that is not kvferry's; its children may outlive it. `forks`: it has `settings` and imports what
    every instance imports, so it may be forked. `registrar`: routers at which the backend
    registers it, if it does not do so itself. `descriptors`: files that it inherits. `bootstrap_port`: that of its
    Mooncake bootstrap server.
    """

    name: str
    command: tuple[str, ...]
    settings: ProcessSettings | None = field(default=None, kw_only=True)
    environment: Mapping[str, str] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    foreign: ExternalServer | None = None
    registrar: RegistrarConfig | None = None
    forks: bool = False
    descriptors: tuple[int, ...] = ()
    bootstrap_port: int | None = None

    @contextmanager
    def started_with(self, messages: int) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
        """The command line that starts it now, and the descriptors that the process must inherit under their numbers.
        `messages`: one that takes its start messages. Raises `OSError`."""
        if self.foreign is not None:
            yield self.command, self.descriptors
            return
        ready = (READY_FLAG, str(messages))
        if self.settings is None:
            yield (*self.command, *ready), (messages, *self.descriptors)
            return
        with handed_over(self.settings) as settings:
            command = (*self.command, SETTINGS_FLAG, str(settings), *ready)
            yield command, (settings, messages, *self.descriptors)

    def full_environment(self, folder: Path | None = None) -> dict[str, str]:
        """The child's environment. Output is unbuffered, so that the last line before a crash is seen. `folder`: the
        member's own, for sockets, unless the user names another one, or its name is too long for that."""
        inherited = {name: value for name, value in os.environ.items() if name not in self.hidden}
        variable = "" if self.foreign is None else self.foreign.sockets_in
        if variable and folder is not None and len(os.fsencode(folder)) <= _LONGEST_FOLDER:
            inherited.setdefault(variable, str(folder))
        return {**inherited, "PYTHONUNBUFFERED": "1", **self.environment}


@dataclass(frozen=True)
class RouterGroup:
    """Shared by the routers of one port: a folder that only their user can read, and the descriptors of the sockets
    they accept connections on. Both are the backend's, and outlive each of them."""

    folder: Path
    listeners: tuple[int, ...]
