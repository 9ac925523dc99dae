"""A publisher and a follower over real sockets: order, gaps, restarts, odd messages."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, suppress

import msgspec
import pytest
import zmq

from kvferry.core.clock import ManualClock
from kvferry.core.errors import ConfigError, ProtocolError
from kvferry.kv_events.messages import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    decode_batch,
    encode_batch,
)
from kvferry.kv_events.publisher import KVEventPublisher
from kvferry.kv_events.replays import Replays
from kvferry.kv_events.subscriber import FeedUpdate, Missed, Restarted, follow


def stored(number: int) -> list[Event]:
    return [BlockStored(block_hashes=[number], parent_block_hash=None, token_ids=[number, 2], block_size=2)]


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher("tcp://127.0.0.1:*", None, ManualClock(5.0), max_history=4)
    yield publisher
    publisher.close()


def at(publisher: KVEventPublisher) -> AsyncIterator[FeedUpdate]:
    return follow(publisher.addresses.endpoint, publisher.addresses.replay_endpoint)


async def take(updates: AsyncIterator[FeedUpdate], count: int) -> list[FeedUpdate]:
    async with asyncio.timeout(60):
        return [await anext(updates) for _ in range(count)]


async def test_events_are_read_as_they_were_published() -> None:
    events: list[Event] = [
        *stored(1),
        BlockStored(block_hashes=[b"x" * 32], parent_block_hash=b"y" * 32, token_ids=[1], block_size=1, medium="GPU"),
        BlockRemoved(block_hashes=[1]),
        AllBlocksCleared(),
    ]
    payload = encode_batch(1.5, events)
    assert decode_batch(payload) == events
    assert [one["type"] for one in msgspec.msgpack.decode(payload)[1]] == [
        "BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared",
    ]  # fmt: skip


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode([1]), msgspec.msgpack.encode("no")])
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_batch(payload)


def test_events_of_unknown_kind_or_shape_are_left_out() -> None:
    odd = [{"type": "BlockMoved", "to": 1}, {"type": "BlockStored"}, 7, {"type": "BlockRemoved", "block_hashes": [[]]}]
    payload = msgspec.msgpack.encode([1.0, [*odd, msgspec.to_builtins(stored(3)[0])], None])
    assert decode_batch(payload) == stored(3)


async def test_a_late_follower_gets_earlier_events(publisher: KVEventPublisher) -> None:
    for number in range(3):
        publisher.publish(stored(number))
    async with aclosing(at(publisher)) as updates:
        assert await take(updates, 3) == [stored(0), stored(1), stored(2)]


def ask_again(context: zmq.Context[zmq.Socket[bytes]], where: str, first: int) -> zmq.Socket[bytes]:
    """A caller that asks for a replay and takes nothing of it before the test reads."""
    caller = context.socket(zmq.DEALER)
    caller.setsockopt(zmq.RCVHWM, 1)
    caller.setsockopt(zmq.RCVTIMEO, 60_000)
    caller.connect(where)
    caller.send_multipart([b"", first.to_bytes(8, "big")])
    return caller


def test_a_slow_follower_gets_all_that_is_kept() -> None:
    """However far it is beyond what ZeroMQ lets wait by default, and what lies in the sockets of the system."""
    publisher = KVEventPublisher("tcp://127.0.0.1:*", None, ManualClock(5.0), max_history=4000)
    context = zmq.Context()
    try:
        event = BlockStored(block_hashes=[b"x" * 12_000], parent_block_hash=None, token_ids=[], block_size=2)
        for _ in range(4000):
            publisher.publish([event])
        slow = ask_again(context, publisher.addresses.replay_endpoint, 0)
        assert slow.recv_multipart()[-2] == bytes(8)
        after = ask_again(context, publisher.addresses.replay_endpoint, 4000)
        assert after.recv_multipart()[-2] == END_OF_REPLAY, "it is answered once the first is"
        numbers = [slow.recv_multipart()[-2] for _ in range(4000)]
        assert numbers[-1] == END_OF_REPLAY
    finally:
        context.destroy(linger=0)
        publisher.close()


def test_callers_that_never_read_keep_nobody_waiting_and_are_given_up() -> None:
    clock = ManualClock()
    publisher = KVEventPublisher("tcp://127.0.0.1:*", None, clock, max_history=2000)
    context = zmq.Context()
    try:
        event = BlockStored(block_hashes=[b"x" * 12_000], parent_block_hash=None, token_ids=[], block_size=2)
        for _ in range(2000):
            publisher.publish([event])
        silent = [ask_again(context, publisher.addresses.replay_endpoint, 0) for _ in range(Replays.max_replays)]
        for one in silent:
            one.poll(60_000)
        late = ask_again(context, publisher.addresses.replay_endpoint, 1999)
        assert not late.poll(300), "there are too many"
        clock.advance(Replays.stall_s)
        while not late.poll(100):
            late.send_multipart([b"", (1999).to_bytes(8, "big")])
        assert late.recv_multipart()[-2] == (1999).to_bytes(8, "big")
        assert late.recv_multipart()[-2] == END_OF_REPLAY
    finally:
        context.destroy(linger=0)
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


async def test_a_gap_is_filled_or_reported(publisher: KVEventPublisher) -> None:
    published = publisher._pub.send_multipart
    publisher.publish(stored(0))
    async with aclosing(at(publisher)) as updates:
        assert await take(updates, 1) == [stored(0)]
        await _wait_for_event(publisher, updates)
        begun = publisher._next
        publisher._pub.send_multipart = lambda frames: None  # lost on the way
        for number in range(2):
            publisher.publish(stored(100 + number))
        publisher._pub.send_multipart = published
        publisher.publish(stored(102))
        assert await take(updates, 3) == [stored(100), stored(101), stored(102)]
        publisher._pub.send_multipart = lambda frames: None
        for number in range(7):  # more than are kept
            publisher.publish(stored(200 + number))
        publisher._pub.send_multipart = published
        publisher.publish(stored(300))
        assert await take(updates, 2) == [Missed(7), stored(300)]
        assert publisher._next == begun + 11


async def _wait_for_event(publisher: KVEventPublisher, updates: AsyncIterator[FeedUpdate]) -> None:
    """Publish until one came by itself: a subscription takes its time to arrive."""
    publisher._history.clear()
    waiting = asyncio.ensure_future(anext(updates))
    while not waiting.done():
        publisher.publish([])
        publisher._history.clear()
        await asyncio.wait({waiting}, timeout=0.01)
    last = publisher._next
    publisher.publish(stored(10**6))
    while (await anext(updates)) != stored(10**6):
        pass
    assert publisher._next == last + 1


async def test_another_process_at_the_address_is_noticed() -> None:
    first = KVEventPublisher("tcp://127.0.0.1:*", None, ManualClock())
    where = first.addresses
    async with aclosing(follow(where.endpoint, where.replay_endpoint)) as updates:
        first.publish(stored(0))
        assert await take(updates, 1) == [stored(0)]
        await _wait_for_event(first, updates)
        first.close()
        second = KVEventPublisher(where.endpoint, where.replay_endpoint, ManualClock(9.0))
        try:
            seen: list[FeedUpdate] = []
            waiting = asyncio.ensure_future(anext(updates))
            while Restarted() not in seen:
                second.publish(stored(7))
                await asyncio.wait({waiting}, timeout=0.01)
                if waiting.done():
                    seen.append(waiting.result())
                    waiting = asyncio.ensure_future(anext(updates))
            while not waiting.done():
                second.publish(stored(7))
                await asyncio.wait({waiting}, timeout=0.01)
            assert waiting.result() == stored(7)
        finally:
            second.close()


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


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [2**63]},
        {"token_ids": [-1]},
        {"block_size": 0},
        {"block_size": 2**64 - 1},
        {"medium": b"\xff"},
        {"type": b"\xff"},
        {"lora_name": b"\xff"},
    ],
)
def test_an_event_that_is_not_understood_is_left_out(fields: dict[str, object]) -> None:
    good = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
    # Bytes stand for texts that are not UTF-8.
    bad = msgspec.msgpack.encode({**good, **fields}).replace(b"\xc4\x01\xff", b"\xa1\xff")
    payload = msgspec.msgpack.encode([1.0, [msgspec.Raw(bad), good], 0])
    assert [type(one) for one in decode_batch(payload)] == [BlockStored]
