"""The actor, in a process of Ray's, which owns one member's process.

The member is a child that the kernel kills when this process ends, for any reason, so no member is left without an
owner. When the member ends first, this process stays, and reports the reason. Its controller may come and go. An
instance whose ranks are on several nodes has an actor for each rank; the actor of rank 0 owns the others. They have no
names and no lifetime of their own: Ray ends them when their owner ends, for any reason, and each ends with its process.
So an instance lives or ends as a whole.

Members have in-memory folders on their node. Later actors of the same user remove what a killed one has left.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import ray
from ray import get_runtime_context
from ray.exceptions import ActorUnavailableError, RayError
from ray.util import get_node_ip_address

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError, KvferryError
from kvferry.core.folders.cache_dirs import user_runtime_dirs
from kvferry.core.folders.private_folder import private_folder
from kvferry.core.keys import Verifier
from kvferry.core.settings.environment import AUTH_TOKEN, INSTANCE_NAME
from kvferry.fleet.backends.local.backend import memory_folder
from kvferry.fleet.backends.local.child import ChildProcess
from kvferry.fleet.backends.local.folder import MemberFolder, MemberRecord
from kvferry.fleet.backends.local.member import LocalMember
from kvferry.fleet.backends.local.starting import start_process
from kvferry.fleet.backends.ray.address import SharedAddress, owners
from kvferry.fleet.backends.ray.connection import in_thread, result_of
from kvferry.fleet.backends.ray.messages import (
    ActorIdentity,
    LogLine,
    MemberEvent,
    MemberProgress,
    MemberUpdate,
    StartRequest,
)
from kvferry.fleet.backends.ray.placing import strategy_of
from kvferry.fleet.backends.ray.priority import reset_priority
from kvferry.fleet.control.backend import Member, MemberState
from kvferry.fleet.processes.cpu import thread_variables
from kvferry.fleet.processes.process import MEMBER, ProcessSpec, RouterGroup
from kvferry.fleet.processes.process_settings import InstanceProcess, JoiningRankProcess, with_values
from kvferry.fleet.processes.start_time import started_at
from kvferry.fleet.spec.fleet_settings import log_config
from kvferry.fleet.spec.fleet_spec import MemberRole
from kvferry.http.server.listen import authority

_ANY = ("0.0.0.0", "::")

_ROUTERS = "routers-"
_NEW_S = 60.0
"""Age in seconds up to which a folder of routers may be new, and about to be used."""


class MemberActor:
    """Owns the member's process and folder. All methods run on one event loop."""

    max_events = 1000
    stopped_s = 15.0
    """Maximum seconds in which the ranks of a member end with it."""
    rank_lost_s = 10.0
    """Seconds in which a member may end by itself, with its own reason, after one of its ranks has ended."""
    update_wait_s = 30.0
    """Maximum seconds for which `next_update` waits for a change."""
    request_wait_s = 240.0
    """Seconds after its start within which an actor must get its request: a controller that died in between never sends
    it. Decoding the request imports the recipe, which takes a minute on a machine without idle cores."""

    def __init__(self) -> None:
        reset_priority()
        self._idle_timer = threading.Timer(self.request_wait_s, os._exit, (1,))
        self._idle_timer.daemon = True
        self._idle_timer.start()
        self._request: StartRequest | None = None
        self._verifier: Verifier | None = None
        self._failure: Member | None = None
        self._member: LocalMember | None = None
        self._address: SharedAddress | None = None
        self._ranks: _RankActors | None = None
        self._held: socket.socket | None = None
        """Reserves the port at which further ranks join, if there are some in actors of their own."""
        self._lost_rank_reason = ""
        """The reason why one of its ranks has ended, for which the member was ended."""
        self._has_wrong_rank = False
        self._watching: asyncio.Task[None] | None = None
        self._events: deque[tuple[int, MemberEvent]] = deque(maxlen=self.max_events)
        self._num_changes = 0
        self._changed = asyncio.Event()

    async def begin(self, request: StartRequest) -> None:
        """Start the member. If this fails, the member counts as ended."""
        self._idle_timer.cancel()
        self._request = request
        self._verifier = Verifier(request.token, request.member.name)
        try:
            spec, record, folder = await self._prepare(request)
            self._member = LocalMember(folder, record, spec.foreign, self, self._wake)
            child = start_process(spec, (), folder, leash="self" if spec.foreign is None else "group")
        except (KvferryError, OSError) as error:
            member = request.member
            if self._member is not None:
                self._member.set_process(None)
            self._failure = Member(
                member.name,
                member.role,
                member.revision,
                MemberState.ENDED,
                unit=member.unit,
                reason=str(error),
                is_misconfigured=isinstance(error, ConfigError),
            )
        else:
            self._member.set_process(child)
            self._watching = asyncio.create_task(self._run(self._member, child))
            if self._held is not None:
                self._ranks = _RankActors(lambda text: self.line("", text), self._on_rank_lost)
                self._ranks.start(request, _address_of(self._held))
        self._wake()

    async def who(self, nonce: str) -> ActorIdentity | None:
        """The identity of this actor; None: it has no request."""
        if self._request is None or self._verifier is None:
            return None
        answer = msgspec.json.encode(self._verifier.answer(nonce))
        return ActorIdentity(
            answer, self._request.number, self._request.bundle, MemberUpdate(self._view(), (), self._num_changes)
        )

    async def next_update(self, number: int) -> MemberUpdate:
        """The update since the one with this number; waits for a change, up to `update_wait_s`."""
        if number == self._num_changes:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.update_wait_s):
                    await self._changed.wait()
        events = tuple(event for at, event in self._events if at > number)
        return MemberUpdate(self._view(), events, self._num_changes)

    async def assign(self, role: MemberRole) -> None:
        """Record the member's role."""
        if self._member is not None:
            self._member.assign(role=role)
            self._wake()

    async def stop(self, grace_s: float) -> None:
        """End the member; returns when it is gone."""
        if self._member is not None:
            if self._address is not None:
                self._address.close()
            await self._member.stop(grace_s)
            if self._watching is not None:
                await asyncio.wait([self._watching], timeout=self.stopped_s)
            shutil.rmtree(self._member.folder.path.parent, ignore_errors=True)

    # The member's output (`Watcher`).

    def line(self, name: str, text: str) -> None:
        """Record a line of its log for the next update."""
        self._record_event(LogLine(text))

    def progress(self, name: str, phase: str, fraction: float) -> None:
        """Record the progress of its start for the next update."""
        self._record_event(MemberProgress(phase, fraction))

    def ready(self, name: str, url: str) -> None:
        """Part of the view."""

    def _record_event(self, event: MemberEvent) -> None:
        self._events.append((self._num_changes + 1, event))
        self._wake()

    def _wake(self) -> None:
        self._num_changes += 1
        self._changed.set()

    # The member.

    async def _run(self, member: LocalMember, child: ChildProcess) -> None:
        await member.watch(child)
        if self._ranks is not None:
            await self._ranks.end()
        if self._held is not None:
            self._held.close()

    async def _on_rank_lost(self, reason: str, is_misconfigured: bool) -> None:
        """The member notices by itself, unless it waits for a rank that does not come."""
        assert self._member is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(self.rank_lost_s):
                await self._member.gone.wait()
        if not self._member.gone.is_set() and not self._member.is_stopping:
            self._lost_rank_reason, self._has_wrong_rank = reason, is_misconfigured
            await self._member.stop(0.0)

    async def _prepare(self, request: StartRequest) -> tuple[ProcessSpec, MemberRecord, MemberFolder]:
        """The member's process, record and folder on this node. Raises `KvferryError` or `OSError`."""
        member, root = request.member, _own_folder()
        if request.rank:
            member = replace(member, name=f"{member.name}.rank-{request.rank}")
        recipe = request.make_recipe(request.fleet).on_node(node_address())
        if request.rank:
            spec = _rank_process(member.name, request)
        elif member.role == "router":
            context = get_runtime_context()
            group = _routers_folder(request.namespace, context.gcs_address, context.get_node_id())
            self._address = SharedAddress(group, _own_name())
            listeners = await self._address.open(recipe.addresses)
            spec = recipe.router_member(member.name, RouterGroup(group, listeners))
        else:
            spec = recipe.instance(member.name, member.role, request.number, ())
            if spec.registrar is not None:
                raise ConfigError("--register: on Ray, servers of vLLM are not registered at other routers")
            if request.bundle is not None and len(request.bundle.indices) > 1:
                self._held = _hold_port(node_address())
                spec = _with_ranks_at(spec, _address_of(self._held))
            spec = replace(spec, environment={**spec.environment, **_threads(request)})
        record = MemberRecord(
            name=member.name,
            role=member.role,
            revision=member.revision,
            unit=member.unit,
            number=request.number,
            cores=(),
            is_foreign=spec.foreign is not None,
            url="" if spec.foreign is None else spec.foreign.url,
            bootstrap_port=spec.bootstrap_port,
        )
        folder = MemberFolder(root / "member")
        folder.make(record)
        return spec, record, folder

    def _view(self) -> Member:
        if self._failure is not None or self._member is None:
            assert self._failure is not None
            return self._failure
        seen = self._member.view
        if self._lost_rank_reason:
            seen = replace(seen, reason=self._lost_rank_reason, is_misconfigured=self._has_wrong_rank)
        url = reachable(seen.url, node_address())
        # The member's health is checked from now on, so that a node that hangs at once is detected too.
        return replace(seen, url=url, health_url=seen.health_url or url)


