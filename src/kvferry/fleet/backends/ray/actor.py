"""What runs in a process of Ray's: the owner of one member's process.

The member is a child that the kernel kills when this process ends, in whatever way, so no member is left without an
owner. When the member ends first, this process stays, and says why to who asks. Its controller may come and go.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import msgspec
from ray import get_runtime_context
from ray.util import get_node_ip_address

from kvferry.core.errors import ConfigError, KvferryError
from kvferry.core.keys import Verifier
from kvferry.fleet.backends.local.folder import About, MemberFolder
from kvferry.fleet.backends.local.member import LocalMember
from kvferry.fleet.backends.local.starting import start_process
from kvferry.fleet.backends.ray.address import SharedAddress
from kvferry.fleet.backends.ray.folders import own_folder, own_name, routers_folder
from kvferry.fleet.backends.ray.placing import Bundle
from kvferry.fleet.control.backend import Member, MemberSpec, MemberState, Recipe
from kvferry.fleet.control.spec import MemberRole, WantedFleet
from kvferry.fleet.cpu import thread_variables
from kvferry.fleet.process import ProcessSpec, RouterGroup
from kvferry.http.server.listen import authority

_ORDERED_S = 60.0
"""How long after its start an actor waits to be told what to run. A controller that died in between never says so."""
_NEWS_S = 30.0
"""How long a question for news waits for some."""
_MOST_TOLD = 1000
_ANY = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Order:
    """What an actor is to run. It is sent to the actor alone, since `make_recipe` has the fleet's token: what an actor
    is created with, Ray keeps. `bundle`: the member's place in its unit's placement group."""

    member: MemberSpec
    fleet: WantedFleet
    namespace: str
    make_recipe: Callable[[WantedFleet], Recipe]
    number: int
    num_cpus: float
    token: str
    bundle: Bundle | None = None


@dataclass(frozen=True)
class LogLine:
    """A line of the member's log."""

    text: str


@dataclass(frozen=True)
class MemberProgress:
    """The member has done `fraction` (0 to 1) of its start, and is now doing `what`."""

    what: str
    fraction: float


Told = LogLine | MemberProgress


@dataclass(frozen=True)
class MemberNews:
    """`member`: as it is now. `told`: what it has said since, oldest first; some are left out if there were many.
    `number`: what to ask with the next time."""

    member: Member
    told: tuple[Told, ...]
    number: int


@dataclass(frozen=True)
class ActorIdentity:
    """Who an actor is. `answer`: its proof that it holds the fleet's token (`core.keys`). `number`: of the instance.
    `news`: the member as it is, without what it has said so far."""

    answer: bytes
    number: int
    bundle: Bundle | None
    news: MemberNews


class MemberActor:
    """Owns the member's process and folder. All methods run on one event loop."""

    def __init__(self) -> None:
        self._unordered = threading.Timer(_ORDERED_S, os._exit, (1,))
        self._unordered.daemon = True
        self._unordered.start()
        self._order: Order | None = None
        self._verifier: Verifier | None = None
        self._failure: Member | None = None
        self._member: LocalMember | None = None
        self._address: SharedAddress | None = None
        self._watching: asyncio.Task[None] | None = None
        self._told: deque[tuple[int, Told]] = deque(maxlen=_MOST_TOLD)
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
            with suppress(PermissionError):  # Ray runs its workers at a low priority, which the member would inherit
                os.setpriority(os.PRIO_PROCESS, 0, 0)
            child = start_process(spec, (), folder, leash="self" if spec.foreign is None else "group")
        except (KvferryError, OSError) as error:
            member = order.member
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
            self._watching = asyncio.create_task(self._member.watch(child))
        self._wake()

    async def who(self, nonce: str) -> ActorIdentity | None:
        """Who it is; None: it was not told what to run."""
        if self._order is None or self._verifier is None:
            return None
        answer = msgspec.json.encode(self._verifier.answer(nonce))
        return ActorIdentity(
            answer, self._order.number, self._order.bundle, MemberNews(self._view(), (), self._num_changes)
        )

    async def news(self, number: int) -> MemberNews:
        """What is new since the news with this number; waits for some, but not for ever."""
        if number == self._num_changes:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_NEWS_S):
                    await self._changed.wait()
        told = tuple(one for at, one in self._told if at > number)
        return MemberNews(self._view(), told, self._num_changes)

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
            shutil.rmtree(self._member.folder.path.parent, ignore_errors=True)

    # What the member says (`Watcher`).

    def line(self, name: str, text: str) -> None:
        """A line of its log, which is kept for who asks for news."""
        self._tell(LogLine(text))

    def progress(self, name: str, what: str, fraction: float) -> None:
        """How far its start is, which is kept too."""
        self._tell(MemberProgress(what, fraction))

    def ready(self, name: str, url: str) -> None:
        """The view says so."""

    def _tell(self, told: Told) -> None:
        self._told.append((self._num_changes + 1, told))
        self._wake()

    def _wake(self) -> None:
        self._num_changes += 1
        self._changed.set()

    # The member.

    async def _prepare(self, order: Order) -> tuple[ProcessSpec, About, MemberFolder]:
        """What to run, on this node. Raises `KvferryError` or `OSError`."""
        member, root = order.member, own_folder()
        recipe = order.make_recipe(order.fleet).on_node(node_address())
        if member.role == "router":
            context = get_runtime_context()
            group = routers_folder(order.namespace, context.gcs_address, context.get_node_id())
            self._address = SharedAddress(group, own_name())
            listeners = await self._address.open(recipe.addresses)
            spec = recipe.router_member(member.name, RouterGroup(group, listeners))
        else:
            spec = recipe.instance(member.name, member.role, order.number, ())
            if spec.registrar is not None:
                raise ConfigError("--register: on Ray, servers of vLLM are not registered at other routers")
            threads = thread_variables(tuple(range(int(order.num_cpus))))
            spec = replace(spec, environment={**spec.environment, **threads})
        about = About(
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
        url = reachable(seen.url, node_address())
        # A node that hangs as soon as a member serves is to be noticed too: its health is asked for from then on.
        return replace(seen, url=url, health_url=seen.health_url or url)


def node_address() -> str:
    """The address at which other nodes reach this one."""
    return str(get_node_ip_address())


def reachable(url: str, address: str) -> str:
    """The URL of a server on this node; one that listens everywhere is reached at `address`."""
    parts = urlsplit(url)
    if parts.hostname not in _ANY or parts.port is None:
        return url
    return f"{parts.scheme}://{authority(address, parts.port)}"
