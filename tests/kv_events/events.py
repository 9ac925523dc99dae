"""Publishers, followers and their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from kvferry.kv_events.messages import END_OF_REPLAY, BlockStored, Event, encode_batch
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


class LossyPublisher:
    """A publisher some of whose messages are lost on the way. It replays those in `history`, by number."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._pub, self._replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self.endpoint, self.replay_endpoint = (
            f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}" for socket in (self._pub, self._replay)
        )
        self.history: dict[int, bytes] = {}

    async def followed(self) -> None:
        """Wait for the first follower's subscription."""
        async with asyncio.timeout(60):
            assert await self._pub.recv() == b"\x01"

    async def publish(self, number: int, *, is_lost: bool = False) -> None:
        """Publish `stored(number)` as the message of that number."""
        self.history[number] = encode_batch(1.0, stored(number))
        if not is_lost:
            await self._pub.send_multipart([b"", number.to_bytes(8, "big"), self.history[number]])

    async def serve(self) -> None:
        """Answer requests for replays."""
        while True:
            caller, _, first = await self._replay.recv_multipart()
            for number, payload in [*self.history.items()]:
                if number >= int.from_bytes(first, "big"):
                    await self._replay.send_multipart([caller, b"", b"", number.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([caller, b"", b"", END_OF_REPLAY, b""])


@asynccontextmanager
async def lossy_publisher() -> AsyncIterator[LossyPublisher]:
    context = zmq.asyncio.Context()
    publisher = LossyPublisher(context)
    serving = asyncio.create_task(publisher.serve())
    try:
        yield publisher
    finally:
        serving.cancel()
        context.destroy(linger=0)
