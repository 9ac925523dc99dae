"""Follows one publisher of KV events: in order, without gaps if they can be filled, and from the beginning if the
publisher still has it.

Owns its sockets. Missing events are requested again (`replay`), or reported as `Missed` if the publisher no longer has
them. A number that goes back means another process at the address: `Restarted`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from kvferry.core.errors import ProtocolError
from kvferry.kv_events.messages import END_OF_REPLAY, MAX_MESSAGE_BYTES, Event, decode_batch
from kvferry.kv_events.sockets import zmq, zmq_asyncio

logger = logging.getLogger(__name__)

_HIGH_WATER = 10_000
"""Messages that wait to be read; ZeroMQ drops further ones, and the gap is detected."""


@dataclass(frozen=True)
class Restarted:
    """All events so far are from a process that is gone; the next ones are from its successor at the same address."""


@dataclass(frozen=True)
class Missed:
    """This many messages cannot be recovered."""

    num_messages: int


FeedUpdate = list[Event] | Restarted | Missed


async def follow(endpoint: str, replay_endpoint: str | None) -> AsyncGenerator[FeedUpdate, None]:
    """All updates of a publisher, until cancelled. Waits for a publisher that is not running yet, and follows
    one that comes back. Raises `MissingDependency`."""
    context = zmq_asyncio().Context()
    try:
        async for update in _Follower(context, endpoint, replay_endpoint).run():
            yield update
    finally:
        context.destroy(linger=0)


class _Follower:
    replay_s = 5.0

    def __init__(self, context: Any, endpoint: str, replay_endpoint: str | None) -> None:
        self._context, self._replay_endpoint = context, replay_endpoint
        self._next = 0
        self._last = b""
        """The payload before `_next`. It contains the time, so another process's message of the same number differs."""
        self._last_live = -1
        """The number of the last live message; numbers only grow, unless the publisher has restarted."""
        self._sub = self._socket(zmq().SUB)
        self._sub.setsockopt(zmq().SUBSCRIBE, b"")
        self._sub.connect(endpoint)

    async def run(self) -> AsyncIterator[FeedUpdate]:
        """The updates as `follow` yields them."""
        async for update in self._catch_up():
            yield update
        while True:
            number, payload = await self._next_live()
            if number <= self._last_live:
                yield self._restarted()
            self._last_live = number
            if number > self._next:
                async for update in self._catch_up():
                    yield update
            if number < self._next:
                continue  # already replayed
            if number > self._next > 0:  # not where nothing was received before: it may have begun at any number
                yield Missed(number - self._next)
            yield self._accept(number, payload)

    def _accept(self, number: int, payload: bytes) -> list[Event]:
        self._next, self._last = number + 1, payload
        return _read(payload)

    def _restarted(self) -> Restarted:
        self._next, self._last = 0, b""
        return Restarted()

    async def _next_live(self) -> tuple[int, bytes]:
        while True:
            frames = await self._sub.recv_multipart()
            if len(frames) == 3 and len(frames[1]) == 8:
                return int.from_bytes(frames[1], "big"), frames[2]

    async def _catch_up(self) -> AsyncIterator[FeedUpdate]:
        """Replay the events from `_next` on that the publisher still has, up to the first gap in them."""
        replayed = await self._replay(max(0, self._next - 1))
        replayed_last = dict(replayed[:1]).get(self._next - 1)
        if replayed_last is not None and replayed_last != self._last:
            yield self._restarted()
            replayed = await self._replay(0)
        for number, payload in replayed:
            if number > self._next and self._next:
                return
            if number >= self._next:
                yield self._accept(number, payload)

    async def _replay(self, first: int) -> list[tuple[int, bytes]]:
        """The publisher's messages from number `first` on; empty if it does not answer in time."""
        if self._replay_endpoint is None:
            return []
        messages: list[tuple[int, bytes]] = []
        socket = self._socket(zmq().DEALER)
        try:
            socket.connect(self._replay_endpoint)
            async with asyncio.timeout(self.replay_s):
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                while True:
                    *_, number, payload = await socket.recv_multipart()
                    if number == END_OF_REPLAY or len(number) != 8:
                        break
                    messages.append((int.from_bytes(number, "big"), payload))
        except (TimeoutError, ValueError):
            logger.info("KV events from number %d on were not replayed by %s", first, self._replay_endpoint)
        finally:
            socket.close(linger=0)
        return sorted(messages)

    def _socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq().MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq().RCVHWM, _HIGH_WATER)
        return socket


def _read(payload: bytes) -> list[Event]:
    try:
        return decode_batch(payload)
    except ProtocolError as error:
        logger.warning("%s", error)
        return []
