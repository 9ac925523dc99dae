"""A file store for tests that are plain functions: each call is run to its end, one block at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvferry.core.blocks.layout import KVLayout
from kvferry.store.base import Block, BlockRead, PutResult
from kvferry.store.disk import DISK, Disk
from kvferry.store.machine import Machine
from kvferry.store.media import file
from kvferry.store.media.file_room import SUFFIX, folder_name

Result = TypeVar("Result")


OPEN: list[FileStore] = []


class FileStore:
    """`options`: those of the URL."""

    def __init__(self, root: Path | str, layout: KVLayout, disk: Disk = DISK, **options: Any) -> None:
        machine = Machine()
        machine.disk = disk
        self.inner = file.FileStore(os.fspath(root), file.FileOptions(**options), layout, machine)
        self.folder = Path(root) / folder_name(layout.fingerprint(), self.inner.records.codec.name)
        self.file_bytes = self.inner.records.max_record_bytes
        self._loop = asyncio.new_event_loop()
        OPEN.append(self)
        self.run(self.inner.open())

    def close(self) -> None:
        OPEN.remove(self)
        self.run(self.inner.close())
        self._loop.close()

    def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        return self._loop.run_until_complete(call)

    def match(self, hashes: Sequence[bytes]) -> int:
        return self.run(self.inner.match(hashes))

    def get(self, block_hash: bytes, into: Sequence[memoryview]) -> bool:
        return self.run(self.inner.get([BlockRead(block_hash, into)]))[0]

    def get_layer(self, block_hash: bytes, layer: int, into: memoryview) -> bool:
        return self.run(self.inner.get_layer(layer, [(block_hash, into)]))[0]

    def put(self, block_hash: bytes, layers: Sequence[memoryview]) -> bool:
        return self.run(self.inner.put([Block(block_hash, layers)])) == [PutResult.STORED]

    def delete(self, block_hash: bytes) -> bool:
        return bool(self.run(self.inner.delete([block_hash])))

    def watch(self) -> None:
        self.inner.activity.watch()

    def take_removed(self) -> list[bytes]:
        return [name for changes in self.inner.activity.take_changes() for name in changes.removed]

    def path(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self.folder / name[:2] / f"{name}{SUFFIX}"

    def statistics(self) -> dict[str, float]:
        return self.inner.statistics()
