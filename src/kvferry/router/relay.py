"""Sends an instance's answer to the client as it comes, without anything that leads around the router.

Addresses of instances are made unreadable in errors, and redirects are not forwarded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from operator import is_
from typing import Protocol

from kvferry.core.clock import Clock
from kvferry.core.errors import PeerLost
from kvferry.core.instance_facts import InstanceFacts
from kvferry.core.openai import SSE_DONE
from kvferry.http.answer import UNCHANGED, Mask
from kvferry.http.headers import RawHeaders
from kvferry.http.response import Response
from kvferry.router.errors import BadAnswer, InstanceLost, InstanceSilent, Silent
from kvferry.router.headers import for_client
from kvferry.router.instance import Instance, VllmFacts
from kvferry.router.pools import Pools
from kvferry.router.progress import EventPassage
from kvferry.router.upstream import UpstreamAnswer

logger = logging.getLogger(__name__)

_REMEMBERED_S = 600.0
"""How long a host is made unreadable after no instance is there any more: another may still tell of it."""

_NOTHING = re.compile(rb"(?!)")

_LONGEST_ERROR = 256 * 1024
"""Bytes of an error's body; it is read whole, to be looked through."""


_LONGEST_READ = 64 * 2**20
"""Of a whole answer that is read for the ticket in it."""


class Elsewhere(Protocol):
    """Knows other instances that can continue an answer."""

    def passage_of(self, answer: UpstreamAnswer) -> EventPassage | None:
        """What another instance would need to continue this answer; None: no instance could."""

    async def continued(self, passage: EventPassage, lost: UpstreamAnswer) -> UpstreamAnswer | None:
        """The rest of an answer whose instance was lost; None: no instance can give it."""

    @property
    def brings_ticket(self) -> bool:
        """Whether an answer's end may contain a ticket for the next turn, which is not for the client."""

    async def take_ticket(self, answer: UpstreamAnswer, content: bytes, *, events: bool) -> bytes:
        """A whole answer, or the last `events` of a stream, without the ticket."""


class Relay:
    """Sends answers to clients."""

    def __init__(self, pools: Pools, clock: Clock) -> None:
        self._addresses = _Addresses(pools, clock)
        self._mask = Mask(b'"error"', self._hide)

    async def send(self, answer: UpstreamAnswer, response: Response, elsewhere: Elsewhere | None = None) -> bool:
        """Send an instance's answer as it comes. False if the connection broke before the end, and `elsewhere` found no
        other instance to continue.

        The client then gets an error event if the answer is an event stream; otherwise its connection is cut too: what
        has been sent cannot become an error any more, and must not look complete. Raises `RequestError` if nothing can
        be sent of the answer.
        """
        if 300 <= answer.status < 400:
            raise BadAnswer(f"{answer.instance} answered with a redirect, which is not forwarded to clients")
        if answer.status >= 400 and not answer.is_event_stream:
            await self._send_error(answer, response)
            return True
        passage = None if elsewhere is None else elsewhere.passage_of(answer)
        if elsewhere is not None and passage is not None:
            return await self._send_events(answer, response, passage, elsewhere)
        if elsewhere is not None and elsewhere.brings_ticket and answer.status == 200 and not answer.is_event_stream:
            await self._send_read(answer, response, elsewhere)
            return True
        response.start(answer.status, self._headers(answer))
        try:
            await answer.relay(response, self._mask if answer.is_event_stream else UNCHANGED)
        except PeerLost as error:
            logger.warning("request %s: %s", response.request.id, error)
            response.fail(_told(error))
            return False
        return True

    async def _send_events(
        self, answer: UpstreamAnswer, response: Response, passage: EventPassage, elsewhere: Elsewhere
    ) -> bool:
        """A stream that another instance can continue."""
        response.start(answer.status, [one for one in self._headers(answer) if one[0] != b"content-length"])
        now = answer
        while True:
            try:
                await now.relay_payload(response, passage)
                lost = PeerLost(f"{now.instance} ended an answer early")
            except PeerLost as error:
                lost = error
            if (closing := passage.closing) is not None:
                if elsewhere.brings_ticket:
                    closing = await elsewhere.take_ticket(now, closing, events=True)
                response.end(closing)
                return True
            logger.warning("request %s: %s", response.request.id, lost)
            told, before = passage.error, now
            following = await elsewhere.continued(passage, before)
            if following is None:
                self._end_broken(response, told, lost)
                return False
            now = following

    def _end_broken(self, response: Response, told: bytes, lost: PeerLost) -> None:
        """End with the error that the instance reported, or with one of the router's own."""
        if told:
            response.end(self._hide(told) + SSE_DONE)
        else:
            response.fail(_told(lost))

    async def _send_read(self, answer: UpstreamAnswer, response: Response, elsewhere: Elsewhere) -> None:
        """A whole answer that is read first."""
        try:
            body = await answer.read(_LONGEST_READ)
        except PeerLost as error:
            raise InstanceLost(f"{answer.instance} closed the connection within its answer") from error
        headers = [header for header in self._headers(answer) if header[0] != b"content-length"]
        response.send(answer.status, await elsewhere.take_ticket(answer, body, events=False), headers)

    async def _send_error(self, answer: UpstreamAnswer, response: Response) -> None:
        try:
            body = await answer.read(_LONGEST_ERROR)
        except PeerLost as error:
            raise InstanceLost(f"{answer.instance} closed the connection within an error") from error
        headers = [header for header in self._headers(answer) if header[0] != b"content-length"]
        response.send(answer.status, self._hide(body), headers)

    def _headers(self, answer: UpstreamAnswer) -> RawHeaders:
        names_one = self._addresses.pattern().search
        return [one for one in for_client(answer.headers) if not names_one(one[1])]

    def _hide(self, text: bytes) -> bytes:
        """Replaced by text of the same length, so that no framing has to change."""
        return self._addresses.pattern().sub(lambda found: b"*" * len(found[0]), text)


