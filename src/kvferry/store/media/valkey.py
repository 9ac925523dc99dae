"""KV blocks on a Valkey or Redis server: `valkey://[[user]:password@]host:port/database`, or `unix:///path/to.socket`.

Owns the connections. A batch is one pipeline. A block is one value, `kvferry:{<layout fingerprint>.<codec>}:<block
hash>`, with a time to live of `ttl_s` unless it is pinned.

The capacity is `max_bytes` (a script on the server evicts the least recently used blocks, see `valkey_scripts`; the
option must be the same on all instances), or the server's own `maxmemory` (with `volatile-lru`, the server does not
evict pinned blocks).

In a cluster, the slot of a key determines its node, and a script sees the keys of one slot only. So the blocks are
divided among shards by their hash, each with a slot of its own (`…{<layout fingerprint>.<codec>.<shard>}…`), its own
scripts' keys, and an equal part of `max_bytes`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import StoreError
from kvferry.store.base import MAX_NOTE_BYTES, Block, BlockRead, PutResult, SharedStore, StoreFull, require_short_note
from kvferry.store.media.valkey_client import (
    TlsValkeyOptions,
    ValkeyOptions,
    close_client,
    make_client,
    num_primaries,
    translated_errors,
)
from kvferry.store.media.valkey_scripts import FORGET, PIN, UNPIN, USE_AND_EVICT
from kvferry.store.record import CorruptBlock
from kvferry.store.threads import Stop, Threads

BATCH_BYTES = 8 * 2**20
"""Maximum bytes of blocks in one pipeline: a longer one waits in the server's memory, which costs more than the round
trips."""
MAX_SHARDS, MIN_SHARD_BLOCKS = 64, 16
"""Shards of a layout in a cluster; fewer where `max_bytes` has no room for so many blocks in each."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Shard:
    """The blocks whose keys are in one slot. `prefix`: beginning of these keys; `keys`: the keys for the scripts."""

    prefix: bytes
    keys: tuple[str, ...]

    @classmethod
    def of(cls, tag: str) -> Shard:
        """The shard whose slot this tag determines."""
        prefix = f"kvferry:{{{tag}}}:"
        return cls(prefix.encode(), tuple(f"{prefix}{name}" for name in ("index", "sizes", "pinned", "total")))


