"""A publisher over real sockets: addresses, strangers, and followers that ask for too much."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import aclosing, suppress

import pytest
import zmq

from kv_events.events import ask_again, at, stored, take
from kvferry.core.clock import ManualClock
from kvferry.core.errors import ConfigError
from kvferry.kv_events.publisher import KVEventPublisher
from kvferry.kv_events.subscriber import FeedUpdate


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher("tcp://127.0.0.1:*", None, ManualClock(5.0), max_history=4)
    yield publisher
    publisher.close()


def stranger(where: str, kind: bytes) -> socket.socket:
    """A connection that speaks ZeroMQ's protocol, up to its first message."""
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    one = socket.create_connection((host, int(port)), timeout=60)
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    one.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 32) + b"\x04" + bytes([len(ready)]) + ready)
    return one


@pytest.mark.parametrize("kind", [b"SUB", b"DEALER"])
def test_who_would_say_too_much_is_cut_off(publisher: KVEventPublisher, kind: bytes) -> None:
    where = publisher.addresses.endpoint if kind == b"SUB" else publisher.addresses.replay_endpoint
    with stranger(where, kind) as loud:
        received = b""
        while b"Socket-Type" not in received:
            received += loud.recv(1)
        loud.sendall(b"\x02" + (2**28).to_bytes(8, "big") + bytes(100))
        with suppress(ConnectionResetError):
            while loud.recv(65536):
                pass
    publisher.publish(stored(1))
    context = zmq.Context()
    other = ask_again(context, publisher.addresses.replay_endpoint, 0)
    assert other.recv_multipart()[-2] == bytes(8)
    context.destroy(linger=0)


async def test_who_asks_for_endless_topics_is_sent_away_and_others_miss_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = KVEventPublisher("tcp://127.0.0.1:*", None, ManualClock(5.0))
    context = zmq.Context()
    greedy = context.socket(zmq.XSUB)
    greedy.setsockopt(zmq.SNDHWM, 0)
    greedy.connect(publisher.addresses.endpoint)
    for topic in range(2000):
        greedy.send(b"\x01" + topic.to_bytes(200, "big"))
    received: list[FeedUpdate] = []

    async def hear(number: int) -> None:
        while stored(number) not in received:
            received.extend(await take(updates, 1))

    try:
        async with aclosing(at(publisher)) as updates:
            count = 0
            while "too many topics" not in caplog.text:
                publisher.publish(stored(count))
                assert publisher.topic_bytes < 2**17, "of 400 KB that were asked for"
                count += 1
                await asyncio.sleep(0)
            greedy.close(linger=0)
            last = asyncio.create_task(hear(count))
            while not last.done():  # what is missing is seen with the next that comes
                publisher.publish(stored(count))
                count += 1
                await asyncio.wait([last], timeout=0.05)
            last.result()
    finally:
        publisher.close()
        context.destroy(linger=0)
    assert received == [stored(number) for number in range(len(received))]


async def test_strange_messages_and_requests_harm_nobody(publisher: KVEventPublisher) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(publisher.addresses.replay_endpoint)
    for frames in ([b""], [b"", b"short"], [b"", b"1", b"2", b"3"], [b"", b"\xff" * 9]):
        socket.send_multipart(frames)
    publisher.publish(stored(1))
    async with aclosing(at(publisher)) as updates:
        assert await take(updates, 1) == [stored(1)]
    context.destroy(linger=0)


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:5557", "http://127.0.0.1:1", "tcp://127.0.0.1", "tcp://127.0.0.1:x", ""]
)
def test_wrong_addresses_are_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events"):
        KVEventPublisher(endpoint, None, ManualClock())


def test_an_address_in_use_is_named(publisher: KVEventPublisher) -> None:
    with pytest.raises(ConfigError, match="--kv-events tcp://"):
        KVEventPublisher(publisher.addresses.endpoint, None, ManualClock())
