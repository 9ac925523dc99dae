"""Instances that register themselves and stay for as long as they renew their lease.

The routers of a port share the leases. Only instances with the deployment's token can register, and each is probed
before it gets requests. If another instance, or none, answers at the address in a message, the registration is refused.
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
from kvferry.router.instances.facts import fetch_facts
from kvferry.router.instances.instance import BOOTSTRAP_PORT, Facts, Instance, NotProbed, SglangFacts, UnknownFacts
from kvferry.router.instances.membership import Membership
from kvferry.router.instances.pools import Pools
from kvferry.router.instances.shared_state import SharedState

logger = logging.getLogger(__name__)

_LeaseState = Literal["serving", "draining", "drained", "gone"]


class Registrations:
    """Serves the route for registrations, and ends leases."""

    min_pause_s = 2.0
    """If this process was stopped for at least these seconds, leases are extended, because it could not receive
    renewals."""
    sweep_interval_s = 0.5
    max_registered = 4096

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
        self._probing: set[str] = set()

    def routes(self) -> list[Route]:
        """The route for registrations."""
        return [Route("POST", REGISTER_PATH, self.register, "register")]

    async def register(self, request: HttpRequest, response: Response) -> None:
        """Serve POST /kvferry/instances/register: an instance is up, draining, or gone."""
        if not self._config.registration:
            raise RegistrationRefused("this router does not accept registrations; start it with --registration")
        message = await request.body.read(SizeLimit(MAX_MESSAGE, "a registration"))
        try:
            announcement = msgspec.json.decode(message, type=Announcement)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the registration cannot be read: {error}") from error
        url = _url(announcement)
        self._membership.refresh()
        match announcement.state:
            case "up":
                state = await self._on_up(url, announcement)
            case "draining":
                state = self._on_draining(url, announcement)
            case "gone":
                state = self._on_gone(url, announcement)
        response.send_json(msgspec.json.encode(Registered(lease_s=self._lease_s, state=state)))

    async def watch(self) -> None:
        """End leases that were not renewed. Runs until cancelled."""
        checked_at = self._clock.monotonic()
        while True:
            await asyncio.sleep(self.sweep_interval_s)
            now = self._clock.monotonic()
            try:
                self.sweep(now, missed_s=now - checked_at if now - checked_at > self.min_pause_s else 0.0)
            except Unavailable as error:
                logger.warning("leases could not be checked, and will be again soon: %s", error)
            checked_at = now

    def sweep(self, now: float, missed_s: float = 0.0) -> None:
        """Drain and then remove instances whose lease has expired at `now`. `missed_s`: seconds in which this process
        could not receive renewals."""
        if missed_s:
            self._state.extend_leases(missed_s)
        for url in self._state.end_leases(now):
            self._retire(url, "has not renewed its lease")

    # Messages.

    async def _on_up(self, url: str, announcement: Announcement) -> _LeaseState:
        lease, instance = self._state.lease(url), self._find(url)
        if lease is not None and lease.process == announcement.process:
            self._renew(url, announcement)
            if instance is None:  # the lease is renewed, so that its process stays removed
                raise InstanceConflict(
                    f"an operator removed {url}; restart the instance, or add it with `kvferry fleet add`"
                )
            return _lease_state(instance)
        if instance is not None and lease is None:
            return _lease_state(instance)  # configured by flags, a file or an operator: it needs no lease
        if lease is None and self._state.num_leases() >= self.max_registered:
            raise QueueFull(f"{self.max_registered} instances are registered here, which is the limit")
        facts = await self._probe(url, announcement)
        self._renew(url, announcement)
        return self._admit(url, announcement, facts)

    def _renew(self, url: str, announcement: Announcement) -> None:
        self._state.set_lease(url, announcement.process, self._clock.monotonic() + self._lease_s)

    def _admit(self, url: str, announcement: Announcement, facts: Facts) -> _LeaseState:
        """Add an instance whose process is new, with its facts. An operator's drain of the former process does not
        apply to the new one."""
        self._membership.supersede(url)
        instance = self._find(url)
        if instance is not None and instance.role != announcement.role:
            self._retire(url, f"registers for {announcement.role}")
            instance = None
        if instance is None:
            instance = self._membership.register(announcement.role, url, announcement.bootstrap_port or BOOTSTRAP_PORT)
            logger.warning("%s (%s) has registered", instance, instance.url)
        instance.record_probe(facts)
        instance.mark_healthy()
        return _lease_state(instance)

    def _on_draining(self, url: str, announcement: Announcement) -> _LeaseState:
        lease = self._state.lease(url)
        if lease is None or lease.process != announcement.process:
            return "drained"
        self._renew(url, announcement)
        self._retire(url, "will be gone")
        return (
            "draining" if any(instance.url == url and not instance.drained for instance in self._pools) else "drained"
        )

    def _on_gone(self, url: str, announcement: Announcement) -> _LeaseState:
        lease = self._state.lease(url)
        if lease is not None and lease.process == announcement.process:
            self._state.end_lease(url)
            self._retire(url, "is gone")
        return "gone"

    # Instances.

    def _find(self, url: str) -> Instance | None:
        """The instance at this URL, unless it will be removed once it is drained."""
        return next(iter(self._pools.staying(url)), None)

    def _retire(self, url: str, reason: str) -> None:
        if self._membership.is_listed(url):
            return
        for instance in self._pools.staying(url):
            logger.warning("%s (%s) %s: it is drained and removed", instance, instance.url, reason)
            self._membership.retire(instance, remove_when_drained=True)

    async def _probe(self, url: str, announcement: Announcement) -> Facts:
        """Fetch the facts of the instance. Raises `InstanceConflict` if they contradict the message."""
        if url in self._probing:
            raise InstanceConflict(f"another registration of {url} is being checked")
        self._probing.add(url)
        instance = Instance(
            announcement.role, url, announcement.bootstrap_port or BOOTSTRAP_PORT, name=f"the instance at {url}"
        )
        timeout_s = self._config.health_timeout_s
        try:
            status, _ = await self._connections.ask(instance, "GET", "/health", timeout_s)
            facts = await fetch_facts(instance, self._connections, self._config.protocol, timeout_s)
        except TransferError as error:
            is_tls = isinstance(error.__cause__, ssl.SSLError)
            hint = "" if is_tls else "; if it has another address, set --advertise-url on the instance"
            raise InstanceConflict(f"{error}{hint}") from error
        finally:
            self._probing.discard(url)
            if not any(other.address.origin == instance.address.origin for other in self._pools):
                self._connections.close(instance)
        if status != 200 or isinstance(facts, NotProbed):
            raise InstanceConflict(f"{instance} does not serve yet (GET /health: {status})")
        mismatch = _mismatch(facts, announcement)
        if mismatch is not None:
            raise InstanceConflict(f"{instance} {mismatch}")
        return facts

    @property
    def _lease_s(self) -> float:
        return self._config.registration_lease_s


def _lease_state(instance: Instance) -> _LeaseState:
    if not instance.draining:
        return "serving"
    return "drained" if instance.drained else "draining"


def _url(announcement: Announcement) -> str:
    try:
        return Instance(announcement.role, announcement.url).url
    except ConfigError as error:
        raise InvalidRequest(str(error), param="url") from error


def _mismatch(facts: Facts, announcement: Announcement) -> str | None:
    """The difference between an instance's facts and its announcement; None if there is none."""
    match facts:
        case UnknownFacts():
            return "is no server of kvferry, vLLM or SGLang"
        case InstanceFacts(role=role) if role not in ("both", announcement.role):
            return f"was started as a {role} instance, not for {announcement.role}"
        case InstanceFacts(engine_id=engine_id) if announcement.engine_id and engine_id != announcement.engine_id:
            return "is another instance than the one that registers; does --advertise-url name the right one?"
        case SglangFacts(mode=mode) if mode not in ("null", announcement.role):
            return f"was started for {mode}, not for {announcement.role}"
    return None
