"""Publishes the KV events of a worker of Dynamo, which come from Dynamo's event plane, in vLLM's format.

kvferry's routers find prefixes by the tokens of blocks. Dynamo's events have only hashes of these tokens. The relay
knows the tokens of the requests that were sent through this process. It leaves out the blocks of other requests, and
the blocks that follow them. As of Dynamo 1.7.0.dev20261026, with its event plane `zmq`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash

from kvferry.bridge.dynamo.discovery_rows import read_rows
from kvferry.core.clock import Clock
from kvferry.core.errors import ConfigError
from kvferry.core.messages.dynamo import DynamoEndpoint
from kvferry.core.messages.instance_facts import EventsAddress
from kvferry.kv_events.messages import MAX_MESSAGE_BYTES, AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvferry.kv_events.publisher import KVEventPublisher
from kvferry.kv_events.sockets import require_endpoint, zmq, zmq_asyncio

logger = logging.getLogger(__name__)

_TOPIC = "kv-events"
_SEED = 1337
"""Seed of the hashes by which Dynamo names the tokens of a block."""
_HEAD_BYTES = 5
"""Bytes of a message before its envelope: the version of the format, and the envelope's length."""


class _Envelope(msgspec.Struct):
    payload: bytes


class _Block(msgspec.Struct):
    block_hash: int
    tokens_hash: int


class _Stored(msgspec.Struct):
    blocks: list[_Block]
    parent_hash: int | None = None


class _Removed(msgspec.Struct):
    block_hashes: list[int]


class _Change(msgspec.Struct):
    stored: _Stored | None = None
    removed: _Removed | None = None


class _Event(msgspec.Struct):
    data: _Change | str
    """A string is always "cleared"."""


class _WorkerEvent(msgspec.Struct):
    worker_id: int
    event: _Event
    storage_tier: str = "device"


_ENVELOPE = msgspec.msgpack.Decoder(_Envelope)
_EVENTS = msgspec.msgpack.Decoder(list[_WorkerEvent])


class KVEvents(Protocol):
    """The KV events of a worker, and their address."""

    @property
    def address(self) -> EventsAddress | None:
        """None if there are none."""

    def sent(self, token_ids: Sequence[int]) -> None:
        """Called with the prompt of each request that is sent to the worker."""

    async def run(self) -> None:
        """Receive and publish events until cancelled."""


class PublishedEvents:
    """Events that the worker itself publishes in vLLM's format. `address`: None if it publishes none."""

    def __init__(self, address: EventsAddress | None = None) -> None:
        self.address = address

    def sent(self, token_ids: Sequence[int]) -> None:
        """Does nothing: vLLM's events have the tokens."""

    async def run(self) -> None:
        """Does nothing: routers subscribe to the worker's events themselves."""


NO_EVENTS = PublishedEvents()


class TokenBlocks:
    """Maps Dynamo's hash of a block's tokens to these tokens. Holds at most `max_blocks` blocks; the least recently
    sent ones are dropped first."""

    def __init__(self, block_size: int, *, max_blocks: int = 100_000) -> None:
        self.block_size, self._max_blocks = block_size, max_blocks
        self._tokens = OrderedDict[int, tuple[int, ...]]()

    def add(self, token_ids: Sequence[int]) -> None:
        """Add all whole blocks of a prompt."""
        size, data = self.block_size, np.asarray(token_ids, dtype="<u4")
        for begin in range(0, len(token_ids) - size + 1, size):
            name = xxhash.xxh3_64_intdigest(data[begin : begin + size].tobytes(), seed=_SEED)
            if name in self._tokens:
                self._tokens.move_to_end(name)
            else:
                self._tokens[name] = tuple(token_ids[begin : begin + size])
        while len(self._tokens) > self._max_blocks:
            self._tokens.popitem(last=False)

    @property
    def num_blocks(self) -> int:
        """Number of blocks whose tokens are known."""
        return len(self._tokens)

    def get(self, tokens_hash: int) -> tuple[int, ...] | None:
        """The tokens of a block; None: they are not known."""
        return self._tokens.get(tokens_hash)


