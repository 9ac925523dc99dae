"""Stores in trouble: short waits for tests, disks that hang or refuse, and writers that are killed."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

from valkey.asyncio import Valkey

from kvferry.core.errors import StoreError
from kvferry.store.access import FileAccess
from kvferry.store.arena import Arena
from kvferry.store.disk import Disk
from kvferry.store.machine import MACHINE, Machine
from kvferry.store.table import StoreSpec, find_store
from kvferry.store.tiered.tier import TierTimes
from kvferry.store.tiered.tiers import TieredStore, WritePolicy
from kvferry.testing.stores import LAYOUT, name_of

QUICK = TierTimes(first_pause_s=0.01, max_pause_s=0.05)
"""A tier that is down is probed again soon."""


def run(
    stores: Sequence[str | StoreSpec],
    use: Callable[[TieredStore], Awaitable[None]],
    write: WritePolicy = "through",
    machine: Machine = MACHINE,
    times: TierTimes = QUICK,
) -> None:
    """`use` a store of these tiers, which is opened and closed. `stores`: their URLs or specifications."""
    specs = [find_store(store) if isinstance(store, str) else store for store in stores]

    async def main() -> None:
        store = TieredStore(specs, LAYOUT, write, machine, times)
        await store.open()
        try:
            await use(store)
        finally:
            await store.close()

    asyncio.run(main())


async def is_true(call: Awaitable[object], expected: object) -> bool:
    """True if the call's result is the expected one; false also if no tier can be reached."""
    try:
        return await call == expected
    except StoreError:
        return False


class TroubledDisk(Disk):
    """Calls about files of `folder` do not return until `gate` is set, as on a mount whose server is gone. Calls about
    paths for which `refuses` is true fail."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.folder = Path("/")
        self.refuses: Callable[[str], bool] = lambda path: False

    def _pass(self, path: str) -> None:
        if Path(path).is_relative_to(self.folder):
            assert self.gate.wait(60)
        if self.refuses(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def write(self, path: str, views: Sequence[memoryview], access: FileAccess, *, fsync: bool = False) -> None:
        self._pass(path)
        super().write(path, views, access, fsync=fsync)

    def open(self, path: str) -> AbstractContextManager[int]:
        self._pass(path)
        return super().open(path)

    def touch(self, path: str) -> bool:
        self._pass(path)
        return super().touch(path)

    def is_readable(self, path: str) -> bool:
        self._pass(path)
        return super().is_readable(path)


class TroubledMachine(Machine):
    """Has a disk of its own, and shared memory whose lock is waited for only shortly. `arenas`: those it made."""

    def __init__(self) -> None:
        self.disk = self.files = TroubledDisk()
        self.arenas: list[Arena] = []

    def arena(self, name: str, num_bytes: int) -> Arena:
        arena = super().arena(name, num_bytes)
        arena.lock_s = 0.05
        self.arenas.append(arena)
        return arena


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a server, also one that was stopped."""
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait(20)


@asynccontextmanager
async def stranger(socket: Path) -> AsyncIterator[Valkey]:
    """Another client of the server."""
    async with Valkey(unix_socket_path=str(socket)) as client:
        yield client


async def key_of(client: Valkey, number: int) -> bytes:
    """The server's key of a block, made from that of block 0, which must be there."""
    zero, other = (name_of(index).hex().encode() for index in (0, number))
    [key] = await client.keys(b"*" + zero)
    return bytes(key).replace(zero, other)
