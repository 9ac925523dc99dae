"""KV blocks as files: `file:/path` keeps `/path/<layout fingerprint>/<first byte>/<block hash>.kv`, one file for each
block. With a codec, the first directory is `<layout fingerprint>.<codec>`.

All processes that use the directory share it, without a lock or an index. A file appears by rename, complete, so that a
crash leaves no partial block, only a temporary file that another process removes later. An empty `<block hash>.pin`
beside a block pins it.

With `max_bytes`, blocks are removed in the order of the eviction policy until a tenth of the room is free. Each process
has its own policy. The policy knows the uses by its process, and infers uses by other processes from the directory:
which files exist, and their modification times, which reads renew. A process scans the directory each time it has
written 1/32 of `max_bytes`, so several writers may exceed the limit by that much each. The limit applies to the whole
directory with all its layouts.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ConfigError, StoreError
from kvferry.store.access import ACCESS, FileAccess
from kvferry.store.base import (
    Block,
    BlockRead,
    LayerStore,
    PutResult,
    SharedStore,
    StoreBytes,
    StoreFull,
    StoreOptions,
    StoreThreads,
)
from kvferry.store.disk import DISK, Disk, NotAFile
from kvferry.store.machine import MACHINE, Machine
from kvferry.store.media.file_notes import NoteFiles
from kvferry.store.media.file_room import PIN_SUFFIX, SUFFIX, FileRoom, Removed, folder_name, path_of
from kvferry.store.record import CorruptBlock
from kvferry.store.threads import Stop

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileOptions(StoreOptions, frozen=True, kw_only=True):
    """`max_bytes`: maximum bytes of all blocks under the directory; None: no limit. `fsync`: a stored block survives a
    power failure. `access` "group": the group may read and write the files. `threads`: maximum number of files that are
    read or written at a time."""

    max_bytes: StoreBytes | None = None
    eviction: str = "lru"
    fsync: bool = False
    access: Literal["owner", "group"] = "owner"
    threads: StoreThreads = 4

    def check(self, location: str) -> None:
        """Raise `ConfigError` unless the location is a path that is not a file."""
        path = path_of(location)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"store file:{location}: {path} is not a directory")

    def check_here(self, location: str) -> None:
        """Raise `ConfigError` unless the directory exists or can be made, and this process can write a file there. A
        full disk is not an error."""
        root = path_of(location)
        _make_folder(DISK, root, root, ACCESS[self.access])
        try:
            tempfile.TemporaryFile(dir=root).close()
        except OSError as error:
            if error.errno in FULL:
                return
            raise ConfigError(f"cannot keep KV blocks in {root}: {error.strerror}") from error

    def shared_name(self, location: str) -> str:
        """The same name for all directories: any two paths may lead to the same directory."""
        return "file"


class FileStore(SharedStore, LayerStore):
    """A store in a directory, which other processes and machines may share: one file for each block."""

    options_type = FileOptions
    options: FileOptions
    cancels_at_once = True

    def __init__(self, location: str, options: FileOptions, layout: KVLayout, machine: Machine = MACHINE) -> None:
        super().__init__(location, options, layout, machine)
        self.root = path_of(location)
        self._folder = self.root / folder_name(layout.fingerprint(), self.records.codec.name)
        self._access = ACCESS[options.access]
        self._num_threads = max(1, options.threads)
        self._local = threading.local()
        self._disk = machine.disk
        self._threads = machine.threads(self._num_threads, "kvferry-file-store")
        self._match_threads = machine.threads(4, "kvferry-file-match", moves_blocks=False)
        """Threads for calls that take very little time if the disk answers, so that these calls do not wait for
        blocks."""
        self._notes = NoteFiles(self.root / "notes", self._access, self._disk)
        block_bytes = self.records.max_record_bytes
        self._room = FileRoom(self.root, options.max_bytes, options.eviction, block_bytes, disk=self._disk)

    async def open(self) -> None:
        """Make the directory of this layout. Raises `ConfigError` if that fails."""
        await self._threads.run(lambda stop: _make_folder(self._disk, self._folder, self.root, self._access))

    async def close(self) -> None:
        """End the threads. No file stays open."""
        self._threads.close()
        self._match_threads.close()

    # Blocks.

    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """Makes one `stat` call for each block."""
        return await self._match_threads.run(lambda stop: self._match(hashes))

    async def get(self, reads: Sequence[BlockRead]) -> list[bool]:
        """One `preadv` for each block. The threads read at the same time, because a disk with one request at a time is
        half idle."""
        return await self._read_in_parallel(reads, self._get)

    async def get_layer(self, layer: int, reads: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        """Two `preadv` for each block: the header and the layer."""
        return await self._read_in_parallel(reads, lambda read, stop: self._get_layer(read[0], layer, read[1], stop))

    async def put(self, blocks: Sequence[Block]) -> list[PutResult]:
        """Each block is written to a temporary file beside the final one, and renamed."""
        return await self._threads.run(lambda stop: self._put(blocks, stop))

    async def pin(self, hashes: Sequence[BlockHash]) -> int:
        return await self._threads.run(lambda stop: self._pin(hashes, stop))

    async def unpin(self, hashes: Sequence[BlockHash]) -> int:
        return await self._threads.run(lambda stop: self._unpin(hashes))

    async def delete(self, hashes: Sequence[BlockHash]) -> int:
        return await self._threads.run(lambda stop: sum(self._remove(name) for name in hashes))

    async def finish(self, hashes: Sequence[BlockHash], num_output_tokens: int) -> None:
        """Notify the eviction policy of this process."""
        await self._threads.run(
            lambda stop: self._room.finished([self._path(name) for name in hashes], num_output_tokens)
        )

    # Notes.

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        await self._match_threads.run(lambda stop: self._notes.write(name, content, ttl_s))

    async def read_note(self, name: str) -> bytes | None:
        return await self._match_threads.run(lambda stop: self._notes.read(name))

    async def remove_note(self, name: str) -> None:
        await self._match_threads.run(lambda stop: self._notes.remove(name))

    # Insight.

    def statistics(self) -> dict[str, float]:
        """The counters of this process, and what was under the directory at the last scan."""
        return super().statistics() | self._room.statistics()

    async def _read_in_parallel(self, items: Sequence[Item], read: Callable[[Item, Stop], bool]) -> list[bool]:
        """Read with all threads. Returns or raises only when all threads have ended their calls, or were abandoned."""
        part_size = max(1, -(-len(items) // self._num_threads))

        def work(part: Sequence[Item], stop: Stop) -> list[bool]:
            return [read(item, stop) for item in part]

        parts = [items[first : first + part_size] for first in range(0, len(items), part_size)]
        calls = (self._threads.run(partial(work, part)) for part in parts)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [is_hit for result in results if not isinstance(result, BaseException) for is_hit in result]

    # On the threads.

    def _path(self, block_hash: BlockHash, suffix: str = SUFFIX) -> str:
        name = block_hash.hex()
        return f"{self._folder}/{name[:2]}/{name}{suffix}"

    def _match(self, hashes: Sequence[BlockHash]) -> int:
        for index, block_hash in enumerate(hashes):
            try:
                if not self._disk.is_readable(self._path(block_hash)):
                    return index
            except FileNotFoundError:
                return index
            except OSError as error:
                raise StoreError(f"cannot read the directory {self._folder}: {error.strerror}") from error
        return len(hashes)

    def _get(self, read: BlockRead, stop: Stop) -> bool:
        def decode(file: int, scratch: memoryview) -> int:
            record = scratch[: min(self._disk.num_bytes(file), len(scratch))]
            self._disk.read(file, [record], 0)
            return len(record) * self.records.decode(record, read.block_hash, read.into, stop.write)

        return self._read(read.block_hash, decode, stop)

    def _get_layer(self, block_hash: BlockHash, layer: int, into: memoryview, stop: Stop) -> bool:
        def decode(file: int, scratch: memoryview) -> int:
            records, head = self.records, scratch[: self.records.header_bytes]
            self._disk.read(file, [head], 0)
            header = records.header(head, block_hash)
            span = slice(header.offsets[layer], header.offsets[layer] + header.lengths[layer])
            self._disk.read(file, [scratch[span]], span.start)
            return header.lengths[layer] * records.decode_layer(scratch, header, layer, into, stop.write)

        return self._read(block_hash, decode, stop)

    def _read(self, block_hash: BlockHash, decode: Callable[[int, memoryview], int], stop: Stop) -> bool:
        """Open the block's file for `decode`, which returns the number of bytes. It reads to this thread's memory, in
        case the disk does not answer. False: there is no such file, or it was corrupt and is removed, or the caller no
        longer waits."""
        if stop.requested:
            return False
        path = self._path(block_hash)
        try:
            with self._disk.open(path) as file:
                num_bytes = decode(file, self._scratch())
                self._disk.touch_open(file)
        except (
            FileNotFoundError,
            PermissionError,
        ):  # that this file may not be read does not mean that other files may not
            self.activity.count(missing_blocks=1)
            self._record_missing(block_hash)
            return False
        except (CorruptBlock, NotAFile) as error:
            logger.warning("block %s is removed: %s", path, error)
            self.activity.count(corrupt_blocks=1)
            self._remove(block_hash)
            return False
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
        if num_bytes:
            self._room.accessed(path)
            self.activity.count(loaded_blocks=1, read_bytes=num_bytes)
        return bool(num_bytes)

    def _scratch(self) -> memoryview:
        """This thread's own memory for one record."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = memoryview(bytearray(self.records.max_record_bytes))
        scratch: memoryview = self._local.scratch
        return scratch

    def _put(self, blocks: Sequence[Block], stop: Stop) -> list[PutResult]:
        outcomes: list[PutResult] = []
        for block in blocks:
            try:
                outcomes.append(PutResult.DROPPED if stop.requested else self._put_one(block))
            except OSError as error:
                if error.errno in FULL:
                    self.activity.warn_full(StoreFull(f"{self.root}: {error.strerror}"))
                    self.activity.count(dropped_blocks=1)
                    outcomes.append(PutResult.DROPPED)
                    continue
                self.activity.count(dropped_blocks=len(blocks) - len(outcomes))
                raise StoreError(f"cannot write a block to {self._folder}: {error.strerror}") from error
        return outcomes

    def _put_one(self, block: Block) -> PutResult:
        path = self._path(block.block_hash)
        if self._disk.touch(path):
            self.activity.count(present_blocks=1)
            self._room.accessed(path)
            self._record_stored(block)
            return PutResult.PRESENT
        record = self.records.encode(block.block_hash, block.layers)
        num_bytes = sum(len(buffer) for buffer in record)
        fits, removed = self._room.admit(num_bytes)
        self._record_evictions(removed)
        if not fits:
            self.activity.warn_full(StoreFull(f"{self.root}: what is pinned leaves no room within max_bytes"))
            self.activity.count(dropped_blocks=1)
            return PutResult.DROPPED
        self._disk.write(path, record, self._access, fsync=self.options.fsync)
        self.activity.count(stored_blocks=1, written_bytes=num_bytes)
        self._record_stored(block)
        self._record_evictions(self._room.written(path, self._path(block.parent) if block.parent else None, num_bytes))
        return PutResult.STORED

    def _record_evictions(self, removed: Removed) -> None:
        self.activity.count(evicted_blocks=removed.num_evicted)
        self.activity.removed(self._name(path) for path in removed.missing if path.startswith(str(self._folder)))

    def _record_stored(self, block: Block) -> None:
        self.activity.stored([block.block_hash])
        if self.activity.is_watched and self.options.max_bytes is not None:
            self._room.watch(self._path(block.block_hash))

    def _name(self, path: str) -> BlockHash:
        return bytes.fromhex(Path(path).stem)

    def _record_missing(self, block_hash: BlockHash) -> None:
        self._room.removed(self._path(block_hash))
        self.activity.removed([block_hash])

    def _remove(self, block_hash: BlockHash) -> bool:
        was_present = self._disk.remove(self._path(block_hash))
        self._disk.remove(self._path(block_hash, PIN_SUFFIX))
        self._record_missing(block_hash)
        return was_present

    def _pin(self, hashes: Sequence[BlockHash], stop: Stop) -> int:
        present = [name for name in hashes if self._disk.touch(self._path(name))]
        num_pinned, removed = self._room.num_pinnable([self._path(name) for name in present], self.options.pinned_share)
        self._record_evictions(removed)
        for name in present[:num_pinned]:
            if stop.requested:  # the caller would not know that it is pinned
                break
            try:
                self._disk.write(self._path(name, PIN_SUFFIX), [], self._access, fsync=self.options.fsync)
            except OSError as error:
                raise StoreError(f"cannot pin a block in {self._folder}: {error.strerror}") from error
        return num_pinned

    def _unpin(self, hashes: Sequence[BlockHash]) -> int:
        for name in hashes:
            self._disk.remove(self._path(name, PIN_SUFFIX))
        self._room.unpinned()
        return sum(self._disk.exists(self._path(name)) for name in hashes)


def _make_folder(disk: Disk, folder: Path, root: Path, access: FileAccess) -> None:
    try:
        disk.make_folder(folder, access)
        disk.require_access(folder)
    except OSError as error:
        raise ConfigError(f"cannot keep KV blocks in {root}: {error.strerror}") from error
