"""KV blocks in a Mooncake Store: `mooncake://master:50051`.

Owns this instance's client, which lends `segment_bytes` of its memory to the store and reads from the memory of other
clients; blocks in its memory are lost when it ends. This is the only module of the stores that imports Mooncake.
Mooncake's calls block: they run on a thread with copies of the caller's memory, and a call that does not return is
abandoned. The capacity of the store is the memory that its clients lend. The master evicts blocks, except hard-pinned
ones. Mooncake has no authentication: use it only in networks that you trust.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.dependencies import require_library
from kvferry.core.errors import ConfigError, StoreError
from kvferry.store.base import (
    MAX_NOTE_BYTES,
    Block,
    BlockRead,
    PutResult,
    SharedStore,
    StoreBytes,
    StoreFull,
    StoreOptions,
    require_short_note,
)
from kvferry.store.record import CorruptBlock
from kvferry.store.threads import Stop, Threads

logger = logging.getLogger(__name__)

EXISTS, NO_ROOM = 1, (-200, -10)
"""Mooncake's result codes: of `is_exist`, and of a put for which there is no memory (no handle, buffer overflow)."""
_EXPIRY_BYTES = 8
BATCH_BYTES = 8 * 2**20
"""Maximum bytes of encoded blocks in one call, and of encoded blocks that wait for the client."""


class MooncakeOptions(StoreOptions, frozen=True, kw_only=True):
    """`segment_bytes`: memory that this instance lends to the store; `buffer_bytes`: the client's memory for reads and
    writes; `host`: this machine, as other clients reach it; `protocol`, `device_name`, `metadata`: as Mooncake's
    `setup` takes them."""

    segment_bytes: StoreBytes = 2**30
    buffer_bytes: StoreBytes = 2**28
    host: str = "127.0.0.1"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device_name: str = ""
    metadata: str = "P2PHANDSHAKE"

    def check(self, location: str) -> None:
        """Raise `ConfigError` unless the location has a host and a port, and Mooncake is installed."""
        host, colon, port = location.removeprefix("//").rpartition(":")
        if not (location.startswith("//") and host and colon and port.isdigit()):
            raise ConfigError(f"store mooncake:{location}: name the master as in mooncake://host:50051")
        require_library("store mooncake", "mooncake-transfer-engine", "mooncake", ["mooncake.store"])

    def shared_name(self, location: str) -> str:
        """The same name for all masters: any two addresses may be the same master."""
        return "mooncake"


