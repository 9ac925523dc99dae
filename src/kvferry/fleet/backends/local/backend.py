"""The backend whose members are processes of this machine.

They may outlive the controller that started them (`outlives`), and are then found again by their folders. Otherwise
they end with it, however it ends. The routers of the fleet share one folder, and accept connections on sockets that
this process holds: a connection that comes while one of them dies waits for another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.fleet.backends.local.child import ChildProcess
from kvferry.fleet.backends.local.folder import MemberFolder, MemberRecord
from kvferry.fleet.backends.local.fork_server import ForkServer
from kvferry.fleet.backends.local.member import LocalMember
from kvferry.fleet.backends.local.spawning import discard_early_fork_process
from kvferry.fleet.backends.local.starting import Leash, open_streams, start_process
from kvferry.fleet.control.backend import BackendContext, FleetBackend, Member, MemberSpec, NotStarted, Recipe
from kvferry.fleet.processes.cpu import Cores, cores_of
from kvferry.fleet.processes.exit_reason import Ended
from kvferry.fleet.processes.health_check import serves
from kvferry.fleet.processes.process import ProcessSpec, RouterGroup
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole
from kvferry.http.registrar import Registrar
from kvferry.http.server.listen import reserve, start_listening

logger = logging.getLogger(__name__)


class LocalBackend(FleetBackend):
    """Runs members on this machine. Its folder should be in memory. Owns the fork server, the listening sockets, and
    each member's process while it runs."""

    poll_interval_s = 0.02
    written_s = 10.0
    """Maximum seconds after a controller's death until a process that it has just started has written its process
    id."""

    def __init__(self, context: BackendContext, *, fork_server: ForkServer | None = None) -> None:
        """`fork_server`: a fork server that is shared with another backend, whose owner closes it."""
        super().__init__(context)
        self.recipe: Recipe
        self._folder, self._watcher, self._outlives = context.folder, context.watcher, context.outlives
        self._members: dict[str, LocalMember] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._registrars: dict[str, tuple[Registrar, asyncio.Task[None]]] = {}
        self._listeners: list[socket.socket] = []
        self._addresses: list[tuple[str, int]] | None = None
        """The addresses of the listeners as in the spec; None: there are none yet."""
        self._fork_server = fork_server or ForkServer(is_tied=not context.outlives)
        self._owns_fork_server = fork_server is None

    # The backend's methods.

    def use(self, fleet: DesiredFleet) -> None:
        """Start members for this fleet from now on. Raises `ConfigError`. Running routers keep their sockets; later
        ones get the new address."""
        recipe = self.context.make_recipe(fleet)
        if self._addresses not in (None, [*recipe.addresses]):
            self._rebind([*recipe.addresses])
        self.recipe, self.num_routers = recipe, recipe.num_routers
        if recipe.num_instances < 2 or fleet.engine.kind != "kvferry":
            discard_early_fork_process()

    async def open(self) -> None:
        """Bind the routers' addresses, and find the members that an earlier controller has left."""
        self._members_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._group_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(self._members_folder.iterdir()):
            await self._find(MemberFolder(path))
        adopts = any(member.record.role == "router" for member in self._members.values())
        ports = self._bound_ports() if adopts else {}
        for host, port in self.recipe.addresses:
            bound = ports.get((host, port))
            self._listeners.append(reserve(host, bound or port, beside=bound is not None))
        self._addresses = list(self.recipe.addresses)
        self._write_ports()

    def members(self) -> list[Member]:
        """The members on this machine."""
        return [member.view for member in self._members.values()]

    async def start(self, member: MemberSpec) -> None:
        """Start a process. Raises `NotStarted`."""
        if member.name in self._members:
            raise NotStarted(f"{member.name} is there already")
        is_router = member.role == "router"
        number = 0 if is_router else self._free_number()
        recipe, cores = self.recipe, Cores()
        if not is_router:
            cores = cores_of(number, recipe.num_instances, recipe.cores)
        try:
            spec = self._router(member) if is_router else recipe.instance(member.name, member.role, number, cores)
        except OSError as error:
            raise NotStarted(f"cannot start a process: {error.strerror or error}") from error
        record = MemberRecord(
            name=member.name,
            role=member.role,
            revision=member.revision,
            unit=member.unit,
            number=number,
            cores=cores,
            is_foreign=spec.foreign is not None,
            url="" if spec.foreign is None else spec.foreign.url,
            bootstrap_port=spec.bootstrap_port,
        )
        folder = MemberFolder(self._members_folder / member.name)
        try:
            folder.make(record)
            local_member = LocalMember(folder, record, spec.foreign, self._watcher, self.changed.set)
            self._members[member.name] = local_member
            child = await self._launch(spec, cores, folder)
        except OSError as error:
            self._forget(member.name)
            raise NotStarted(f"cannot start a process: {error.strerror or error}") from error
        except BaseException:
            self._forget(member.name)
            raise
        self._watch(local_member, child)
        if local_member.is_stopping:  # the member was stopped before it had a process
            await local_member.stop(0.0)
            self._forget(member.name)
        else:
            self._register(spec, local_member)

    async def stop(self, name: str, grace_s: float) -> None:
        """Deregister a member from its routers, send it SIGTERM, and SIGKILL after the grace period."""
        member = self._members.get(name)
        if member is None:
            return
        member.is_stopping = True
        if (registered := self._registrars.pop(name, None)) is not None:
            registrar, task = registered
            begun = SYSTEM_CLOCK.monotonic()
            await _leave(registrar, grace_s, member.gone)
            grace_s = max(0.0, grace_s - (SYSTEM_CLOCK.monotonic() - begun))
            task.cancel()
        await member.stop(grace_s)
        if member.gone.is_set():
            self._forget(name)

    async def assign(self, name: str, role: MemberRole) -> None:
        """Record a member's role."""
        if (member := self._members.get(name)) is not None:
            member.assign(role=role)
            self.changed.set()

    def begin_shutdown(self) -> None:
        """Close the routers' addresses, so that no connection waits for a router that will not come."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def close(self) -> None:
        """End the remaining members, unless they outlive this process."""
        self.begin_shutdown()
        for _, task in self._registrars.values():
            task.cancel()
        if not self._outlives:
            self.kill_all()
            await asyncio.gather(*(self.stop(name, 0.0) for name in [*self._members]))
        tasks = [*self._watching.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._owns_fork_server:
            await self._fork_server.close()

    # Beyond a backend's methods.

    def kill_all(self) -> None:
        """End every process now."""
        for member in self._members.values():
            member.is_stopping = True
            if member.child is not None and not member.gone.is_set():
                member.child.kill()

    @property
    def _members_folder(self) -> Path:
        return self._folder / "members"

    @property
    def _group_folder(self) -> Path:
        return self._folder / "routers"

    def _rebind(self, addresses: list[tuple[str, int]]) -> None:
        listeners: list[socket.socket] = []
        before = dict(zip(self._addresses or (), self._listeners, strict=True))
        try:
            for host, port in addresses:
                bound = before.get((host, port))
                listeners.append(reserve(host, port) if bound is None else bound.dup())
        except ConfigError:
            for listener in listeners:
                listener.close()
            raise
        self.begin_shutdown()
        self._listeners, self._addresses = listeners, addresses
        self._write_ports()

    def _bound_ports(self) -> dict[tuple[str, int], int]:
        """The ports that an earlier controller has bound for its routers, by the addresses of the spec."""
        try:
            bound = msgspec.json.decode((self._folder / "ports").read_bytes(), type=list[tuple[str, int, int]])
        except (OSError, ValueError):
            return {address: address[1] for address in self.recipe.addresses if address[1]}
        return {(host, port): number for host, port, number in bound}

    def _write_ports(self) -> None:
        bound = zip(self._addresses or (), self._listeners, strict=True)
        draft = self._folder / "ports.new"
        draft.write_bytes(msgspec.json.encode([(*address, listener.getsockname()[1]) for address, listener in bound]))
        draft.replace(self._folder / "ports")

    def _free_number(self) -> int:
        used = {member.record.number for member in self._members.values() if member.record.role != "router"}
        return next(number for number in range(len(used) + 1) if number not in used)

    def _router(self, member: MemberSpec) -> ProcessSpec:
        self._group_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for listener in self._listeners:
            start_listening(listener)
        group = RouterGroup(self._group_folder, tuple(listener.fileno() for listener in self._listeners))
        return self.recipe.router_member(member.name, group)

    async def _launch(self, spec: ProcessSpec, cores: Cores, folder: MemberFolder) -> ChildProcess:
        if spec.forks and spec.settings is not None and (self.recipe.num_instances > 1 or not self._owns_fork_server):
            with open_streams(folder) as (log, messages):
                forked = await self._fork_server.fork(
                    spec.settings, spec.full_environment(), cores, log=log, ready=messages, process=folder.process
                )
            if forked is not None:
                return forked
        leash: Leash = "none" if self._outlives else "self" if spec.foreign is None else "group"
        return start_process(spec, cores, folder, leash)

    def _watch(self, member: LocalMember, child: ChildProcess) -> None:
        member.set_process(child)  # so that the member can be stopped before its task begins
        self._watching[member.record.name] = asyncio.create_task(member.watch(child))
        self.changed.set()

    def _forget(self, name: str) -> None:
        """Remove a member and its folder."""
        member = self._members.pop(name, None)
        if member is not None:
            if member.child is None:
                member.set_process(None)
            member.folder.remove()
            self._watching.pop(name, None)
            self.changed.set()

    async def _find(self, folder: MemberFolder) -> None:
        """Adopt a member of an earlier controller. If it has ended since then, it counts as ended."""
        record = folder.record()
        if record is None or record.name != folder.path.name:
            await _end_unknown(folder, self.written_s)
            return
        try:
            member = LocalMember(folder, record, None, self._watcher, self.changed.set)
        except OSError:
            await _end_unknown(folder, self.written_s)
            return
        member.adopt()
        self._members[record.name] = member
        deadline = SYSTEM_CLOCK.monotonic() + self.written_s
        while not folder.process.exists() and SYSTEM_CLOCK.monotonic() < deadline:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(self.poll_interval_s)
        child: ChildProcess | None = None
        with suppress(OSError):
            if (pid := folder.pid()) is not None:
                child = ChildProcess(pid, is_child=False)
                if folder.pid() != pid:  # it has just ended, and another process has its number
                    child.detach()
                    child = None
        if child is None:
            member.ended = Ended("ended while no controller was there")
            member.set_process(None)
        else:
            self._watch(member, child)

    def _register(self, spec: ProcessSpec, member: LocalMember) -> None:
        """Register the process at routers, unless it registers itself."""
        if spec.registrar is None:
            return
        url = member.record.url

        async def answers() -> bool:
            return await serves(url)

        registrar = Registrar(spec.registrar, spec.registrar.host, urlsplit(url).port or 0, answers)
        self._registrars[member.record.name] = registrar, asyncio.create_task(registrar.run())


async def _end_unknown(folder: MemberFolder, timeout_s: float) -> None:
    """End and remove a member whose folder cannot be read, since no controller could manage it."""
    if (pid := folder.pid()) is not None:
        with suppress(OSError):
            child = ChildProcess(pid, is_child=False)
            if folder.pid() == pid:
                child.kill()
                await child.wait(timeout_s)
            child.detach()
    if folder.path.is_dir() and not folder.path.is_symlink():
        folder.remove()
    else:
        folder.path.unlink(missing_ok=True)


async def _leave(registrar: Registrar, timeout_s: float, gone: asyncio.Event) -> None:
    """Deregister the member from the routers. Stops waiting when its process is gone."""
    leaving, ended = asyncio.create_task(registrar.leave(timeout_s)), asyncio.create_task(gone.wait())
    try:
        await asyncio.wait([leaving, ended], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (leaving, ended):
            task.cancel()
    if not leaving.done() or leaving.cancelled():
        await registrar.leave(0.0)


def memory_folder() -> str | None:
    """A folder in memory, for files that must not be on a disk (keys) or must be fast (a database). None: there is
    none."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
