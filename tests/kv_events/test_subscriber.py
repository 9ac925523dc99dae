"""A follower over real sockets: late, with gaps, and when another process takes the address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import pytest

from kv_events.events import at, stored, take
from kvferry.core.clock import ManualClock
from kvferry.kv_events.publisher import KVEventPublisher
from kvferry.kv_events.subscriber import FeedUpdate, Missed, Restarted, follow


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher("tcp://127.0.0.1:*", None, ManualClock(5.0), max_history=4)
    yield publisher
    publisher.close()


async def test_a_late_follower_gets_earlier_events(publisher: KVEventPublisher) -> None:
    for number in range(3):
        publisher.publish(stored(number))
    async with aclosing(at(publisher)) as updates:
        assert await take(updates, 3) == [stored(0), stored(1), stored(2)]


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
