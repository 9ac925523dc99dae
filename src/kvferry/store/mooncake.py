"""KV blocks in a Mooncake Store: `mooncake://master:50051`.

Owns this instance's client, which lends `segment_bytes` of its memory to the store, and reads from the other clients';
what lies in its memory goes with it. The only place of the stores that imports Mooncake. Its calls block, and run on a
thread; one that was begun is waited for. What bounds the store is the memory that clients lend; the master evicts, and
leaves hard-pinned blocks alone. It authenticates nobody: for networks you trust.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from typing import Any, Literal

from kvferry.core.block_hash import BlockHash
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.dependencies import require_library
from kvferry.core.errors import ConfigError, StoreError
from kvferry.core.layout import KVLayout
from kvferry.store.base import MAX_NOTE_BYTES, Block, KVStore, Put, Read, StoreFull, StoreOptions
from kvferry.store.record import CorruptBlock
from kvferry.store.threads import Stop, Threads

log = logging.getLogger(__name__)

EXISTS, NO_ROOM = 1, (-200, -10)
"""Mooncake's codes: of `is_exist`, and of a put that finds no memory (no handle, buffer overflow)."""
_EXPIRY_BYTES = 8


class MooncakeOptions(StoreOptions, frozen=True, kw_only=True):
    """`segment_bytes`: memory that this instance lends to the store; `buffer_bytes`: for what it reads and writes."""

    segment_bytes: int = 2**30
    buffer_bytes: int = 2**28
    host: str = "127.0.0.1"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device_name: str = ""
    metadata: str = "P2PHANDSHAKE"


