"""Forwards an instance's answer to the client, without addresses of instances.

Addresses of instances are masked in errors, and redirects are not forwarded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator

from kvferry.core.clock import Clock
from kvferry.core.errors import PeerLost
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.http.headers import RawHeaders
from kvferry.http.relay import Pattern
from kvferry.http.server.response import Response
from kvferry.router.errors import BadAnswer, InstanceLost, InstanceSilent, LegTimedOut
from kvferry.router.headers import for_client
from kvferry.router.instances.instance import Instance, VllmFacts
from kvferry.router.instances.pools import Pools
from kvferry.router.request.leg import Leg

logger = logging.getLogger(__name__)


_NOTHING = re.compile(rb"(?!)")
_ERROR = b'"error"'


class Relay:
    """Sends answers to clients."""

    max_error = 256 * 1024
    """Maximum number of bytes of an error's body, which is read whole and masked."""

    def __init__(self, pools: Pools, clock: Clock) -> None:
        self._addresses = _Addresses(pools, clock)

    async def send(self, leg: Leg, response: Response) -> bool:
        """Send an answer that no other instance can continue. False if the connection to the instance broke before the
        end.

        The client then gets an error event if the answer is an event stream. Otherwise its connection is cut too, so
        that the answer does not look complete. Raises `RequestError` if nothing of the answer can be sent.
        """
        if 300 <= leg.head.status < 400:
            raise BadAnswer(f"{leg.instance} answered with a redirect, which is not forwarded to clients")
        is_stream = leg.head.is_event_stream
        if leg.head.status >= 400 and not is_stream:
            content = await self.read(leg, self.max_error)
            response.send(leg.head.status, self.hide(content), self.headers(leg, with_length=False))
            return True
        response.start(leg.head.status, self.headers(leg))
        if leg.state == "ended" and not is_stream:
            response.end(leg.take())
            return True
        try:
            await leg.relay(response, _Masking(self) if is_stream else _PASSTHROUGH)
        except PeerLost as error:
            logger.warning("request %s: %s", response.request.id, error)
            response.fail(stream_lost_error(error))
            return False
        response.end()
        return True

    async def read(self, leg: Leg, max_bytes: int) -> bytes:
        """Read all of an answer of which nothing has been sent. Raises `InstanceLost`."""
        try:
            return await leg.read(max_bytes)
        except PeerLost as error:
            raise InstanceLost(f"{leg.instance} closed the connection within its answer") from error

    def headers(self, leg: Leg, *, with_length: bool = True) -> RawHeaders:
        """The answer's headers as the client gets them."""
        headers = for_client(leg.head.headers, with_length=with_length)
        search = self._addresses.pattern().search
        if search(b"\n".join([value for _, value in headers])):  # a single search: most answers name no instance
            headers = [header for header in headers if not search(header[1])]
        return headers

    def hide(self, text: bytes) -> bytes:
        """Mask addresses of instances in a text, whose length does not change."""
        return self._addresses.pattern().sub(lambda match: b"*" * len(match[0]), text)


class _Passthrough:
    """Forwards a body as it is."""

    def take(self, payload: bytes) -> bytes:
        return payload

    def pattern(self) -> Pattern | None:
        return Pattern()

    def on_forwarded(self, captured: bytes) -> None:
        pass


_PASSTHROUGH = _Passthrough()


class _Masking(_Passthrough):
    """Masks addresses in chunks that contain an error."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def take(self, payload: bytes) -> bytes:
        return self._relay.hide(payload) if _ERROR in payload else payload

    def pattern(self) -> Pattern | None:
        return Pattern(stops=(_ERROR,))


class _Addresses:
    """The pattern of instances' addresses in a text: hosts, with or without scheme and port."""

    former_host_ttl_s = 600.0
    """Seconds for which the host of a former instance is still masked, since other instances may still name it."""

    def __init__(self, pools: Pools, clock: Clock) -> None:
        self._pools, self._clock = pools, clock
        self._revision = -1
        self._hosts: set[str] = set()
        self._former_hosts: dict[str, float] = {}
        """Hosts of former instances, and the time until which they are masked."""
        self._pattern = _NOTHING

    def pattern(self) -> re.Pattern[bytes]:
        """The pattern of all addresses; compiled again when an instance's facts change."""
        if self._revision != self._pools.revision:
            self._revision, now = self._pools.revision, self._clock.monotonic()
            hosts = {host for instance in self._pools for host in _hosts(instance) if host}
            self._former_hosts |= dict.fromkeys(self._hosts - hosts, now + self.former_host_ttl_s)
            self._former_hosts = {
                host: until for host, until in self._former_hosts.items() if until > now and host not in hosts
            }
            self._hosts = hosts
            self._pattern = address_pattern(hosts | self._former_hosts.keys())
        return self._pattern


def address_pattern(hosts: Collection[str]) -> re.Pattern[bytes]:
    """The pattern of these hosts in a text, with or without scheme and port."""
    if not hosts:
        return _NOTHING
    names = b"|".join(re.escape(host.encode()) for host in sorted(hosts, key=len, reverse=True))
    return re.compile(rb"(?<![\w.:-])(?:https?://)?\[?(?:%b)\]?(?::\d+)?(?![\w-]|\.\w)" % names)


def _hosts(instance: Instance) -> Iterator[str]:
    """All hosts that may appear in an instance's texts."""
    yield instance.address.host
    match instance.facts:
        case InstanceFacts() as facts:
            yield from (host for host, _ in [(facts.kv_host, facts.kv_port), *(facts.kv_ranks or [])] if host)
        case VllmFacts(sources=sources):
            yield from (source.host for source in sources if source.host)


def stream_lost_error(error: PeerLost) -> InstanceLost | InstanceSilent:
    """The error for a client whose answer has begun and cannot be continued."""
    if isinstance(error, LegTimedOut):
        return InstanceSilent("the instance stopped sending in the middle of its answer, which is incomplete")
    return InstanceLost("the instance broke off; the answer is incomplete")
