"""Events of Dynamo's event plane, as 1.7.0.dev20261026 sends them, reach a follower of vLLM's format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from zmq import asyncio as zmq_asyncio

from kvferry.bridge.dynamo.event_relay import EventRelay, TokenBlocks
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.messages.dynamo import DynamoEndpoint
from kvferry.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored
from kvferry.kv_events.subscriber import follow

WORKER, PUBLISHER, SIZE = 9041960179315084546, 7294764378030271, 32
PROMPT = list(range(7, 111))
HASHES = [0xEA910754752166BF, 0x2A99942528DDEDCE, 0x0FC880251D0BB559]
"""Of the prompt's three blocks, as a mocker of Dynamo's named their tokens."""
ENDPOINT = DynamoEndpoint(namespace="dynamo", component="backend", role="decode")


def message(sequence: int, data: Any, *, worker: int = WORKER, tier: str = "device") -> list[bytes]:
    """The frames of a message with one event."""
    event = {"worker_id": worker, "storage_tier": tier, "event": {"event_id": sequence, "data": data, "dp_rank": 0}}
    payload = msgspec.msgpack.encode([event])
    envelope = {"publisher_id": PUBLISHER, "sequence": sequence, "published_at": 1, "topic": "kv-events"}
    content = msgspec.msgpack.encode({**envelope, "payload": payload})
    head = b"\x01" + len(content).to_bytes(4, "big")
    return [b"kv-events", PUBLISHER.to_bytes(8, "big"), sequence.to_bytes(8, "big"), head + content]


def stored(names: list[int], hashes: list[int], parent: int | None = None) -> dict[str, Any]:
    blocks = [{"block_hash": name, "tokens_hash": found} for name, found in zip(names, hashes, strict=True)]
    return {"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}}


@pytest.fixture
def relay() -> EventRelay:
    return EventRelay(ENDPOINT, WORKER, TokenBlocks(SIZE), {}, SYSTEM_CLOCK)


@asynccontextmanager
async def following(relay: EventRelay) -> AsyncIterator[AsyncIterator[Any]]:
    """The updates that a follower gets."""
    updates = follow(relay.address.endpoint, relay.address.replay_endpoint)
    try:
        yield updates
    finally:
        await updates.aclose()


async def test_a_message_has_the_tokens_of_prompts_that_were_sent(relay: EventRelay) -> None:
    relay.sent(PROMPT)
    relay.apply(message(0, stored([1, 2, 3], HASHES)))
    relay.apply(message(1, {"removed": {"block_hashes": [3, 2]}}))
    async with following(relay) as updates, asyncio.timeout(20):
        assert await anext(updates) == [
            BlockStored(block_hashes=[1, 2, 3], parent_block_hash=None, token_ids=PROMPT[:96], block_size=SIZE)
        ]
        assert await anext(updates) == [BlockRemoved(block_hashes=[3, 2])]


async def test_blocks_of_strangers_end_what_is_known(relay: EventRelay) -> None:
    relay.sent(PROMPT)
    relay.apply(message(0, stored([1, 2, 3], [HASHES[0], 5, HASHES[2]])))
    relay.apply(message(1, stored([4], [5])))  # nothing
    relay.apply(message(2, stored([5], HASHES[:1]), worker=1))  # of another worker
    relay.apply(message(3, stored([5], HASHES[:1]), tier="disk"))
    relay.apply(message(4, "cleared"))
    async with following(relay) as updates, asyncio.timeout(20):
        assert await anext(updates) == [
            BlockStored(block_hashes=[1], parent_block_hash=None, token_ids=PROMPT[:32], block_size=SIZE)
        ]
        assert await anext(updates) == [AllBlocksCleared()]


@pytest.mark.parametrize(
    "content", [b"", b"\x01", b"\x01\x00\x00\x00\x01\xc0", b"\x01\x00\x00\x00\x05" + b"\xff" * 5], ids=str
)
async def test_what_cannot_be_read_or_was_lost_clears_the_cache(relay: EventRelay, content: bytes) -> None:
    relay.sent(PROMPT)
    relay.apply(message(0, stored([1], HASHES[:1])))
    *head, _ = message(1, None)
    relay.apply([*head, content])
    relay.apply([b"x"])
    relay.apply(message(7, stored([2], HASHES[1:2], parent=1)))
    async with following(relay) as updates, asyncio.timeout(20):
        assert isinstance((await anext(updates))[0], BlockStored)
        assert await anext(updates) == [AllBlocksCleared()]
        first, second = await anext(updates)
        assert (first, second.parent_block_hash) == (AllBlocksCleared(), 1)


async def test_publishers_are_found_in_discovery(tmp_path: Path) -> None:
    context = zmq_asyncio.Context()
    socket = context.socket(zmq.XPUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    source = {"topic": "kv-events", "publisher_id": PUBLISHER, "metadata": {"worker": {"worker_id": WORKER}}}
    channel = {"topic": "kv-events", "instance_id": PUBLISHER}
    rows = [("event_sources", source), ("event_channels", {**channel, "transport": address(f"tcp://127.0.0.1:{port}")})]
    rows += [("event_channels", {**channel, "transport": address("file:///etc/passwd")}), ("event_channels", {})]
    for number, (kind, row) in enumerate(rows):
        path = tmp_path / "v1" / kind / str(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row))
    environment = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(tmp_path)}
    relay = EventRelay(ENDPOINT, WORKER, TokenBlocks(SIZE), environment, SYSTEM_CLOCK, poll_interval_s=0.05)
    relay.sent(PROMPT)
    running = asyncio.create_task(relay.run())
    try:
        async with following(relay) as updates, asyncio.timeout(20):
            assert (await socket.recv())[:1] == b"\x01"  # a subscription
            await socket.send_multipart(message(0, stored([1], HASHES[:1])))
            assert isinstance((await anext(updates))[0], BlockStored)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        context.destroy(linger=0)


def address(endpoint: str) -> dict[str, Any]:
    return {"kind": "Zmq", "config": {"endpoint": endpoint}}


def test_few_blocks_are_kept() -> None:
    blocks = TokenBlocks(2, max_blocks=2)
    blocks.add([1, 2, 3, 4, 5, 6, 7])
    kept = TokenBlocks(2)
    kept.add([3, 4, 5, 6])
    assert blocks.num_blocks == kept.num_blocks == 2
