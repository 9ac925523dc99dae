"""KV blocks as files: `root/<layout fingerprint>/<first byte>/<block hash>.kv`, one file a block.

Owns the files under its root, together with all other processes that use it; there is no lock and no index. A file
appears by rename, complete, so a crash leaves no half block, only a temporary file that is swept later. With
`max_bytes`, the files used longest ago (by modification time, which a read renews) are removed until a tenth is
free. Each process counts its own writes and looks at the directory again every 1/32 of the bound, so several
writers together may exceed it by that much each. The bound is for the whole root, all layouts.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvferry.core.block_hash import BlockHash
from kvferry.core.errors import ConfigError, StoreError
from kvferry.core.layout import KVLayout
from kvferry.store.access import OWNER, Access
from kvferry.store.base import KVStore, LayerViews
from kvferry.store.block_file import BlockFormat, CorruptBlock, write_all

log = logging.getLogger(__name__)

SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"
STALE_TEMPORARY_S = 3600.0
FREED_SHARE = 0.1
LOOK_SHARE = 1 / 32
TOUCH_S = 60.0
"""A file's time of use is renewed when it is older than this, to spare the disk."""

_File = tuple[float, int, str]
"""Time of use, bytes, path."""


class FileStore(KVStore):
    """Blocks of `layout` under `root`. `fsync`: a block survives a power failure once `put` has returned."""

    def __init__(
        self,
        root: Path | str,
        layout: KVLayout,
        *,
        max_bytes: int | None = None,
        fsync: bool = False,
        access: Access = OWNER,
    ) -> None:
        """Make the directory. Raises `ConfigError` when that cannot be done."""
        self.root, self._max_bytes, self._fsync, self._access = Path(root), max_bytes, fsync, access
        self._format = BlockFormat(layout)
        self._folder = self.root / layout.fingerprint()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._num_unseen = 0
        self._kept: set[BlockHash] = set()
        self._removed: set[BlockHash] = set()
        self._watched = False
        self._num_stored: int | None = None
        """Bytes under the root when last looked at; None: not yet, which the first `put` does."""
        try:
            access.make_folder(self._folder)
            if not os.access(self._folder, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise ConfigError(f"cannot keep KV blocks in {self.root}: {error.strerror}") from error

    # Blocks.

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """One `stat` a block."""
        for index, block_hash in enumerate(hashes):
            try:
                os.stat(self._path(block_hash))  # noqa: PTH116 - a Path made of it would double the time
            except FileNotFoundError:
                return index
            except OSError as error:
                raise StoreError(f"cannot look into {self._folder}: {error.strerror}") from error
        return len(hashes)

    def get(self, block_hash: BlockHash, into: LayerViews) -> bool:
        """One `preadv`, for header and all layers."""
        if not self._read(block_hash, lambda descriptor: self._format.read(descriptor, block_hash, into)):
            return False
        self._count(loaded_blocks=1, read_bytes=self._format.file_bytes)
        return True

    def get_layer(self, block_hash: BlockHash, layer: int, into: memoryview) -> bool:
        """Two `preadv`s, for the header and the layer."""
        format_ = self._format
        if not self._read(block_hash, lambda descriptor: format_.read_layer(descriptor, block_hash, layer, into)):
            return False
        self._count(read_bytes=len(into))
        return True

    def put(self, block_hash: BlockHash, layers: LayerViews) -> bool:
        """Write a temporary file beside the final one, and rename it."""
        path = self._path(block_hash)
        try:
            if _touch_path(path):
                self._count(present_blocks=1)
                self._note_kept(block_hash)
                return False
            self._write(path, [memoryview(self._format.encode_header(block_hash, layers)), *layers])
        except OSError as error:
            self._count(dropped_blocks=1)
            raise StoreError(f"cannot write a block to {self._folder}: {error.strerror}") from error
        self._count(stored_blocks=1, written_bytes=self._format.file_bytes)
        self._note_kept(block_hash)
        self._make_room(self._format.file_bytes)
        return True

    def delete(self, block_hash: BlockHash) -> bool:
        """Remove the file."""
        self._note_removed({block_hash})
        return _remove(self._path(block_hash))

    # Changes.

    def watch(self) -> None:
        """From now on, note which blocks are gone, for `take_removed`."""
        self._watched = True

    def take_removed(self) -> list[BlockHash]:
        """Blocks found to be gone since the last call, whoever removed them.

        That is seen when a block is read for nothing, and with `max_bytes`, of blocks that this process had `put`,
        whenever it looks at the directory.
        """
        with self._lock:
            removed, self._removed = self._removed, set()
            return list(removed)

    def _note_kept(self, block_hash: BlockHash) -> None:
        with self._lock:
            self._removed.discard(block_hash)
            if self._watched and self._max_bytes is not None:
                self._kept.add(block_hash)

    def _note_removed(self, block_hashes: set[BlockHash]) -> None:
        with self._lock:
            if self._watched:
                self._removed |= block_hashes
                self._kept -= block_hashes

    def statistics(self) -> dict[str, float]:
        """Counters of this process, and the bytes under the root when it last looked."""
        with self._lock:
            counters = {name: float(count) for name, count in self._counts.items()}
            if self._num_stored is not None:
                counters["kept_bytes"] = float(self._num_stored + self._num_unseen)
            return counters

    def close(self) -> None:
        """Nothing is kept open."""

    # Files.

    def _path(self, block_hash: BlockHash) -> str:
        name = block_hash.hex()
        return f"{self._folder}/{name[:2]}/{name}{SUFFIX}"

    def _read(self, block_hash: BlockHash, read: Callable[[int], None]) -> bool:
        """Have `read` read the open file. False: there is none, or it is corrupt and now removed."""
        path = self._path(block_hash)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._count(missing_blocks=1)
            self._note_removed({block_hash})
            return False
        except OSError as error:
            raise StoreError(f"cannot open {path}: {error.strerror}") from error
        try:
            read(descriptor)
            _touch(descriptor)
            return True
        except CorruptBlock as error:
            log.warning("block %s is removed: %s", path, error)
            self._count(corrupt_blocks=1)
            _remove(path)
            self._note_removed({block_hash})
            return False
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def _write(self, path: str, views: Sequence[memoryview]) -> None:
        temporary = f"{path}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(temporary, flags, self._access.file_mode)
        except FileNotFoundError:
            self._access.make_folder(Path(temporary).parent)
            descriptor = os.open(temporary, flags, self._access.file_mode)
        try:
            try:
                write_all(descriptor, views)
                if self._fsync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temporary, path)  # noqa: PTH104 - plain strings, as everywhere on this path
        except BaseException:
            _remove(temporary)
            raise

    # Room.

    def _make_room(self, num_written: int) -> None:
        with self._lock:
            self._num_unseen += num_written
            if self._num_stored is None:
                due = True
            elif self._max_bytes is None:
                due = False
            else:
                total = self._num_stored + self._num_unseen
                due = self._num_unseen >= self._max_bytes * LOOK_SHARE or total > self._max_bytes
        if due:
            self._look()

    def _look(self) -> None:
        """Count what is there, and remove what is too much and what a crash left."""
        with self._lock:
            kept = set(self._kept)
        files = sorted(self._files(), key=lambda file: file[0])
        left = self._evict(files)
        with self._lock:
            self._num_stored, self._num_unseen = sum(size for _, size, _ in left), 0
        if kept:
            there = {path for _, _, path in left}
            self._note_removed({block_hash for block_hash in kept if self._path(block_hash) not in there})

    def _evict(self, files: Sequence[_File]) -> Sequence[_File]:
        """Remove the first of these as long as they are too much; returns the others."""
        total = sum(size for _, size, _ in files)
        if self._max_bytes is None or total <= self._max_bytes:
            return files
        for index, (_, size, path) in enumerate(files):
            if total <= self._max_bytes * (1 - FREED_SHARE):
                return files[index:]
            if _remove(path):
                self._count(evicted_blocks=1)
            total -= size
        return []

    def _files(self) -> Iterator[_File]:
        """Every block under the root; stale temporary files are removed."""
        now = time.time()
        for path in self.root.glob("*/??/*"):
            with suppress(OSError):  # removed meanwhile, by another process
                status = path.stat()
                if path.suffix == SUFFIX:
                    yield status.st_mtime, status.st_size, str(path)
                elif path.suffix == TEMPORARY_SUFFIX and now - status.st_mtime > STALE_TEMPORARY_S:
                    path.unlink()

    def _count(self, **changes: int) -> None:
        with self._lock:
            self._counts.update(changes)


def _touch(descriptor: int) -> None:
    with suppress(OSError):  # a store that may only be read has no say in what is evicted
        if time.time() - os.fstat(descriptor).st_mtime > TOUCH_S:
            os.utime(descriptor)


def _touch_path(path: str) -> bool:
    """Renew a file's time of use; False when it is not there."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    except PermissionError:  # another user's, so its time is theirs to renew
        pass
    return True


def _remove(path: str) -> bool:
    try:
        os.unlink(path)  # noqa: PTH108 - see above
        return True
    except OSError:
        return False