class EventRelay:
    """The relay of one worker. `poll_interval_s`: seconds between two searches for the worker's publishers in Dynamo's
    discovery."""

    def __init__(
        self,
        endpoint: DynamoEndpoint,
        worker_id: int,
        blocks: TokenBlocks,
        environment: Mapping[str, str],
        clock: Clock,
        *,
        poll_interval_s: float = 1.0,
    ) -> None:
        """Raises `ConfigError` if no address can be bound, `MissingDependency` without ZeroMQ."""
        self._endpoint, self._worker_id, self._blocks = endpoint, worker_id, blocks
        self._environment, self._poll_interval_s = environment, poll_interval_s
        self._next: dict[bytes, int] = {}
        """Number of the next message of each publisher."""
        self._publisher = KVEventPublisher("tcp://127.0.0.1:*", None, clock)

    @property
    def address(self) -> EventsAddress:
        """The address at which the events are published again."""
        addresses = self._publisher.addresses
        return EventsAddress(endpoint=addresses.endpoint, replay_endpoint=addresses.replay_endpoint)

    def sent(self, token_ids: Sequence[int]) -> None:
        """Add the tokens of a prompt."""
        self._blocks.add(token_ids)

    async def run(self) -> None:
        """Follow the worker's publishers until cancelled."""
        context = zmq_asyncio().Context()
        try:
            socket = context.socket(zmq().SUB)
            socket.setsockopt(zmq().MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq().SUBSCRIBE, _TOPIC.encode())
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_discovery(socket))
                while True:
                    self.apply(await socket.recv_multipart())
        finally:
            context.destroy(linger=0)
            self._publisher.close()

    async def _follow_discovery(self, socket: Any) -> None:
        connected_addresses = set[str]()
        while True:
            try:
                addresses = await asyncio.to_thread(self._addresses)
            except (OSError, ValueError) as error:
                logger.debug("publishers of KV events cannot be looked up: %s", error)
                addresses = []
            for address in addresses:
                if address not in connected_addresses:
                    socket.connect(address)
                    connected_addresses.add(address)
                    logger.info("receiving KV events of worker %x from %s", self._worker_id, address)
            await asyncio.sleep(self._poll_interval_s)

    def _addresses(self) -> list[str]:
        """Addresses of the worker's publishers. Blocks the thread."""
        publishers = {
            row.get("publisher_id")
            for row in read_rows("event_sources", self._environment)
            if row.get("topic") == _TOPIC and _inner(row, "metadata", "worker").get("worker_id") == self._worker_id
        }
        rows = [
            row
            for row in read_rows("event_channels", self._environment)
            if row.get("topic") == _TOPIC and row.get("instance_id") in publishers
        ]
        addresses = [_inner(row, "transport", "config").get("endpoint") for row in rows]
        return [address for address in addresses if isinstance(address, str) and _is_address(address)]

    def apply(self, frames: Sequence[bytes]) -> None:
        """Publish the events of one message. A message that cannot be decoded, or was preceded by a lost one, clears
        the routers' view of the worker. A message without exactly four frames is ignored."""
        if len(frames) != 4:
            return
        _, publisher, number, content = frames
        sequence, expected = int.from_bytes(number[:8], "big"), self._next.get(publisher)
        self._next[publisher] = sequence + 1
        events: list[Event] = []
        if expected is not None and sequence != expected:
            events.append(AllBlocksCleared())  # some were lost, and may have removed blocks
        try:
            updates = _EVENTS.decode(_ENVELOPE.decode(content[_HEAD_BYTES:]).payload)
        except msgspec.MsgspecError as error:
            logger.warning("an event of worker %x cannot be read: %s", self._worker_id, error)
            updates, events = [], [AllBlocksCleared()]
        for update in updates:
            if update.worker_id == self._worker_id and update.storage_tier == "device":
                events += self._translate(update.event.data)
        if events:
            self._publisher.publish(events)

    def _translate(self, change: _Change | str) -> list[Event]:
        if isinstance(change, str):
            return [AllBlocksCleared()] if change == "cleared" else []
        if change.removed is not None:
            return [BlockRemoved(block_hashes=list(change.removed.block_hashes))]
        if change.stored is None:
            return []
        names, tokens = list[int | bytes](), list[int]()
        for block in change.stored.blocks:
            if (block_tokens := self._blocks.get(block.tokens_hash)) is None:
                break
            names.append(block.block_hash)
            tokens += block_tokens
        size, parent = self._blocks.block_size, change.stored.parent_hash
        if not names:
            return []
        return [BlockStored(block_hashes=names, parent_block_hash=parent, token_ids=tokens, block_size=size)]


def _inner(row: dict[str, Any], *names: str) -> dict[str, Any]:
    for name in names:
        value = row.get(name)
        row = value if isinstance(value, dict) else {}
    return row


def _is_address(text: str) -> bool:
    try:
        return bool(require_endpoint(text, _TOPIC))
    except ConfigError:
        return False