def _address_of(held: socket.socket) -> str:
    return authority(*held.getsockname()[:2])


def _threads(request: StartRequest) -> dict[str, str]:
    return thread_variables(int(request.needs.cpus))


def _rank_process(name: str, request: StartRequest) -> ProcessSpec:
    """The process of a further rank. Its log has the format of the fleet."""
    variables = {AUTH_TOKEN: request.token, INSTANCE_NAME: name}
    settings = JoiningRankProcess(address=request.rank0_address, log=log_config(request.fleet))
    return ProcessSpec(name, (*MEMBER, *settings.title), {**_threads(request), **variables}, settings=settings)


def _with_ranks_at(spec: ProcessSpec, address: str) -> ProcessSpec:
    """An instance whose other ranks join at `address`."""
    assert isinstance(spec.settings, InstanceProcess)
    return replace(spec, settings=with_values(spec.settings, {"ranks_at": address}))


def node_address() -> str:
    """The address at which other nodes reach this one."""
    return str(get_node_ip_address())


def reachable(url: str, address: str) -> str:
    """The URL of a server on this node; a server that listens on all addresses is reached at `address`."""
    parts = urlsplit(url)
    if parts.hostname not in _ANY or parts.port is None:
        return url
    return f"{parts.scheme}://{authority(address, parts.port)}"


