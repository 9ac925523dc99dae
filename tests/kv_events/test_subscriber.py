"""A follower over real sockets: late, with gaps, and when another process takes the address."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from kv_events.events import at, lossy_publisher, stored, take
from kvferry.core.clock import ManualClock
from kvferry.kv_events.publisher import KVEventPublisher
from kvferry.kv_events.subscriber import FeedUpdate, Missed, Restarted, follow
from support.waiting import eventually


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


async def test_a_gap_is_filled_or_reported() -> None:
    async with (
        lossy_publisher() as publisher,
        aclosing(follow(publisher.endpoint, publisher.replay_endpoint)) as updates,
    ):
        first = asyncio.create_task(take(updates, 1))
        await publisher.followed()
        await publisher.publish(0)
        assert await first == [stored(0)]
        for number in (1, 2):
            await publisher.publish(number, is_lost=True)
        await publisher.publish(3)
        assert await take(updates, 3) == [stored(1), stored(2), stored(3)]
        for number in range(4, 11):
            await publisher.publish(number, is_lost=True)
        for number in range(8):  # more are lost than it still has
            del publisher.history[number]
        await publisher.publish(11)
        assert await take(updates, 2) == [Missed(7), stored(11)]


def is_followed(publisher: KVEventPublisher) -> bool:
    """True once a subscription has arrived, which is seen when something is published."""
    publisher.publish([])
    return publisher.topic_bytes > 0


async def test_another_process_at_the_address_is_noticed() -> None:
    first = KVEventPublisher("tcp://127.0.0.1:*", None, ManualClock())
    where = first.addresses
    async with aclosing(follow(where.endpoint, where.replay_endpoint)) as updates:
        first.publish(stored(0))
        assert await take(updates, 1) == [stored(0)]
        await eventually(lambda: is_followed(first))
        first.publish(stored(1))
        while (await anext(updates)) != stored(1):
            pass
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