class ValkeyStore(SharedStore):
    """A store in a Valkey or Redis server, which other instances may share: one value for each block."""

    options_type = ValkeyOptions
    options: ValkeyOptions
    cancels_at_once = True

    def __init__(self, location: str, options: ValkeyOptions, layout: KVLayout) -> None:
        super().__init__(location, options, layout)
        self.address = location.rpartition("@")[2].removeprefix("//")
        self._client = make_client(location, options)
        tag, num_shards = f"{layout.fingerprint()}.{options.codec}", 1
        if options.cluster:
            num_shards = MAX_SHARDS
            if options.max_bytes is not None:
                room = options.max_bytes // (MIN_SHARD_BLOCKS * self.records.max_record_bytes)
                num_shards = max(1, min(MAX_SHARDS, room))
        self._shards = [Shard.of(f"{tag}.{number}" if options.cluster else tag) for number in range(num_shards)]
        self._threads = Threads(2, "kvferry-valkey-codec")
        self._use_and_evict = self._client.register_script(USE_AND_EVICT)
        self._pin = self._client.register_script(PIN)
        self._unpin = self._client.register_script(UNPIN)
        self._forget = self._client.register_script(FORGET)

    async def open(self) -> None:
        """Does nothing: the store connects when it is first used, and again after a connection is lost."""

    async def close(self) -> None:
        """Close all connections, and end the threads that encode and decode."""
        self._threads.close()
        async with self._translated():
            await close_client(self._client)

    # Blocks.

    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """Sends one pipeline of STRLEN."""
        sizes = await self._sizes(hashes)
        return sizes.index(0) if 0 in sizes else len(sizes)

    async def get(self, reads: Sequence[BlockRead]) -> list[bool]:
        """Sends one pipeline of GETRANGE for each `BATCH_BYTES`."""
        hits: list[bool] = []
        for part in self._parts(reads):
            hits += await self._get(part)
        return hits

    async def put(self, blocks: Sequence[Block]) -> list[PutResult]:
        """Blocks that are stored already are not sent."""
        sizes = await self._sizes([block.block_hash for block in blocks])
        new = {block.block_hash: block for block, size in zip(blocks, sizes, strict=True) if not size}
        dropped: set[BlockHash] = set()
        with suppress(StoreFull):  # their writer may have been killed before it added them to the index
            await self._make_room([(block.block_hash, size) for block, size in zip(blocks, sizes, strict=True) if size])
        for part in self._parts(list(new.values())):
            try:
                dropped |= await self._put(part)
            except StoreFull as error:
                self.activity.warn_full(error)
                dropped |= {block.block_hash for block in part}
        outcomes = [
            PutResult.PRESENT if size else PutResult.DROPPED if block.block_hash in dropped else PutResult.STORED
            for block, size in zip(blocks, sizes, strict=True)
        ]
        self.activity.count(
            present_blocks=outcomes.count(PutResult.PRESENT), stored_blocks=outcomes.count(PutResult.STORED)
        )
        self.activity.stored(
            block.block_hash for block, out in zip(blocks, outcomes, strict=True) if out is not PutResult.DROPPED
        )
        return outcomes

    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        """Removes the time to live and adds the block to the set of pinned ones, in one step on the server."""
        if not hashes:
            return 0
        max_pinned_bytes = await self._pinnable_bytes()

        async def pin(shard: Shard, hashes: Sequence[BlockHash]) -> int:
            return int(
                await self._pin(
                    keys=shard.keys, args=[max_pinned_bytes, shard.prefix, *(name.hex() for name in hashes)]
                )
            )

        return sum(await self._on_each(hashes, pin))

    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        async def unpin(shard: Shard, hashes: Sequence[BlockHash]) -> int:
            arguments = [_ms(self.options.ttl_s), shard.prefix, *(name.hex() for name in hashes)]
            return int(await self._unpin(keys=shard.keys, args=arguments))

        return sum(await self._on_each(hashes, unpin))

    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        async def delete(shard: Shard, hashes: Sequence[BlockHash]) -> int:
            count: int = await self._client.unlink(*map(self._key, hashes))
            await self._forget(keys=shard.keys, args=[name.hex() for name in hashes])
            return count

        count = sum(await self._on_each(hashes, delete))
        self.activity.removed(hashes)
        return count

    # Notes.

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        require_short_note(content)
        async with self._translated():
            await self._client.set(_note_key(name), content, px=_ms(ttl_s))

    async def read_note(self, name: str) -> bytes | None:
        async with self._translated():
            note: bytes = await self._client.getrange(_note_key(name), 0, MAX_NOTE_BYTES)
        return note or None

    async def remove_note(self, name: str) -> None:
        async with self._translated():
            await self._client.unlink(_note_key(name))

    # One batch.

    async def _sizes(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Bytes of each record; 0: there is none."""
        if not hashes:
            return []
        async with self._translated(), self._client.pipeline(transaction=False) as pipeline:
            for block_hash in hashes:
                pipeline.strlen(self._key(block_hash))
            return [size or 0 for size in _readable(await pipeline.execute(raise_on_error=False))]

    async def _get(self, reads: Sequence[BlockRead]) -> list[bool]:
        async with self._translated(), self._client.pipeline(transaction=False) as pipeline:
            for read in reads:
                # At most the size of a block: any client may have written the value.
                pipeline.getrange(self._key(read.block_hash), 0, self.records.max_record_bytes)
            records = _readable(await pipeline.execute(raise_on_error=False))
        hits = await self._threads.run(
            lambda stop: [self._decode(read, record, stop) for read, record in zip(reads, records, strict=True)]
        )
        used = [read.block_hash for read, is_hit in zip(reads, hits, strict=True) if is_hit]
        damaged = [
            read.block_hash
            for read, record, is_hit in zip(reads, records, hits, strict=True)
            if record != b"" and not is_hit
        ]
        with suppress(StoreError):  # the blocks have been read, even if the server is full or has been lost since then
            await self._record_use(damaged, used)
        return hits

    async def _record_use(self, damaged: Sequence[BlockHash], used: Sequence[BlockHash]) -> None:
        if damaged:
            await self.delete(damaged)
        if self.options.max_bytes is not None:
            now = SYSTEM_CLOCK.wall()

            async def record(shard: Shard, hashes: Sequence[BlockHash]) -> None:
                await self._client.zadd(shard.keys[0], {name.hex(): now for name in hashes}, xx=True)

            await self._on_each(used, record)

    def _decode(self, read: BlockRead, record: bytes | None, stop: Stop) -> bool:
        if record == b"":
            self.activity.count(missing_blocks=1)
            self.activity.removed([read.block_hash])
            return False
        try:
            if record is None:
                raise CorruptBlock("a value of another type")
            is_hit = self.records.decode(memoryview(record), read.block_hash, read.into, stop.write)
        except CorruptBlock:
            self.activity.count(corrupt_blocks=1)
            return False
        self.activity.count(loaded_blocks=is_hit, read_bytes=is_hit * len(record))
        return is_hit

    async def _put(self, blocks: Sequence[Block]) -> set[BlockHash]:
        """Store new blocks; returns the blocks for which there is no room. They are added to the eviction index before
        they are written, so that a process that is killed in between leaves no block that is never evicted."""
        records = await self._threads.run(lambda stop: [self._encode(block, stop) for block in blocks])
        names = [block.block_hash for block in blocks]
        try:
            evicted = await self._make_room([(name, len(record)) for name, record in zip(names, records, strict=True)])
            accepted = {name: record for name, record in zip(names, records, strict=True) if name not in evicted}
            await self._set(accepted)
        except StoreError:
            self.activity.count(dropped_blocks=len(blocks))
            with suppress(StoreError):
                await self._forget_missing(names)
            raise
        self.activity.count(written_bytes=sum(map(len, accepted.values())), dropped_blocks=len(blocks) - len(accepted))
        return set(names) - accepted.keys()

    def _encode(self, block: Block, stop: Stop) -> bytes:
        return b"" if stop.requested else b"".join(self.records.encode(block.block_hash, block.layers))

    async def _set(self, records: dict[BlockHash, bytes]) -> None:
        async with self._translated(), self._client.pipeline(transaction=False) as pipeline:
            for name, record in records.items():
                pipeline.set(self._key(name), record, px=_ms(self.options.ttl_s))
            await pipeline.execute()

    async def _forget_missing(self, hashes: Sequence[BlockHash]) -> None:
        sizes = await self._sizes(hashes)
        missing = [name for name, size in zip(hashes, sizes, strict=True) if not size]
        if self.options.max_bytes is not None:

            async def forget(shard: Shard, hashes: Sequence[BlockHash]) -> None:
                await self._forget(keys=shard.keys, args=[name.hex() for name in hashes])

            await self._on_each(missing, forget)

    async def _make_room(self, sizes: Sequence[tuple[BlockHash, int]]) -> set[BlockHash]:
        """Mark these blocks, with their sizes, as used now, and evict blocks beyond `max_bytes`; returns the evicted
        ones."""
        if self.options.max_bytes is None:
            return set()
        bytes_of, now = dict(sizes), SYSTEM_CLOCK.wall()
        max_bytes = self.options.max_bytes // len(self._shards)

        async def use_and_evict(shard: Shard, hashes: Sequence[BlockHash]) -> list[bytes]:
            arguments: list[Any] = [max_bytes, shard.prefix, now]
            for name in hashes:
                arguments += [name.hex(), bytes_of[name]]
            names: list[bytes] = await self._use_and_evict(keys=shard.keys, args=arguments)
            return names

        answers = await self._on_each(list(bytes_of), use_and_evict)
        evicted = {bytes.fromhex(name.decode()) for names in answers for name in names}
        self.activity.count(evicted_blocks=len(evicted))
        self.activity.removed(evicted)
        return evicted

    async def _pinnable_bytes(self) -> int:
        """Maximum bytes of a shard that may be pinned: `pinned_share` of its part of `max_bytes` or, if that is not
        set, of the servers' `maxmemory`. -1: no limit is known. Each tensor-parallel rank counts the pins of its own
        layout only, and so gets an equal part of `maxmemory`."""
        max_bytes: float | None = self.options.max_bytes
        if max_bytes is None:
            with suppress(StoreError):  # not every user may call INFO
                async with self._translated():
                    memory = (await self._client.info("memory")).get("maxmemory", 0)
                    max_bytes = memory * num_primaries(self._client) / self.layout.tp_size
        return int(self.options.pinned_share * max_bytes / len(self._shards)) if max_bytes else -1

    # The server.

    def _translated(self) -> AbstractAsyncContextManager[None]:
        return translated_errors(self.address, in_cluster=self.options.cluster)

    def _shard(self, block_hash: BlockHash) -> Shard:
        return self._shards[int.from_bytes(block_hash[:4], "big") % len(self._shards)]

    def _key(self, block_hash: BlockHash) -> bytes:
        return self._shard(block_hash).prefix + block_hash.hex().encode()

    async def _on_each(
        self, hashes: Sequence[BlockHash], act: Callable[[Shard, Sequence[BlockHash]], Awaitable[Result]]
    ) -> list[Result]:
        """The results of `act` for each shard that has some of the blocks, with these blocks. Raises `StoreError`."""
        parts = dict[Shard, list[BlockHash]]()
        for block_hash in hashes:
            parts.setdefault(self._shard(block_hash), []).append(block_hash)
        async with self._translated():
            acts = (act(shard, part) for shard, part in parts.items())
            results = await asyncio.gather(*acts, return_exceptions=True)  # so that no task runs on without a waiter
            if errors := [result for result in results if isinstance(result, BaseException)]:
                raise errors[0]
        return [result for result in results if not isinstance(result, BaseException)]

    def _parts(self, items: Sequence[Any]) -> Iterator[Sequence[Any]]:
        part_size = max(1, BATCH_BYTES // self.records.max_record_bytes)
        return (items[first : first + part_size] for first in range(0, len(items), part_size))


class TlsValkeyStore(ValkeyStore):
    """`valkeys://` and `rediss://`: the same over TLS; the server's certificate is verified."""

    options_type = TlsValkeyOptions


def _readable(answers: Sequence[Any]) -> list[Any]:
    """The server's answers, with None for each key whose value is of another type and so not a block."""
    for answer in answers:
        if isinstance(answer, Exception) and "WRONGTYPE" not in str(answer):
            raise answer
    return [None if isinstance(answer, Exception) else answer for answer in answers]


def _note_key(name: str) -> str:
    return f"kvferry:note:{hashlib.sha256(name.encode()).hexdigest()}"


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
