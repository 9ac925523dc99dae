"""What runs in a process of Ray's: the owner of one member's process.

The member is a child that the kernel kills when this process ends, in whatever way, so no member is left without an
owner. When the member ends first, this process stays, and says why to whoever asks. Its controller may come and go. An
instance whose ranks are on several nodes has an actor for each rank; that of rank 0 owns the others (`ranks`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
from collections import deque
from contextlib import suppress
from dataclasses import replace
from urllib.parse import urlsplit

import msgspec
from ray import get_runtime_context
from ray.util import get_node_ip_address

from kvferry.core.errors import ConfigError, KvferryError
from kvferry.core.keys import Verifier
from kvferry.core.settings.environment import AUTH_TOKEN, INSTANCE_NAME
from kvferry.fleet.backends.local.child import ChildProcess
from kvferry.fleet.backends.local.folder import MemberFolder, MemberRecord
from kvferry.fleet.backends.local.member import LocalMember
from kvferry.fleet.backends.local.starting import start_process
from kvferry.fleet.backends.ray.address import SharedAddress
from kvferry.fleet.backends.ray.folders import own_folder, own_name, routers_folder
from kvferry.fleet.backends.ray.messages import (
    ActorIdentity,
    FleetSettings,
    LogLine,
    MemberProgress,
    MemberUpdate,
    Order,
)
from kvferry.fleet.backends.ray.priority import reset_priority
from kvferry.fleet.backends.ray.ranks import RankActors, hold_port
from kvferry.fleet.control.backend import Member, MemberState
from kvferry.fleet.processes.cpu import thread_variables
from kvferry.fleet.processes.process import PROGRAM, ProcessSpec, RouterGroup
from kvferry.fleet.spec.fleet_spec import MemberRole
from kvferry.http.server.listen import authority

_ORDERED_S = 240.0
"""How long after its start an actor waits to be told what to run. A controller that died in between never says so. What
it is told imports what a recipe needs, which takes a minute on a machine without idle cores."""
_NEWS_S = 30.0
"""How long a question for news waits for some."""
_RANK_LOST_S = 10.0
"""How long a member may take to end by itself, and to say why, when one of its ranks has ended."""
_STOPPED_S = 15.0
"""How long the ranks of a member may take to be ended with it."""
_MAX_TOLD = 1000
_ANY = ("0.0.0.0", "::")


class MemberActor:
    """Owns the member's process and folder. All methods run on one event loop."""

    def __init__(self) -> None:
        reset_priority()
        self._unordered = threading.Timer(_ORDERED_S, os._exit, (1,))
        self._unordered.daemon = True
        self._unordered.start()
        self._order: Order | None = None
        self._verifier: Verifier | None = None
        self._failure: Member | None = None
        self._member: LocalMember | None = None
        self._address: SharedAddress | None = None
        self._ranks: RankActors | None = None
        self._held: socket.socket | None = None
        """Has the port at which further ranks join, if there are some in actors of their own."""
        self._ranks_lost = ""
        """Why the member was ended: one of its ranks has."""
        self._has_wrong_rank = False
        self._watching: asyncio.Task[None] | None = None
        self._told: deque[tuple[int, FleetSettings]] = deque(maxlen=_MAX_TOLD)
        self._num_changes = 0
        self._changed = asyncio.Event()

    async def begin(self, order: Order) -> None:
        """Start the member. If that is impossible, it counts as one that has ended."""
        self._unordered.cancel()
        self._order = order
        self._verifier = Verifier(order.token, order.member.name)
        try:
            spec, about, folder = await self._prepare(order)
            self._member = LocalMember(folder, about, spec.foreign, self, self._wake)
            child = start_process(spec, (), folder, leash="self" if spec.foreign is None else "group")
        except (KvferryError, OSError) as error:
            member = order.member
            if self._member is not None:
                self._member.runs_as(None)
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
            self._member.runs_as(child)
            self._watching = asyncio.create_task(self._run(self._member, child))
            if self._held is not None:
                self._ranks = RankActors(MemberActor, lambda text: self.line("", text), self._rank_is_lost)
                self._ranks.start(order, _address_of(self._held))
        self._wake()

    async def who(self, nonce: str) -> ActorIdentity | None:
        """Say who this actor is; None: it was not told what to run."""
        if self._order is None or self._verifier is None:
            return None
        answer = msgspec.json.encode(self._verifier.answer(nonce))
        return ActorIdentity(
            answer, self._order.number, self._order.bundle, MemberUpdate(self._view(), (), self._num_changes)
        )

    async def news(self, number: int) -> MemberUpdate:
        """What is new since the news with this number; waits for some, but not for ever."""
        if number == self._num_changes:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_NEWS_S):
                    await self._changed.wait()
        told = tuple(one for at, one in self._told if at > number)
        return MemberUpdate(self._view(), told, self._num_changes)

    async def assign(self, role: MemberRole) -> None:
        """Note the member's role."""
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
                await asyncio.wait([self._watching], timeout=_STOPPED_S)
            shutil.rmtree(self._member.folder.path.parent, ignore_errors=True)

    # What the member says (`Watcher`).

    def line(self, name: str, text: str) -> None:
        """A line of its log, which is kept until somebody asks for news."""
        self._tell(LogLine(text))

    def progress(self, name: str, what: str, fraction: float) -> None:
        """How far its start is, which is kept too."""
        self._tell(MemberProgress(what, fraction))

    def ready(self, name: str, url: str) -> None:
        """The view says so."""

    def _tell(self, told: FleetSettings) -> None:
        self._told.append((self._num_changes + 1, told))
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

    async def _rank_is_lost(self, reason: str, is_misconfigured: bool) -> None:
        """The member notices by itself, unless it waits for a rank that does not come."""
        assert self._member is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(_RANK_LOST_S):
                await self._member.gone.wait()
        if not self._member.gone.is_set() and not self._member.is_stopping:
            self._ranks_lost, self._has_wrong_rank = reason, is_misconfigured
            await self._member.stop(0.0)

    async def _prepare(self, order: Order) -> tuple[ProcessSpec, MemberRecord, MemberFolder]:
        """What to run, on this node. Raises `KvferryError` or `OSError`."""
        member, root = order.member, own_folder()
        if order.rank:
            member = replace(member, name=f"{member.name}.rank-{order.rank}")
        recipe = order.make_recipe(order.fleet).on_node(node_address())
        if order.rank:
            spec = _rank_process(member.name, order)
        elif member.role == "router":
            context = get_runtime_context()
            group = routers_folder(order.namespace, context.gcs_address, context.get_node_id())
            self._address = SharedAddress(group, own_name())
            listeners = await self._address.open(recipe.addresses)
            spec = recipe.router_member(member.name, RouterGroup(group, listeners))
        else:
            spec = recipe.instance(member.name, member.role, order.number, ())
            if spec.registrar is not None:
                raise ConfigError("--register: on Ray, servers of vLLM are not registered at other routers")
            if order.bundle is not None and len(order.bundle.indices) > 1:
                self._held = hold_port(node_address())
                spec = replace(spec, command=(*spec.command, f"--ranks-at={_address_of(self._held)}"))
            spec = replace(spec, environment={**spec.environment, **_threads(order)})
        about = MemberRecord(
            name=member.name,
            role=member.role,
            revision=member.revision,
            unit=member.unit,
            number=order.number,
            cores=(),
            is_foreign=spec.foreign is not None,
            url="" if spec.foreign is None else spec.foreign.url,
            bootstrap_port=spec.bootstrap_port,
        )
        folder = MemberFolder(root / "member")
        folder.make(about)
        return spec, about, folder

    def _view(self) -> Member:
        if self._failure is not None or self._member is None:
            assert self._failure is not None
            return self._failure
        seen = self._member.view
        if self._ranks_lost:
            seen = replace(seen, reason=self._ranks_lost, is_misconfigured=self._has_wrong_rank)
        url = reachable(seen.url, node_address())
        # A node that hangs as soon as a member serves is to be noticed too: its health is asked for from then on.
        return replace(seen, url=url, health_url=seen.health_url or url)


def _address_of(held: socket.socket) -> str:
    return authority(*held.getsockname()[:2])


def _threads(order: Order) -> dict[str, str]:
    return thread_variables(int(order.needs.cpus))


def _rank_process(name: str, order: Order) -> ProcessSpec:
    """What to run for a further rank. The log's format is that of the fleet's flags."""
    log = tuple(one for one in order.fleet.args if one.startswith("--log-"))
    own = {AUTH_TOKEN: order.token, INSTANCE_NAME: name}
    return ProcessSpec(name, (*PROGRAM, "rank", order.joins, *log), {**_threads(order), **own})


def node_address() -> str:
    """The address at which other nodes reach this one."""
    return str(get_node_ip_address())


def reachable(url: str, address: str) -> str:
    """The URL of a server on this node; one that listens everywhere is reached at `address`."""
    parts = urlsplit(url)
    if parts.hostname not in _ANY or parts.port is None:
        return url
    return f"{parts.scheme}://{authority(address, parts.port)}"