class MooncakeStore(SharedStore):
    """A store in the memory of Mooncake clients. `location`: the master's address, `//host:port`."""

    close_s = 5.0
    """Maximum seconds that `close` waits for the client."""

    options_type = MooncakeOptions
    options: MooncakeOptions
    cancels_at_once = True

    def __init__(
        self,
        location: str,
        options: MooncakeOptions,
        layout: KVLayout,
        connect: Callable[[str, MooncakeOptions], Any] | None = None,
    ) -> None:
        """`connect`: makes the client of `open`, `connect_client` by default."""
        super().__init__(location, options, layout)
        self._connect_client = connect or connect_client
        self._prefix = f"kvferry/{layout.fingerprint()}.{options.codec}/"
        self._threads = Threads(1, "kvferry-mooncake-store")
        self._codec_threads = Threads(1, "kvferry-mooncake-codec")
        self._client: Any = None
        self._pinned: set[BlockHash] = set()
        """The blocks that this instance has pinned, for its share of the memory that it lends. A block may no longer be
        pinned: it may have been lost, or unpinned by another instance."""

    async def open(self) -> None:
        """Connect. Raises `StoreError` if the master does not answer."""
        await self._threads.run(lambda stop: self._connect())

    async def close(self) -> None:
        """Disconnect, and free the memory that this instance lent. Waits for a master that hangs for at most `close_s`
        seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.close_s):
                await self._threads.run(lambda stop: self._disconnect())
        self._codec_threads.close()
        self._threads.close()

    async def match(self, hashes: Sequence[BlockHash]) -> int:
        return await self._threads.run(lambda stop: self._match(hashes))

    async def get(self, reads: Sequence[BlockRead]) -> list[bool]:
        """Reads in batches that fit in a quarter of the client's buffer, and let other calls run in between."""
        part_size = max(1, min(BATCH_BYTES, self.options.buffer_bytes // 4) // self.records.max_record_bytes)
        hits: list[bool] = []
        for first in range(0, len(reads), part_size):
            hits += await self._get(reads[first : first + part_size])
        return hits

    async def put(self, blocks: Sequence[Block]) -> list[PutResult]:
        """Makes one call for each block, with a copy of it."""
        part_size = max(1, BATCH_BYTES // self.records.max_record_bytes)
        outcomes: list[PutResult] = []
        for first in range(0, len(blocks), part_size):
            outcomes += await self._put_part(blocks[first : first + part_size])
        return outcomes

    async def _put_part(self, blocks: Sequence[Block]) -> list[PutResult]:
        records = await self._codec_threads.run(lambda stop: self._encode(blocks, stop))
        return await self._threads.run(lambda stop: [self._put(*record) for record in records])

    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        """Writes each block again, hard-pinned: Mooncake cannot pin a block that exists. Blocks that this instance has
        pinned before are written again too, since they may have been lost and stored again, or unpinned by others,
        which the master does not report. If the process ends between removing and writing, the block is lost."""
        return await self._threads.run(lambda stop: self._pin_all(hashes))

    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        """Writes each block again, without the pin."""
        self._pinned.difference_update(hashes)
        return await self._threads.run(lambda stop: sum(self._rewrite(name, False) for name in hashes))

    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        """Removes blocks even while others read them."""
        self.activity.removed(hashes)
        self._pinned.difference_update(hashes)
        return await self._threads.run(lambda stop: sum(self._remove(self._key(name)) for name in hashes))

    # Notes: time of expiry (8 bytes, Unix time in ms), then the content.

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        require_short_note(content)
        expiry = round((SYSTEM_CLOCK.wall() + ttl_s) * 1000).to_bytes(_EXPIRY_BYTES, "little")
        code = await self._threads.run(lambda stop: self._connected_client.upsert(_note_key(name), expiry + content))
        if code:
            raise StoreError(f"the Mooncake master at {self.location} did not store a note: code {code}")

    async def read_note(self, name: str) -> bytes | None:
        note = await self._threads.run(lambda stop: self._read(_note_key(name), _EXPIRY_BYTES + MAX_NOTE_BYTES)) or b""
        if len(note) < _EXPIRY_BYTES or int.from_bytes(note[:_EXPIRY_BYTES], "little") < SYSTEM_CLOCK.wall() * 1000:
            return None
        return note[_EXPIRY_BYTES : _EXPIRY_BYTES + MAX_NOTE_BYTES]

    async def remove_note(self, name: str) -> None:
        await self._threads.run(lambda stop: self._remove(_note_key(name)))

    # On the thread.

    def _connect(self) -> None:
        if self._client is not None:
            return
        self._client = self._connect_client(self.location.removeprefix("//"), self.options)

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @property
    def _connected_client(self) -> Any:
        if self._client is None:
            raise StoreError("the Mooncake Store is not open")
        return self._client

    def _key(self, block_hash: BlockHash) -> str:
        return self._prefix + block_hash.hex()

    def _match(self, hashes: Sequence[BlockHash]) -> int:
        if not hashes:
            return 0
        codes: list[int] = self._connected_client.batch_is_exist([self._key(name) for name in hashes])
        if any(code < 0 for code in codes):
            raise StoreError(f"the Mooncake master at {self.location} does not answer: code {min(codes)}")
        return next((index for index, code in enumerate(codes) if code != EXISTS), len(codes))

    def _read(self, key: str, max_bytes: int) -> bytes | None:
        """A value of at most `max_bytes` bytes. Empty: there is none. None: it is longer, and is not fetched."""
        if self._connected_client.is_exist(key) != EXISTS:
            return b""
        if self._connected_client.get_size(key) > max_bytes:
            return None
        value: bytes = self._connected_client.get(key)
        return value

    async def _get(self, reads: Sequence[BlockRead]) -> list[bool]:
        sizes, buffers = await self._threads.run(
            lambda stop: self._fetch([self._key(read.block_hash) for read in reads])
        )
        results = await self._codec_threads.run(
            lambda stop: [self._decode(read, sizes, buffers, stop) for read in reads]
        )
        damaged = [read.block_hash for read, result in zip(reads, results, strict=True) if result is None]
        if damaged:
            await self._threads.run(lambda stop: [self._remove(self._key(name)) for name in damaged])
            self.activity.removed(damaged)
        return [bool(result) for result in results]

    def _fetch(self, keys: Sequence[str]) -> tuple[dict[str, int], dict[str, Any]]:
        """Sizes of the values that exist; and their contents, in the client's memory, if they are not too long for a
        block."""
        sizes = self._sizes(keys)
        fetched = [key for key, size in sizes.items() if size <= self.records.max_record_bytes]
        return sizes, dict(
            zip(fetched, self._connected_client.batch_get_buffer(fetched), strict=True)
        ) if fetched else {}

    def _sizes(self, keys: Sequence[str]) -> dict[str, int]:
        """Bytes of each value that exists."""
        codes = self._connected_client.batch_is_exist(list(keys))
        existing = [key for key, code in zip(keys, codes, strict=True) if code == EXISTS]
        descriptors: dict[str, Any] = self._connected_client.batch_get_replica_desc(existing) if existing else {}
        return {
            key: max([*map(_memory_bytes, replicas), 0]) or self._connected_client.get_size(key)
            for key, replicas in descriptors.items()
        }

    def _decode(self, read: BlockRead, sizes: dict[str, int], buffers: dict[str, Any], stop: Stop) -> bool | None:
        """True if the block was stored and verified; None: it is damaged. A buffer may change while it is read; None in
        `buffers`: the block disappeared."""
        key = self._key(read.block_hash)
        buffer, size = buffers.get(key), sizes.get(key, 0)
        if buffer is None and size <= self.records.max_record_bytes:
            self.activity.count(missing_blocks=1)
            self.activity.removed([read.block_hash])
            return False
        try:
            if buffer is None:
                raise CorruptBlock("it is longer than any block of this layout")
            with memoryview(buffer).cast("B") as record:
                is_hit = self.records.decode(record, read.block_hash, read.into, stop.write)
        except CorruptBlock:
            self.activity.count(corrupt_blocks=1)
            return None
        self.activity.count(loaded_blocks=is_hit, read_bytes=is_hit * size)
        return is_hit

    def _encode(self, blocks: Sequence[Block], stop: Stop) -> list[tuple[BlockHash, bytes]]:
        return [
            (block.block_hash, b"".join(self.records.encode(block.block_hash, block.layers)))
            for block in blocks
            if not stop.requested
        ]

    def _put(self, block_hash: BlockHash, record: bytes) -> PutResult:
        key = self._key(block_hash)
        if self._connected_client.is_exist(key) == EXISTS:
            self.activity.count(present_blocks=1)
            self.activity.stored([block_hash])
            return PutResult.PRESENT
        code = self._connected_client.put(key, record)
        if code in NO_ROOM:
            self.activity.count(dropped_blocks=1)
            self.activity.warn_full(StoreFull("no client of the Mooncake Store has room; lend it more (segment_bytes)"))
            return PutResult.DROPPED
        if code:
            self.activity.count(dropped_blocks=1)
            raise StoreError(f"the Mooncake Store of the master at {self.location} did not store a block: code {code}")
        self.activity.count(stored_blocks=1, written_bytes=len(record))
        self.activity.stored([block_hash])
        return PutResult.STORED

    def _pin_all(self, hashes: Sequence[BlockHash]) -> int:
        pinned = list(self._pinned)
        codes = self._connected_client.batch_is_exist([self._key(name) for name in pinned]) if pinned else []
        self._pinned = {name for name, code in zip(pinned, codes, strict=True) if code == EXISTS}
        return sum(self._pin(name) for name in hashes)

    def _pin(self, block_hash: BlockHash) -> bool:
        max_bytes = self.options.pinned_share * self.options.segment_bytes
        if len(self._pinned | {block_hash}) * self.records.max_record_bytes > max_bytes:
            return False
        if not self._rewrite(block_hash, True):
            self._pinned.discard(block_hash)
            return False
        self._pinned.add(block_hash)
        return True

    def _rewrite(self, block_hash: BlockHash, pinned: bool) -> bool:
        from mooncake.store import ReplicateConfig

        record = self._read(self._key(block_hash), self.records.max_record_bytes)
        if not record:
            return False
        config = ReplicateConfig()
        config.with_hard_pin = pinned
        key = self._key(block_hash)
        self._remove(key)
        code = self._connected_client.put(key, record, config)
        if not code:
            return True
        logger.warning(
            "the Mooncake Store of the master at %s did not pin or unpin a block: code %d", self.location, code
        )
        if self._connected_client.put(key, record):  # the block is unchanged, so it fits into the memory that it had
            self.activity.removed([block_hash])
        return False

    def _remove(self, key: str) -> bool:
        return bool(self._connected_client.is_exist(key) == EXISTS and self._connected_client.remove(key, True) == 0)


def connect_client(master: str, options: MooncakeOptions) -> Any:
    """A client that has joined the store of the master at this address. Blocks. Raises `StoreError`."""
    os.environ.setdefault("GLOG_minloglevel", "2")  # otherwise, it logs every key that it does not find
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    code = client.setup(
        options.host,
        options.metadata,
        options.segment_bytes,
        options.buffer_bytes,
        options.protocol,
        options.device_name,
        master,
    )
    if code:
        raise StoreError(f"cannot join the Mooncake Store of the master at {master}: code {code}")
    return client


def _memory_bytes(replica: Any) -> int:
    """Bytes of a replica in memory; 0 if the replica is on a disk."""
    return int(replica.get_memory_descriptor().buffer_descriptor.size) if replica.is_memory_replica() else 0


def _note_key(name: str) -> str:
    return f"kvferry/note/{hashlib.sha256(name.encode()).hexdigest()}"
