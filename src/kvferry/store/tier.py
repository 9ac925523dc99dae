"""One store as a tier of a list: opened when it is first used, asked within its deadline, left alone while it fails.

A tier never raises for what its store does: a call that fails, or is late, gives the caller's default instead (nothing
found, nothing stored), and its `Breaker` keeps all others from asking until it answers again. A put that is refused,
as by a full or a read-only store, says nothing of what can be read there: it is only tried again in the background,
so that `takes` is true soon after the store takes blocks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.errors import KvferryError, StoreError
from kvferry.store.base import Block, KVStore, Put, Read
from kvferry.store.breaker import Breaker
from kvferry.store.copying import copy_bytes
from kvferry.transport.transfer_loop import TransferLoop

log = logging.getLogger(__name__)

Result = TypeVar("Result")

SLOWEST_BYTES_PER_S = 64 * 2**20
"""Blocks may take the time that this rate allows, in addition to the deadline: KV that comes more slowly is hardly
worth loading."""
PUT_S = 5.0
"""Least deadline of a put, for which no request waits."""
FOUND_S = 0.002
"""Seconds to find one block, as on a disk with cold caches, in addition to the deadline."""
SILENT_SHARE = 0.25
"""Part of the deadline after which a tier that is busy with blocks gets a small request, to detect one that hangs."""
MAX_PROBED = 32
"""Blocks that are read again to find out whether the tier is still too slow."""
APART_S = 1.0
"""How long `close` waits for a separate loop to end; one that is in a call that does not return is left behind."""
PUT_AGAIN_S = 0.5
"""Pause before what the store did not take is put again."""
GRACE_S = 0.1
"""A timer that fires this much too late shows that this machine is busy, and not that the store is slow."""
NO_BLOCK: BlockHash = bytes(32)
"""A hash that no block has, to find out whether the store answers."""


@dataclass(frozen=True, eq=False)
class RefusedWrites:
    """The block, and the note (name, content, time to live in seconds), that a store refused when it was last given
    some; None: it took them."""

    block: Block | None = None
    note: tuple[str, bytes, float] | None = None


class Tier:
    """A store with its deadline (seconds for one call, besides the time that blocks take). Used on one event loop."""

    def __init__(self, name: str, url: str, store: KVStore, deadline_s: float) -> None:
        """`name`: its number in the list, from 0, and its scheme: `1 (file)`. `url`: without its password, for the
        log."""
        self.name, self.store, self.deadline_s = name, store, deadline_s
        self.breaker = Breaker(url, self._probe)
        self.is_open = self._is_closed = False
        self._refused = RefusedWrites()
        self._putting_again: asyncio.Task[None] | None = None
        self.on_takes: Callable[[], None] = lambda: None
        """Called when `takes` has changed."""
        self.num_late = 0
        """Number of calls that had no answer by their deadline."""
        self._apart: TransferLoop | None = None
        """A separate event loop for a store whose calls may not return (`KVStore.ends_calls`)."""
        self._opening: asyncio.Task[None] | None = None
        """The attempt to open the store that is under way, or the last one. Callers wait for it together, and it
        continues when they give up."""
        self._under_way: dict[asyncio.Timeout, None] = {}
        self._moving_bytes = 0
        self._read_last: Sequence[BlockHash] = ()

    @property
    def is_up(self) -> bool:
        """Whether the store is in use: the breaker is closed."""
        return not self.breaker.is_open

    @property
    def takes(self) -> bool:
        """Whether the store took everything that it was last given."""
        return self._refused.block is None and self._refused.note is None

    async def open(self) -> None:
        """Open the store unless it is open. A call while an attempt is under way waits for that attempt, so that one
        that hangs is not repeated beside itself. Raises what `KVStore.open` raises."""
        if self.is_open:
            return
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(_retrieve_error)
        await asyncio.shield(self._opening)

    async def _open(self) -> None:
        if self._is_closed:
            raise StoreError("the store is closed")
        if not self.store.ends_calls and self._apart is None:
            self._apart = self.store.machine.transfer_loop("kvferry-store-apart")
            self._apart.start()
        await self._call(self.store.open)
        self.is_open = True

    async def close(self) -> None:
        """End the breaker's probes and an attempt to open, and close the store. Raises what `KVStore.close` raises."""
        self._is_closed = True
        await self.breaker.close()
        if self._putting_again is not None:
            self._putting_again.cancel()
            await asyncio.wait({self._putting_again}, timeout=self.deadline_s / 2)
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait({self._opening}, timeout=self.deadline_s / 2)
        try:
            await self._call(self.store.close)
        finally:
            if self._apart is not None:
                self._apart.close(APART_S)

    async def _call(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Make a call of the store's. On a separate loop, the call is left behind when this is cancelled."""
        if self._apart is None:
            return await call()

        async def wait() -> Result:
            return await call()

        return await asyncio.wrap_future(self._apart.submit(wait()))

    # Calls.

    async def ask(self, call: Callable[[], Awaitable[Result]], otherwise: Result) -> Result:
        """The result of a call of the store's that moves no blocks, or `otherwise` if the tier is left alone, fails, or
        is late."""
        return await self._ask(call, otherwise, self.deadline_s)

    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """`KVStore.match`; 0 where `ask` returns `otherwise`."""
        limit_s = self.deadline_s + len(hashes) * FOUND_S
        return await self._ask(partial(self.store.match, hashes), 0, limit_s, busy=bool(hashes))

    async def get(self, reads: Sequence[Read]) -> list[bool]:
        """`KVStore.get`; all False where `ask` returns `otherwise`."""
        self._read_last = [read.block_hash for read in reads[:MAX_PROBED]]
        num_bytes = self.store.layout.block_bytes * len(reads)
        apart = [] if self.store.ends_calls else [Read(read.block_hash, _alike(read.into)) for read in reads]
        call = partial(self.store.get, apart or reads)
        found = await self._ask(call, [False] * len(reads), self.deadline_s, num_bytes)
        for read, copy, there in zip(reads, apart, found, strict=False):
            for view, content in zip(read.into, copy.into if there else (), strict=False):
                copy_bytes(view, content)
        return found

    async def get_layer(self, layer: int, reads: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        """`KVStore.get_layer`; all False where `ask` returns `otherwise`."""
        num_bytes = sum(len(into) for _, into in reads)
        call = partial(self.store.get_layer, layer, reads)  # which the loader has made memory of its own for
        return await self._ask(call, [False] * len(reads), self.deadline_s, num_bytes)

    async def put(self, blocks: Sequence[Block]) -> list[Put]:
        """`KVStore.put`; all `DROPPED` where `ask` returns `otherwise`, or if the store takes no blocks. The blocks'
        memory must not change: a block that is refused is put again later."""
        if not blocks:
            return []
        num_bytes = self.store.layout.block_bytes * len(blocks)
        none, limit_s = [Put.DROPPED] * len(blocks), max(self.deadline_s, PUT_S)
        outcomes = await self._ask(partial(self._put, blocks), none, limit_s, num_bytes)
        dropped = (block for block, outcome in zip(blocks, outcomes, strict=True) if outcome is Put.DROPPED)
        self._remember(RefusedWrites(next(dropped, None), self._refused.note))
        return outcomes

    async def _put(self, blocks: Sequence[Block]) -> list[Put]:
        try:
            return await self.store.put(blocks)
        except StoreError as error:
            self._warn_full(error)
            return [Put.DROPPED] * len(blocks)

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> bool:
        """`KVStore.write_note`; returns whether the store took the note."""

        async def write() -> bool:
            try:
                await self.store.write_note(name, content, ttl_s)
            except StoreError as error:
                self._warn_full(error)
                return False
            return True

        took = await self.ask(write, False)
        self._remember(RefusedWrites(self._refused.block, None if took else (name, content, ttl_s)))
        return took

    def _warn_full(self, error: StoreError) -> None:
        if not self._is_closed:  # by who puts it: nothing is missing that somebody could make room for
            self.store.warn_full(error)

    def _remember(self, refused: RefusedWrites) -> None:
        """Remember what the store refused of the last block and note, and put it again until the store takes it."""
        before, self._refused = self.takes, refused
        if self.takes != before:
            self.on_takes()
        if not self.takes and self._putting_again is None and not self._is_closed:
            self._putting_again = asyncio.create_task(self._put_again())

    async def _put_again(self) -> None:
        while not self.takes:
            await asyncio.sleep(PUT_AGAIN_S)
            if self.is_up and self._refused.block is not None:
                await self.put([self._refused.block])
            if self.is_up and self._refused.note is not None:
                await self.write_note(*self._refused.note)
        self._putting_again = None

    async def _ask(
        self,
        call: Callable[[], Awaitable[Result]],
        otherwise: Result,
        limit_s: float,
        num_bytes: int = 0,
        *,
        busy: bool = False,
    ) -> Result:
        """Call the store. At the deadline, or when the breaker opens meanwhile, the call is cancelled; this returns
        only when it has really ended, since a thread may still be using the caller's memory."""
        if self.breaker.is_open:
            return otherwise
        self._moving_bytes += num_bytes
        late = _LateTimer(self, limit_s + self._moving_bytes / SLOWEST_BYTES_PER_S)
        silent = asyncio.create_task(self._watch()) if num_bytes or busy else None
        try:
            async with asyncio.timeout(None) as under_way:
                self._under_way[under_way] = None
                try:
                    await self.open()
                    return await self._call(call)
                finally:
                    del self._under_way[under_way]
        except KvferryError as error:
            self.failed(str(error))
        except Exception as error:
            if not under_way.expired():
                log.exception("store tier %s failed unexpectedly", self.name)
                self.failed(repr(error))
        finally:
            self._moving_bytes -= num_bytes
            late.cancel()
            if silent is not None:
                silent.cancel()
        return otherwise

    async def _watch(self) -> None:
        """A long call is only waited for as long as the store answers others."""
        await asyncio.sleep(self.deadline_s * SILENT_SHARE)
        if self.is_open:
            await self._ask(partial(self.store.match, [NO_BLOCK]), 0, self.deadline_s * (1 - SILENT_SHARE))

    # Failures.

    def failed(self, reason: str) -> None:
        """Leave the tier alone until it answers again, and cut off all calls that wait for it."""
        if not self.breaker.is_open:
            self.breaker.open(reason)
            for call in tuple(self._under_way):
                if not call.expired():
                    call.reschedule(0)

    def is_late(self, limit_s: float) -> None:
        """Note that a call has no answer by its deadline."""
        self.num_late += 1
        self.failed(f"did not answer within {limit_s:.3g} s")

    async def _probe(self) -> None:
        """Ask again for what was asked last, for the breaker. Raises `StoreError` if the answer is late."""
        await self.open()
        begun, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
        await self._call(partial(self.store.match, [NO_BLOCK]))
        sizes = [self.store.layout.span_bytes(layer) for layer in range(self.store.layout.num_layers)]
        reads = [Read(name, [memoryview(bytearray(size)) for size in sizes]) for name in self._read_last]
        if reads:
            await self._call(partial(self.store.get, reads))
        num_bytes = len(reads) * self.store.layout.block_bytes
        if loop.time() - begun > self.deadline_s + num_bytes / SLOWEST_BYTES_PER_S:
            raise StoreError("it answers, but too late")


def _alike(views: Sequence[memoryview]) -> list[memoryview]:
    return [memoryview(bytearray(len(view))) for view in views]


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Retrieve a task's exception, so that asyncio does not log it as never retrieved; callers that still wait get
    it."""
    if not task.cancelled():
        task.exception()


class _LateTimer:
    """Reports to a tier that a call is late, at the moment its deadline passes, even if the call itself ends later."""

    def __init__(self, tier: Tier, limit_s: float) -> None:
        self._tier, self._limit_s, self._loop = tier, limit_s, asyncio.get_running_loop()
        self._due = self._loop.time() + limit_s
        self._timer = self._loop.call_at(self._due, self._expire)

    def _expire(self) -> None:
        now = self._loop.time()
        if now > self._due + GRACE_S:  # the answer may be there, and this loop had no time to read it
            self._due = now + GRACE_S
            self._timer = self._loop.call_at(self._due, self._expire)
        else:
            self._tier.is_late(self._limit_s)

    def cancel(self) -> None:
        """Note that the call has ended."""
        self._timer.cancel()
