"""Publishers, followers and their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import zmq

from kvferry.kv_events.messages import (
    BlockStored,
    Event,
)
from kvferry.kv_events.publisher import KVEventPublisher
from kvferry.kv_events.subscriber import FeedUpdate, follow


def stored(number: int) -> list[Event]:
    return [BlockStored(block_hashes=[number], parent_block_hash=None, token_ids=[number, 2], block_size=2)]


def at(publisher: KVEventPublisher) -> AsyncIterator[FeedUpdate]:
    return follow(publisher.addresses.endpoint, publisher.addresses.replay_endpoint)


async def take(updates: AsyncIterator[FeedUpdate], count: int) -> list[FeedUpdate]:
    async with asyncio.timeout(60):
        return [await anext(updates) for _ in range(count)]


def ask_again(context: zmq.Context[zmq.Socket[bytes]], where: str, first: int) -> zmq.Socket[bytes]:
    """A caller that asks for a replay and takes nothing of it before the test reads."""
    caller = context.socket(zmq.DEALER)
    caller.setsockopt(zmq.RCVHWM, 1)
    caller.setsockopt(zmq.RCVTIMEO, 60_000)
    caller.connect(where)
    caller.send_multipart([b"", first.to_bytes(8, "big")])
    return caller
