"""One member of a fleet as a process: its command, its environment, and how to find out that it serves."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.fleet.processes.process_settings import ProcessSettings, settings_descriptor
from kvferry.fleet.processes.ready import READY_FLAG, StartProgress
from kvferry.http.registrar import RegistrarConfig

_LONGEST_FOLDER = 64
"""Maximum bytes of a folder's name, so that paths of sockets in it have at most 107 bytes."""
PROGRAM = (sys.executable, "-m", "kvferry.cli.main")
"""The beginning of a command line that runs a kvferry command."""
MEMBER = (sys.executable, "-m", "kvferry.fleet.processes.member_main")
"""The beginning of the command line of a process that gets its settings in a document. Its title follows."""
SETTINGS_FLAG = "--settings-fd"


@dataclass(frozen=True)
class ExternalServer:
    """A program that is not kvferry's and does not speak the start protocol.

    It serves when GET `url`/health is answered with 200. `steps`: patterns of log lines, and the progress that they
    mean. `sockets_in`: the variable that names the folder for its sockets, so that they are removed with the member's
    folder, however the member ends.
    """

    url: str
    steps: tuple[tuple[re.Pattern[str], StartProgress], ...] = ()
    sockets_in: str = ""

    def progress_of(self, line: str) -> StartProgress | None:
        """The progress that a log line stands for; None: none."""
        return next((progress for pattern, progress in self.steps if pattern.search(line)), None)


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start. `environment` is added to the backend's own, without `hidden`.

    `settings`: settings of a process of kvferry, which it gets when it is started (`started_with`). `foreign`: set for
    a program that is not kvferry's; its children may outlive it. `forks`: True if it has `settings` and imports the
    same as every instance, so that it may be forked. `registrar`: routers at which the backend registers it, if it does
    not register itself. `descriptors`: descriptors that it inherits. `bootstrap_port`: port of its Mooncake bootstrap
    server.
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
        """The command line with which to start it now, and the descriptors that the process must inherit under the same
        numbers. `messages`: the descriptor for its start messages. Raises `OSError`."""
        if self.foreign is not None:
            yield self.command, self.descriptors
            return
        ready = (READY_FLAG, str(messages))
        if self.settings is None:
            yield (*self.command, *ready), (messages, *self.descriptors)
            return
        with settings_descriptor(self.settings) as settings:
            command = (*self.command, SETTINGS_FLAG, str(settings), *ready)
            yield command, (settings, messages, *self.descriptors)

    def full_environment(self, folder: Path | None = None) -> dict[str, str]:
        """The child's environment. Output is unbuffered, so that the last line before a crash is written. `folder`: the
        member's folder, which is used for sockets unless the user names another one, or its name is too long."""
        inherited = {name: value for name, value in os.environ.items() if name not in self.hidden}
        variable = "" if self.foreign is None else self.foreign.sockets_in
        if variable and folder is not None and len(os.fsencode(folder)) <= _LONGEST_FOLDER:
            inherited.setdefault(variable, str(folder))
        return {**inherited, "PYTHONUNBUFFERED": "1", **self.environment}


@dataclass(frozen=True)
class RouterGroup:
    """Shared by the routers of one port: a folder that only their user can read, and the descriptors of the sockets
    they accept connections on. The backend owns both; they outlive each router."""

    folder: Path
    listeners: tuple[int, ...]