class _Addresses:
    """How instances may be named in a text: by host, with or without scheme and port."""

    def __init__(self, pools: Pools, clock: Clock) -> None:
        self._pools, self._clock = pools, clock
        self._known: list[object] = []
        self._hosts: set[str] = set()
        self._left: dict[str, float] = {}
        """Until when hosts are looked for at which no instance is any more."""
        self._pattern = _NOTHING

    def pattern(self) -> re.Pattern[bytes]:
        """Finds any of them; built again when something new is known about an instance."""
        known: list[object] = []
        for instance in self._pools:
            known += (instance.url, instance.facts)
        if len(known) != len(self._known) or not all(map(is_, known, self._known)):
            self._known, now = known, self._clock.monotonic()
            hosts = {host for instance in self._pools for host in _hosts(instance) if host}
            self._left |= dict.fromkeys(self._hosts - hosts, now + _REMEMBERED_S)
            self._left = {host: until for host, until in self._left.items() if until > now and host not in hosts}
            self._hosts = hosts
            self._pattern = _finding(hosts | self._left.keys())
        return self._pattern


def _finding(hosts: set[str]) -> re.Pattern[bytes]:
    if not hosts:
        return _NOTHING
    names = b"|".join(re.escape(host.encode()) for host in sorted(hosts, key=len, reverse=True))
    return re.compile(rb"(?<![\w.:-])(?:https?://)?\[?(?:%b)\]?(?::\d+)?(?![\w-]|\.\w)" % names)


def _hosts(instance: Instance) -> Iterator[str]:
    """All hosts by which an instance may be named."""
    yield instance.host
    match instance.facts:
        case InstanceFacts() as facts:
            yield from (host for host, _ in [(facts.kv_host, facts.kv_port), *(facts.kv_ranks or [])] if host)
        case VllmFacts(origins=origins):
            yield from (origin.host for origin in origins if origin.host)


def _told(error: PeerLost) -> InstanceLost | InstanceSilent:
    if isinstance(error, Silent):
        return InstanceSilent("the instance stopped sending in the middle of its answer, which is incomplete")
    return InstanceLost("the instance broke off; the answer is incomplete")
