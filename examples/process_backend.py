"""A backend of fleets of one's own: members are processes of this machine, and each has a file that says what it is.

    [backend]
    kind = "process_backend:ProcessBackend"      # PYTHONPATH=examples kvferry fleet apply SPEC
    options = { nice = 5 }

`test_process_backend.py` runs the contract suite on it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from kvferry.core.errors import ConfigError
from kvferry.core.settings.options import read_options
from kvferry.fleet.control.backend import BackendContext, FleetBackend, Member, MemberSpec, MemberState, NotStarted
from kvferry.fleet.processes.process import ProcessSpec, RouterGroup
from kvferry.fleet.processes.ready import InstanceReady, start_messages
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole
from kvferry.http.server.listen import BACKLOG, reserve

ERROR, EXIT_WRONG = "kvferry: error: ", 2
"""How a process of kvferry's says that its settings are wrong."""
LOOK_S = 0.05


class Options(msgspec.Struct, frozen=True):
    """`[backend.options]`."""

    nice: int = 0
    """Niceness of the members."""


class Kept(msgspec.Struct, frozen=True):
    """A member's file. `pid` and `started` name its process: a number alone may be another's later."""

    member: Member
    number: int
    pid: int
    started: float


class ProcessBackend(FleetBackend):
    """Owns the routers' sockets; a task looks at what the members write, and whether they run."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._kept: dict[str, Kept] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        """Those that this process has started: their exit codes can be known."""

    def use(self, fleet: DesiredFleet) -> None:
        if fleet.engine.kind != "kvferry":
            raise ConfigError("engine.kind: this backend runs kvferry's own engine, which says when it serves")
        self._nice = read_options(Options, fleet.backend.options, "backend.options").nice
        self._recipe = self.context.make_recipe(fleet)
        self.num_routers = self._recipe.num_routers

    async def open(self) -> None:
        for path in self.context.folder.glob("*.json"):
            self._kept[path.stem] = msgspec.json.decode(path.read_bytes(), type=Kept)
        self._listeners = [reserve(host, port, beside=bool(self._kept)) for host, port in self._recipe.addresses]
        self._looking = asyncio.create_task(self._look())

    def members(self) -> list[Member]:
        return [one.member for one in self._kept.values()]

    async def start(self, member: MemberSpec) -> None:
        name, used = member.name, {one.number for one in self._kept.values()}
        if name in self._kept:
            raise NotStarted(f"{name} is there already")
        number = next(one for one in range(len(used) + 1) if one not in used)
        spec = self._router(name) if member.role == "router" else self._recipe.instance(name, member.role, number, ())
        with (
            self._file(name, "log").open("wb") as log,
            self._file(name, "says").open("wb") as says,
            spec.started_with(says.fileno()) as (command, descriptors),
        ):
            child = self._children[name] = subprocess.Popen(  # noqa: ASYNC220 - it takes a few milliseconds
                ["/usr/bin/nice", f"-n{self._nice}", *command],
                env=spec.full_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=descriptors,
                start_new_session=True,
            )
        here = Member(name, member.role, member.revision, MemberState.STARTING, member.unit)
        self._keep(Kept(here, number, child.pid, psutil.Process(child.pid).create_time()))

    async def stop(self, name: str, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        for number, until in ((signal.SIGTERM, deadline), (signal.SIGKILL, deadline + 5.0)):
            if name in self._kept and self._runs(name) and time.monotonic() < until:
                with suppress(ProcessLookupError):  # it has just ended
                    os.killpg(self._kept[name].pid, number)
            while name in self._kept and self._runs(name) and time.monotonic() < until:  # noqa: ASYNC110 - processes tell nobody
                await asyncio.sleep(LOOK_S)
        if self._kept.pop(name, None) is not None:
            self._children.pop(name, None)
            for kind in ("json", "log", "says"):
                self._file(name, kind).unlink()
            self.changed.set()

    async def assign(self, name: str, role: MemberRole) -> None:
        if name in self._kept:
            self._becomes(name, role=role)

    async def close(self) -> None:
        if not self.context.outlives:
            await asyncio.gather(*(self.stop(name, 0.0) for name in self._kept))
        self._looking.cancel()
        for listener in self._listeners:
            listener.close()

    # What is known of them.

    async def _look(self) -> None:
        while True:
            for name, one in list(self._kept.items()):
                if one.member.state is not MemberState.ENDED:
                    runs = self._runs(name)  # before what it wrote is read, which then is all
                    self._read(name)
                    if not runs:
                        self._ended(name)
            await asyncio.sleep(LOOK_S)

    def _read(self, name: str) -> None:
        """It serves once it says where."""
        for message in start_messages().feed(self._file(name, "says").read_bytes()):
            if isinstance(message, InstanceReady) and self._kept[name].member.state is MemberState.STARTING:
                self._becomes(name, state=MemberState.SERVING, url=message.url, health_url=message.health_url)
                self.context.watcher.ready(name, message.url)

    def _ended(self, name: str) -> None:
        child, lines = self._children.get(name), self._file(name, "log").read_text(errors="replace").splitlines()[-20:]
        code = None if child is None else child.poll()
        wrong = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR) and code == EXIT_WRONG]
        reason = wrong[-1] if wrong else "ended" if code is None else f"ended with exit code {code}"
        told = {"is_misconfigured": bool(wrong), "last_lines": tuple(lines), "url": ""}
        self._becomes(name, state=MemberState.ENDED, reason=reason, **told)

    def _runs(self, name: str) -> bool:
        if name in self._children:
            return self._children[name].poll() is None
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._kept[name].pid)
            return bool(process.create_time() == self._kept[name].started) and process.status() != psutil.STATUS_ZOMBIE
        return False

    def _router(self, name: str) -> ProcessSpec:
        for listener in self._listeners:
            listener.listen(BACKLOG)
        group = RouterGroup(self.context.folder, tuple(one.fileno() for one in self._listeners))
        return self._recipe.router_member(name, group)

    def _becomes(self, name: str, **changes: Any) -> None:
        kept = self._kept[name]
        self._keep(msgspec.structs.replace(kept, member=replace(kept.member, **changes)))

    def _keep(self, kept: Kept) -> None:
        self._kept[kept.member.name] = kept
        self._file(kept.member.name, "new").write_bytes(msgspec.json.encode(kept))
        self._file(kept.member.name, "new").replace(self._file(kept.member.name, "json"))
        self.changed.set()

    def _file(self, name: str, kind: str) -> Path:
        return self.context.folder / f"{name}.{kind}"