def root_folder() -> Path:
    """The folder of all of them. Raises `ConfigError` if none can be made."""
    memory = memory_folder()
    roots = [*([] if memory is None else [Path(memory)]), *user_runtime_dirs()]
    return private_folder(f"kvferry-{os.getuid()}-ray", roots)


def _own_name() -> str:
    """A name of this process that is unique even if its process id is used again."""
    return f"{os.getpid()}-{started_at(os.getpid())}"


def _own_folder() -> Path:
    """A new folder for this process."""
    root = root_folder()
    for other in root.iterdir():
        if not _is_used(other):
            shutil.rmtree(other, ignore_errors=True)
    folder = root / _own_name()
    folder.mkdir(mode=0o700)
    return folder


def _routers_folder(*fleet: str) -> Path:
    """The folder that the routers of a fleet on this node share; `fleet` names it, its cluster and the node."""
    digest = hashlib.sha256("\0".join(fleet).encode()).hexdigest()[:16]
    folder = root_folder() / f"{_ROUTERS}{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _is_used(folder: Path) -> bool:
    if not folder.name.startswith(_ROUTERS):
        return _is_running(folder.name)
    try:
        is_new = SYSTEM_CLOCK.wall() - folder.stat().st_mtime < _NEW_S
    except OSError:
        return False
    return is_new or any(map(_is_running, owners(folder)))