class MooncakeStore(KVStore):
    """See the module. `location`: the master's address."""

    options_type = MooncakeOptions
    options: MooncakeOptions

    def __init__(self, location: str, options: MooncakeOptions, layout: KVLayout) -> None:
        super().__init__(location, options, layout)
        self._prefix = f"kvferry/{layout.fingerprint()}.{options.codec}/"
        self._threads = Threads(1, "kvferry-mooncake-store")
        self._client: Any = None

    @classmethod
    def check(cls, location: str, options: Any) -> None:
        """A host and a port."""
        host, colon, port = location.removeprefix("//").rpartition(":")
        if not (location.startswith("//") and host and colon and port.isdigit()):
            raise ConfigError(f"store mooncake:{location}: name the master as in mooncake://host:50051")
        require_library("store mooncake", "mooncake-transfer-engine", "mooncake", ["mooncake.store"])

    async def open(self) -> None:
        """Join. Raises `StoreError` when the master is not there."""
        await self._threads.ask(self._join)

    async def close(self) -> None:
        """Leave, and with this instance the memory that it lent."""
        await self._threads.ask(self._leave)
        self._threads.close()

    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """One call."""
        return await self._threads.ask(lambda: self._match(hashes))

    async def get(self, reads: Sequence[Read]) -> list[bool]:
        """One call a block."""
        return await self._threads.run(lambda stop: [not stop.requested and self._get(read) for read in reads])

    async def put(self, blocks: Sequence[Block]) -> list[Put]:
        """One call a block."""
        return await self._threads.run(lambda stop: [self._put(block, stop) for block in blocks])

    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        """Written anew, hard-pinned: Mooncake has no other way, an upsert leaves the block as evictable as it was."""
        return await self._threads.ask(lambda: sum(self._write_again(name, True) for name in hashes))

    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        """Written anew, not pinned."""
        return await self._threads.ask(lambda: sum(self._write_again(name, False) for name in hashes))

    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        """Whoever reads them meanwhile."""
        self.note_removed(hashes)
        return await self._threads.ask(lambda: sum(self._remove(self._key(name)) for name in hashes))

    # Notes: the first bytes say until when (Unix time, ms).

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        """In place of one that is there."""
        if len(content) > MAX_NOTE_BYTES:
            raise StoreError(f"a note of {len(content)} bytes, and {MAX_NOTE_BYTES} is the most")
        over = round((SYSTEM_CLOCK.wall() + ttl_s) * 1000).to_bytes(_EXPIRY_BYTES, "little")
        code = await self._threads.ask(lambda: self._joined.upsert(_note_key(name), over + content))
        if code:
            raise StoreError(f"the Mooncake master at {self.location} took no note: code {code}")

    async def read_note(self, name: str) -> bytes | None:
        """Unless its time is over."""
        found = await self._threads.ask(lambda: self._read(_note_key(name), _EXPIRY_BYTES + MAX_NOTE_BYTES)) or b""
        if len(found) < _EXPIRY_BYTES or int.from_bytes(found[:_EXPIRY_BYTES], "little") < SYSTEM_CLOCK.wall() * 1000:
            return None
        return found[_EXPIRY_BYTES : _EXPIRY_BYTES + MAX_NOTE_BYTES]

    async def remove_note(self, name: str) -> None:
        """Whoever reads it meanwhile."""
        await self._threads.ask(lambda: self._remove(_note_key(name)))

    # On the thread.

    def _join(self) -> None:
        if self._client is not None:
            return
        os.environ.setdefault("GLOG_minloglevel", "2")  # it reports every key that is not there
        from mooncake.store import MooncakeDistributedStore

        options, master = self.options, self.location.removeprefix("//")
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
        self._client = client

    def _leave(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @property
    def _joined(self) -> Any:
        if self._client is None:
            raise StoreError("the Mooncake Store is not open")
        return self._client

    def _key(self, block_hash: BlockHash) -> str:
        return self._prefix + block_hash.hex()

    def _match(self, hashes: Sequence[BlockHash]) -> int:
        if not hashes:
            return 0
        there: list[int] = self._joined.batch_is_exist([self._key(name) for name in hashes])
        if any(code < 0 for code in there):
            raise StoreError(f"the Mooncake master at {self.location} does not answer: code {min(there)}")
        return next((index for index, code in enumerate(there) if code != EXISTS), len(there))

    def _read(self, key: str, most: int) -> bytes | None:
        """Empty: there is none. None: there is something longer than `most` bytes, which is not fetched."""
        if self._joined.is_exist(key) != EXISTS:
            return b""
        if self._joined.get_size(key) > most:
            return None
        found: bytes = self._joined.get(key)
        return found

    def _get(self, read: Read) -> bool:
        record = self._read(self._key(read.block_hash), self.records.max_record_bytes)
        if record == b"":
            self.count(missing_blocks=1)
            self.note_removed([read.block_hash])
            return False
        try:
            if record is None:
                raise CorruptBlock("it is longer than any block of this layout")
            self.records.decode(memoryview(record), read.block_hash, read.into)
        except CorruptBlock:
            self.count(corrupt_blocks=1)
            self._remove(self._key(read.block_hash))
            self.note_removed([read.block_hash])
            return False
        self.count(loaded_blocks=1, read_bytes=len(record))
        return True

    def _put(self, block: Block, stop: Stop) -> Put:
        key = self._key(block.block_hash)
        if stop.requested:
            return Put.DROPPED
        if self._joined.is_exist(key) == EXISTS:
            self.count(present_blocks=1)
            self.note_kept([block.block_hash])
            return Put.PRESENT
        record = b"".join(self.records.encode(block.block_hash, block.layers))
        code = self._joined.put(key, record)
        if code in NO_ROOM:
            self.count(dropped_blocks=1)
            self.warn_full(StoreFull("no client of the Mooncake Store has room; lend it more (segment_bytes)"))
            return Put.DROPPED
        if code:
            self.count(dropped_blocks=1)
            raise StoreError(f"the Mooncake Store of the master at {self.location} kept no block: code {code}")
        self.count(stored_blocks=1, written_bytes=len(record))
        self.note_kept([block.block_hash])
        return Put.STORED

    def _write_again(self, block_hash: BlockHash, pinned: bool) -> bool:
        from mooncake.store import ReplicateConfig

        record = self._read(self._key(block_hash), self.records.max_record_bytes)
        if not record:
            return False
        config = ReplicateConfig()
        config.with_hard_pin = pinned
        key = self._key(block_hash)
        self._remove(key)
        code = self._joined.put(key, record, config)
        if not code:
            return True
        log.warning("the Mooncake Store of the master at %s pinned or unpinned no block: code %d", self.location, code)
        if self._joined.put(key, record):  # as it was, into the room that it had
            self.note_removed([block_hash])
        return False

    def _remove(self, key: str) -> bool:
        return bool(self._joined.is_exist(key) == EXISTS and self._joined.remove(key, True) == 0)


def _note_key(name: str) -> str:
    return f"kvferry/note/{hashlib.sha256(name.encode()).hexdigest()}"
