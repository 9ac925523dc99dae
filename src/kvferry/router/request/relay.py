"""Sends an instance's answer to the client as it comes, without anything that leads around the router.

Addresses of instances are made unreadable in errors, and redirects are not forwarded.
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

_REMEMBERED_S = 600.0
"""How long a host is made unreadable after no instance is there any more: another may still tell of it."""

_NOTHING = re.compile(rb"(?!)")
_MAX_ERROR = 256 * 1024
"""Bytes of an error's body; it is read whole, to be looked through."""
_ERROR = b'"error"'


class Relay:
    """Sends answers to clients."""

    def __init__(self, pools: Pools, clock: Clock) -> None:
        self._addresses = _Addresses(pools, clock)

    async def send(self, leg: Leg, response: Response) -> bool:
        """Send an answer that no other instance can continue. False if the connection to the instance broke before the
        end.

        The client then gets an error event if the answer is an event stream; otherwise its connection is cut too: what
        has been sent cannot become an error any more, and must not look complete. Raises `RequestError` if nothing can
        be sent of the answer.
        """
        if 300 <= leg.head.status < 400:
            raise BadAnswer(f"{leg.instance} answered with a redirect, which is not forwarded to clients")
        is_stream = leg.head.is_event_stream
        if leg.head.status >= 400 and not is_stream:
            content = await self.read(leg, _MAX_ERROR)
            response.send(leg.head.status, self.hide(content), self.headers(leg, with_length=False))
            return True
        response.start(leg.head.status, self.headers(leg))
        if leg.state == "ended" and not is_stream:
            response.end(leg.take())
            return True
        try:
            await leg.relay(response, _Masking(self) if is_stream else _UNREAD)
        except PeerLost as error:
            logger.warning("request %s: %s", response.request.id, error)
            response.fail(stream_lost_error(error))
            return False
        response.end()
        return True

    async def read(self, leg: Leg, max_bytes: int) -> bytes:
        """All of an answer of which nothing has been sent. Raises `InstanceLost`."""
        try:
            return await leg.read(max_bytes)
        except PeerLost as error:
            raise InstanceLost(f"{leg.instance} closed the connection within its answer") from error

    def headers(self, leg: Leg, *, with_length: bool = True) -> RawHeaders:
        """The answer's headers as the client gets them."""
        headers = for_client(leg.head.headers, with_length=with_length)
        search = self._addresses.pattern().search
        if search(b"\n".join([value for _, value in headers])):  # one search: most answers name no instance
            headers = [header for header in headers if not search(header[1])]
        return headers

    def hide(self, text: bytes) -> bytes:
        """The text without addresses of instances, in the same length."""
        return self._addresses.pattern().sub(lambda found: b"*" * len(found[0]), text)


class _Unread:
    """A body that goes to the client as it is."""

    def take(self, payload: bytes) -> bytes:
        return payload

    def pattern(self) -> Pattern | None:
        return Pattern()

    def passed(self, kept: bytes) -> None:
        pass


_UNREAD = _Unread()


class _Masking(_Unread):
    """Addresses are made unreadable where an error is told."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def take(self, payload: bytes) -> bytes:
        return self._relay.hide(payload) if _ERROR in payload else payload

    def pattern(self) -> Pattern | None:
        return Pattern(stops=(_ERROR,))


class _Addresses:
    """How instances may be named in a text: by host, with or without scheme and port."""

    def __init__(self, pools: Pools, clock: Clock) -> None:
        self._pools, self._clock = pools, clock
        self._revision = -1
        self._hosts: set[str] = set()
        self._left: dict[str, float] = {}
        """Hosts at which no instance is any more, and until when they are looked for."""
        self._pattern = _NOTHING

    def pattern(self) -> re.Pattern[bytes]:
        """Finds any of them; built again when something new is known about an instance."""
        if self._revision != self._pools.revision:
            self._revision, now = self._pools.revision, self._clock.monotonic()
            hosts = {host for instance in self._pools for host in _hosts(instance) if host}
            self._left |= dict.fromkeys(self._hosts - hosts, now + _REMEMBERED_S)
            self._left = {host: until for host, until in self._left.items() if until > now and host not in hosts}
            self._hosts = hosts
            self._pattern = address_pattern(hosts | self._left.keys())
        return self._pattern


def address_pattern(hosts: Collection[str]) -> re.Pattern[bytes]:
    """Finds any of these hosts in a text, with or without scheme and port."""
    if not hosts:
        return _NOTHING
    names = b"|".join(re.escape(host.encode()) for host in sorted(hosts, key=len, reverse=True))
    return re.compile(rb"(?<![\w.:-])(?:https?://)?\[?(?:%b)\]?(?::\d+)?(?![\w-]|\.\w)" % names)


def _hosts(instance: Instance) -> Iterator[str]:
    """All hosts by which an instance may be named."""
    yield instance.address.host
    match instance.facts:
        case InstanceFacts() as facts:
            yield from (host for host, _ in [(facts.kv_host, facts.kv_port), *(facts.kv_ranks or [])] if host)
        case VllmFacts(origins=origins):
            yield from (origin.host for origin in origins if origin.host)


def stream_lost_error(error: PeerLost) -> InstanceLost | InstanceSilent:
    """What a client is told whose answer has begun and cannot be continued."""
    if isinstance(error, LegTimedOut):
        return InstanceSilent("the instance stopped sending in the middle of its answer, which is incomplete")
    return InstanceLost("the instance broke off; the answer is incomplete")