def _is_running(name: str) -> bool:
    pid, _, started = name.partition("-")
    try:
        return started_at(int(pid)) == int(started)
    except (OSError, ValueError):
        return False


def _hold_port(host: str) -> socket.socket:
    """A socket that reserves a free port. It does not listen, so that a process of this machine that uses SO_REUSEADDR,
    as rank 0 does, can listen at the port. Raises `ConfigError`."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
    except OSError as error:
        held.close()
        raise ConfigError(f"the ranks of this instance cannot connect at {host}: {error}") from error
    return held


class _RankActors:
    """The further ranks of an instance. Owns the handles of their actors, and a task for each that receives its
    updates."""

    end_timeout_s = 5.0
    """Maximum seconds in which an actor ends its process, and in which Ray ends the actor."""
    retry_interval_s = 0.5
    """Seconds until updates of an actor that is unavailable are requested again."""

    def __init__(self, on_log_line: Callable[[str], None], on_lost: Callable[[str, bool], Awaitable[None]]) -> None:
        """`on_log_line`: called with each line of a rank's log. `on_lost`: called once a rank has ended, with the
        reason, and True if its settings are wrong."""
        self._on_log_line, self._on_lost = on_log_line, on_lost
        self._actors: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, request: StartRequest, address: str) -> None:
        """Create an actor for each further rank of the member, in its bundle; each joins rank 0 at this address."""
        assert request.bundle is not None
        for rank in range(1, len(request.bundle.indices)):
            actor = (
                ray.remote(MemberActor)
                .options(
                    **request.needs.options,
                    max_restarts=0,
                    scheduling_strategy=strategy_of(request.member.role, request.bundle, rank),
                )
                .remote()
            )
            self._actors.append(actor)
            self._tasks.append(
                asyncio.create_task(self._supervise(actor, replace(request, rank=rank, rank0_address=address)))
            )

    async def end(self) -> None:
        """End the processes and the actors."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(self._end(actor) for actor in self._actors))
        self._actors.clear()

    async def _end(self, actor: Any) -> None:
        with suppress(RayError, TimeoutError):
            await result_of(actor.stop.remote(0.0), self.end_timeout_s)
        with suppress(RayError, TimeoutError):
            await in_thread(lambda: ray.kill(actor), self.end_timeout_s)

    async def _supervise(self, actor: Any, request: StartRequest) -> None:
        try:
            await result_of(actor.begin.remote(request), None)
            reason, is_misconfigured = await self._follow(actor, request.rank)
        except RayError:
            reason, is_misconfigured = "its actor was killed, or its node was lost", False
        await self._on_lost(f"rank {request.rank}: {reason}", is_misconfigured)

    async def _follow(self, actor: Any, rank: int) -> tuple[str, bool]:
        """Receive the rank's updates until it ends. Returns the reason, and True if its settings are wrong."""
        number = -1
        while True:
            try:
                update: MemberUpdate = await result_of(actor.next_update.remote(number), None)
            except ActorUnavailableError:  # rank 0 notices by itself when the rank is gone
                await asyncio.sleep(self.retry_interval_s)
                continue
            number = update.number
            for event in update.events:
                if isinstance(event, LogLine):
                    self._on_log_line(f"rank {rank}: {event.text}")
            if update.member.state is MemberState.ENDED:
                return update.member.reason, update.member.is_misconfigured
