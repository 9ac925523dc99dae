"""Instances that register themselves and stay for as long as they renew their lease.

The leases are what the routers of one port share. Only instances that hold the deployment's token can register, and
each is asked about itself before it gets requests. If another instance, or none, answers at the address that a message
names, the registration is refused.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import Literal

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import (
    ConfigError,
    InvalidRequest,
    QueueFull,
    TransferError,
    Unavailable,
)
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.core.messages.registration import MAX_MESSAGE, REGISTER_PATH, Announcement, Registered
from kvferry.http.server.body import SizeLimit
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route
from kvferry.router.config import RouterConfig
from kvferry.router.errors import InstanceConflict, RegistrationRefused
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.facts import ask_about
from kvferry.router.instances.instance import BOOTSTRAP_PORT, Facts, Instance, NotProbed, SglangFacts, UnknownFacts
from kvferry.router.instances.membership import Membership
from kvferry.router.instances.pools import Pools
from kvferry.router.instances.shared_state import SharedState

logger = logging.getLogger(__name__)

_Doing = Literal["serving", "draining", "drained", "gone"]

MAX_REGISTERED = 4096
_LOOK_S = 0.5
_STOOD_STILL_S = 2.0
"""How long this process itself must have stood still for leases to be extended: instances could not be heard then."""


class Registrations:
    """The route for instances, and the end of their leases."""

    def __init__(
        self,
        config: RouterConfig,
        pools: Pools,
        connections: Connections,
        clock: Clock,
        membership: Membership,
        state: SharedState,
    ) -> None:
        self._config, self._pools, self._connections, self._clock = config, pools, connections, clock
        self._membership, self._state = membership, state
        self._asking: set[str] = set()

    def routes(self) -> list[Route]:
        """Served beside the router's other routes."""
        return [Route("POST", REGISTER_PATH, self.register, "register")]

    async def register(self, request: HttpRequest, response: Response) -> None:
        """POST /kvferry/instances/register: an instance is there, will be gone soon, or is gone."""
        if not self._config.registration:
            raise RegistrationRefused("this router does not accept registrations; start it with --registration")
        message = await request.body.read(SizeLimit(MAX_MESSAGE, "a registration"))
        try:
            announcement = msgspec.json.decode(message, type=Announcement)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the registration cannot be read: {error}") from error
        url = _url(announcement)
        self._membership.catch_up()
        match announcement.state:
            case "up":
                state = await self._up(url, announcement)
            case "draining":
                state = self._draining(url, announcement)
            case "gone":
                state = self._gone(url, announcement)
        response.send_json(msgspec.json.encode(Registered(lease_s=self._lease_s, state=state)))

    async def watch(self) -> None:
        """End leases that were not renewed; runs until it is cancelled."""
        before = self._clock.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            now = self._clock.monotonic()
            try:
                self.look(now, missed_s=now - before if now - before > _STOOD_STILL_S else 0.0)
            except Unavailable as error:
                logger.warning("leases could not be checked, and will be again soon: %s", error)
            before = now

    def look(self, now: float, missed_s: float = 0.0) -> None:
        """Drain and then forget instances whose lease is over at `now`. `missed_s`: how long this process could not
        receive renewals."""
        if missed_s:
            self._state.extend_leases(missed_s)
        for url in self._state.end_leases(now):
            self._retire(url, "has not renewed its lease")

    # A message.

    async def _up(self, url: str, said: Announcement) -> _Doing:
        lease, here = self._state.lease(url), self._here(url)
        if lease is not None and lease.process == said.process:
            self._renew(url, said)
            if here is None:  # the lease goes on, so that its process stays out
                raise InstanceConflict(
                    f"an operator removed {url}; restart the instance, or add it with `kvferry fleet add`"
                )
            return _doing(here)
        if here is not None and lease is None:
            return _doing(here)  # named by flags, a file or an operator: it needs no lease
        if lease is None and self._state.num_leases() >= MAX_REGISTERED:
            raise QueueFull(f"{MAX_REGISTERED} instances are registered here, which is the limit")
        facts = await self._ask(url, said)
        self._renew(url, said)
        return self._admit(url, said, facts)

    def _renew(self, url: str, said: Announcement) -> None:
        self._state.set_lease(url, said.process, self._clock.monotonic() + self._lease_s)

    def _admit(self, url: str, said: Announcement, facts: Facts) -> _Doing:
        """Add an instance whose process is new, with what it reported when it was asked. That an operator drained the
        process before it is over with that process."""
        self._membership.supersede(url)
        here = self._here(url)
        if here is not None and here.role != said.role:
            self._retire(url, f"registers for {said.role}")
            here = None
        if here is None:
            here = self._membership.register(said.role, url, said.bootstrap_port or BOOTSTRAP_PORT)
            logger.warning("%s (%s) has registered", here, here.url)
        here.learn(facts)
        here.mark_healthy()
        return _doing(here)

    def _draining(self, url: str, said: Announcement) -> _Doing:
        lease = self._state.lease(url)
        if lease is None or lease.process != said.process:
            return "drained"
        self._renew(url, said)
        self._retire(url, "will be gone")
        return "draining" if any(one.url == url and not one.drained for one in self._pools) else "drained"

    def _gone(self, url: str, said: Announcement) -> _Doing:
        lease = self._state.lease(url)
        if lease is not None and lease.process == said.process:
            self._state.end_lease(url)
            self._retire(url, "is gone")
        return "gone"

    # Instances.

    def _here(self, url: str) -> Instance | None:
        """The instance at this URL, unless it will be removed once it is drained."""
        return next((one for one in self._pools if one.url == url and not one.remove_when_drained), None)

    def _retire(self, url: str, why: str) -> None:
        if self._membership.names(url):
            return
        for one in [one for one in self._pools if one.url == url and not one.remove_when_drained]:
            logger.warning("%s (%s) %s: it is drained and removed", one, one.url, why)
            self._membership.retire(one, remove_when_drained=True)

    async def _ask(self, url: str, said: Announcement) -> Facts:
        """What the instance reports about itself. Raises `InstanceConflict` if that is not what the message says."""
        if url in self._asking:
            raise InstanceConflict(f"another registration of {url} is being checked")
        self._asking.add(url)
        instance = Instance(said.role, url, said.bootstrap_port or BOOTSTRAP_PORT, name=f"the instance at {url}")
        timeout_s = self._config.health_timeout_s
        try:
            status, _ = await self._connections.ask(instance, "GET", "/health", timeout_s)
            facts = await ask_about(instance, self._connections, self._config.protocol, timeout_s)
        except TransferError as error:
            is_tls = isinstance(error.__cause__, ssl.SSLError)
            hint = "" if is_tls else "; if it has another address, set --advertise-url on the instance"
            raise InstanceConflict(f"{error}{hint}") from error
        finally:
            self._asking.discard(url)
            if not any(one.address.origin == instance.address.origin for one in self._pools):
                self._connections.close(instance)
        if status != 200 or isinstance(facts, NotProbed):
            raise InstanceConflict(f"{instance} does not serve yet (GET /health: {status})")
        complaint = _mismatch(facts, said)
        if complaint is not None:
            raise InstanceConflict(f"{instance} {complaint}")
        return facts

    @property
    def _lease_s(self) -> float:
        return self._config.registration_lease_s


def _doing(instance: Instance) -> _Doing:
    if not instance.draining:
        return "serving"
    return "drained" if instance.drained else "draining"


def _url(said: Announcement) -> str:
    try:
        return Instance(said.role, said.url).url
    except ConfigError as error:
        raise InvalidRequest(str(error), param="url") from error


def _mismatch(facts: Facts, said: Announcement) -> str | None:
    """How an instance differs from what it registered as (`said`); None: it does not."""
    match facts:
        case UnknownFacts():
            return "is no server of kvferry, vLLM or SGLang"
        case InstanceFacts(role=role) if role not in ("both", said.role):
            return f"was started as a {role} instance, not for {said.role}"
        case InstanceFacts(engine_id=engine_id) if said.engine_id and engine_id != said.engine_id:
            return "is another instance than the one that registers; does --advertise-url name the right one?"
        case SglangFacts(mode=mode) if mode not in ("null", said.role):
            return f"was started for {mode}, not for {said.role}"
    return None
