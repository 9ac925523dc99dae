"""One tier of a tiered store: its store is opened on first use, called with a deadline, and not used while it fails.

Calls for blocks and notes never raise because of the store. A call that fails, or has no answer by its deadline,
returns a default instead (nothing found, nothing stored), and the tier's `Breaker` prevents further calls until the
store answers again. A put that the store refuses, because it is full or read-only, does not prevent reads: it is
retried in the background, so that `takes` becomes True soon after the store accepts blocks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.errors import KvferryError, StoreError
from kvferry.store.base import Block, BlockRead, KVStore, LayerStore, PutResult, SharedStore
from kvferry.store.copying import copy_bytes
from kvferry.store.tiered.breaker import Breaker
from kvferry.transport.transfer_loop import TransferLoop

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

WATCHDOG_SHARE = 0.25
"""Share of the deadline after which a tier that is busy with blocks gets a small request, to detect that it hangs."""
NO_BLOCK: BlockHash = bytes(32)
"""A hash that no block has, to probe whether the store answers."""


@dataclass(frozen=True, eq=False)
class RefusedWrites:
    """A block of the last put and the last note (name, content, time to live in seconds) that the store refused. None:
    it accepted them."""

    block: Block | None = None
    note: tuple[str, bytes, float] | None = None


@dataclass(slots=True, eq=False)
class RunningCalls:
    """The calls of a store that have not ended. `timeouts`: the timeout of each call; `num_bytes`: bytes of all blocks
    that the calls move."""

    timeouts: dict[asyncio.Timeout, None] = field(default_factory=dict)
    num_bytes: int = 0

    def expire(self) -> None:
        """Let all calls time out now."""
        for timeout in tuple(self.timeouts):
            if not timeout.expired():
                timeout.reschedule(0)


@dataclass(frozen=True)
class TierTimes:
    """Times in seconds, of a tier's work for which no request waits. `open_s`, `close_s` and `put_s` are minimums: a
    longer `deadline_s` replaces them."""

    open_s: float = 5.0
    """Deadline for opening the store."""
    close_s: float = 3.0
    """Deadline for closing the store; of a tier that is down, a third of it."""
    put_s: float = 5.0
    """Deadline for a put."""
    loop_close_s: float = 1.0
    """Maximum wait for the end of a separate loop. A loop in a call that does not return is abandoned."""
    first_pause_s: float = 0.25
    max_pause_s: float = 2.0
    """Pause before the first probe of a tier that is down, which doubles up to the maximum."""


TIER_TIMES = TierTimes()


class Tier:
    """A store with its deadline: seconds for one call, in addition to the time that blocks take. Used on one event
    loop."""

    retry_s = 0.5
    """Seconds before a refused put or note is retried."""
    max_probe_blocks = 32
    """Maximum number of blocks that a probe reads again, to find out whether the tier is still too slow."""
    lookup_s = 0.002
    """Seconds for the look-up of one block (on a disk with cold caches), in addition to the deadline."""
    min_bytes_per_s = 64 * 2**20
    """Blocks have the time that this rate needs, in addition to the deadline. Loading KV more slowly is hardly
    useful."""

    def __init__(self, name: str, url: str, store: KVStore, deadline_s: float, times: TierTimes = TIER_TIMES) -> None:
        """`name`: its index in the list of tiers, from 0, and its scheme, such as `1 (file)`. `url`: for the log,
        without the password."""
        self.name, self.store, self._times = name, store, times
        self.deadline_s = max(deadline_s, store.machine.min_deadline_s)
        self.breaker = Breaker(url, self._probe, times.first_pause_s, times.max_pause_s)
        self.is_open = self._is_closed = False
        self._refused = RefusedWrites()
        self._retry_task: asyncio.Task[None] | None = None
        self.on_accepts_changed: Callable[[], None] = lambda: None
        """Called when `takes` has changed."""
        self.num_late = 0
        """Number of calls without an answer by their deadline."""
        self._separate_loop: TransferLoop | None = None
        """A separate event loop for a store whose calls may not return (`KVStore.cancels_at_once`)."""
        self._opening: asyncio.Task[None] | None = None
        """The current or last attempt to open the store. All callers wait for the same attempt. It continues when they
        give up."""
        self._calls = RunningCalls()
        self._last_reads: Sequence[BlockHash] = ()

    @property
    def is_shared(self) -> bool:
        """True if other instances find the store's blocks and notes."""
        return isinstance(self.store, SharedStore)

    @property
    def has_layers(self) -> bool:
        """True if the store can read single layers."""
        return isinstance(self.store, LayerStore)

    @property
    def is_up(self) -> bool:
        """True if the store is in use: the breaker is closed."""
        return not self.breaker.is_open

    @property
    def accepts_writes(self) -> bool:
        """True if the store accepted all blocks of the last put and the last note."""
        return self._refused.block is None and self._refused.note is None

    async def open(self) -> None:
        """Open the store unless it is open. A call during an attempt waits for that attempt, so that an attempt that
        hangs is not repeated concurrently. Raises the errors of `KVStore.open`."""
        if self.is_open:
            return
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(_retrieve_error)
        await asyncio.shield(self._opening)

    async def _open(self) -> None:
        if self._is_closed:
            raise StoreError("the store is closed")
        if not self.store.cancels_at_once and self._separate_loop is None:
            self._separate_loop = self.store.machine.transfer_loop("kvferry-store-separate")
            self._separate_loop.start()
        await self._call(self.store.open)
        self.is_open = True

    async def close(self) -> None:
        """End the breaker's probes and an attempt to open, and close the store. Raises the errors of
        `KVStore.close`."""
        self._is_closed = True
        await self.breaker.close()
        if self._retry_task is not None:
            self._retry_task.cancel()
            await asyncio.wait({self._retry_task}, timeout=self.deadline_s / 2)
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait({self._opening}, timeout=self.deadline_s / 2)
        try:
            await self._call(self.store.close)
        finally:
            if self._separate_loop is not None:
                self._separate_loop.close(self._times.loop_close_s)

    async def _call(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Make a call to the store. If the store has a separate loop, the call is abandoned when this is cancelled."""
        if self._separate_loop is None:
            return await call()

        async def wait() -> Result:
            return await call()

        return await asyncio.wrap_future(self._separate_loop.submit(wait()))

    # Calls.

    async def ask(self, call: Callable[[], Awaitable[Result]], default: Result) -> Result:
        """The result of a call to the store that moves no blocks; `default` if the tier is not in use, or the call
        fails or has no answer by its deadline."""
        return await self._ask(call, default, self.deadline_s)

    async def match(self, hashes: Sequence[BlockHash]) -> int:
        """`KVStore.match`; 0 where `ask` returns `default`."""
        timeout_s = self.deadline_s + len(hashes) * self.lookup_s
        return await self._ask(partial(self.store.match, hashes), 0, timeout_s, is_busy=bool(hashes))

    async def get(self, reads: Sequence[BlockRead]) -> list[bool]:
        """`KVStore.get`; all False where `ask` returns `default`."""
        self._last_reads = [read.block_hash for read in reads[: self.max_probe_blocks]]
        num_bytes = self.store.layout.block_bytes * len(reads)
        copies = (
            []
            if self.store.cancels_at_once
            else [BlockRead(read.block_hash, _buffers_like(read.into)) for read in reads]
        )
        call = partial(self.store.get, copies or reads)
        hits = await self._ask(call, [False] * len(reads), self.deadline_s, num_bytes)
        for read, copy, is_hit in zip(reads, copies, hits, strict=False):
            for view, content in zip(read.into, copy.into if is_hit else (), strict=False):
                copy_bytes(view, content)
        return hits

    async def get_layer(self, layer: int, reads: Sequence[tuple[BlockHash, memoryview]]) -> list[bool]:
        """`LayerStore.get_layer`; all False where `ask` returns `default`."""
        assert isinstance(self.store, LayerStore), "see `has_layers`"
        num_bytes = sum(len(into) for _, into in reads)
        call = partial(self.store.get_layer, layer, reads)  # into memory that the loader has allocated for this
        return await self._ask(call, [False] * len(reads), self.deadline_s, num_bytes)

    async def put(self, blocks: Sequence[Block]) -> list[PutResult]:
        """`KVStore.put`; all `DROPPED` where `ask` returns `default`, or if the store accepts no blocks. The memory of
        the blocks must not change afterwards: a block that is refused is put again later."""
        if not blocks:
            return []
        num_bytes = self.store.layout.block_bytes * len(blocks)
        all_dropped, timeout_s = [PutResult.DROPPED] * len(blocks), max(self.deadline_s, self._times.put_s)
        outcomes = await self._ask(partial(self._put, blocks), all_dropped, timeout_s, num_bytes)
        dropped = (block for block, outcome in zip(blocks, outcomes, strict=True) if outcome is PutResult.DROPPED)
        self._set_refused(RefusedWrites(next(dropped, None), self._refused.note))
        return outcomes

    async def _put(self, blocks: Sequence[Block]) -> list[PutResult]:
        try:
            return await self.store.put(blocks)
        except StoreError as error:
            self._warn_not_stored(error)
            return [PutResult.DROPPED] * len(blocks)

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> bool:
        """`SharedStore.write_note`. Returns True if the store accepted the note."""
        store = self._shared_store()

        async def write() -> bool:
            try:
                await store.write_note(name, content, ttl_s)
            except StoreError as error:
                self._warn_not_stored(error)
                return False
            return True

        is_stored = await self.ask(write, False)
        self._set_refused(RefusedWrites(self._refused.block, None if is_stored else (name, content, ttl_s)))
        return is_stored

    async def read_note(self, name: str) -> bytes | None:
        """`SharedStore.read_note`; None where `ask` returns `default`."""
        return await self.ask(partial(self._shared_store().read_note, name), None)

    async def remove_note(self, name: str) -> None:
        """`SharedStore.remove_note`; a note that cannot be removed expires."""
        await self.ask(partial(self._shared_store().remove_note, name), None)

    def _shared_store(self) -> SharedStore:
        assert isinstance(self.store, SharedStore), "see `is_shared`"
        return self.store

    def _warn_not_stored(self, error: StoreError) -> None:
        if not self._is_closed:  # a put that fails because the tier was closed is no sign of a full store
            self.store.activity.warn_full(error)

    def _set_refused(self, refused: RefusedWrites) -> None:
        """Set the refused block and note, and retry them until the store accepts them."""
        accepted_all, self._refused = self.accepts_writes, refused
        if self.accepts_writes != accepted_all:
            self.on_accepts_changed()
        if not self.accepts_writes and self._retry_task is None and not self._is_closed:
            self._retry_task = asyncio.create_task(self._retry_refused())

    async def _retry_refused(self) -> None:
        while not self.accepts_writes:
            await asyncio.sleep(self.retry_s)
            if self.is_up and self._refused.block is not None:
                await self.put([self._refused.block])
            if self.is_up and self._refused.note is not None:
                await self.write_note(*self._refused.note)
        self._retry_task = None

    async def _ask(
        self,
        call: Callable[[], Awaitable[Result]],
        default: Result,
        timeout_s: float,
        num_bytes: int = 0,
        *,
        is_busy: bool = False,
    ) -> Result:
        """Call the store. At the deadline, or when the breaker opens, the call is cancelled. This returns only when the
        call has really ended, since a thread may still use the caller's memory."""
        if self.breaker.is_open:
            return default
        calls = self._calls
        calls.num_bytes += num_bytes
        late_timer = _LateTimer(self, timeout_s + calls.num_bytes / self.min_bytes_per_s)
        watchdog = asyncio.create_task(self._watch()) if num_bytes or is_busy else None
        try:
            async with asyncio.timeout(None) as timeout:
                calls.timeouts[timeout] = None
                try:
                    await self.open()
                    return await self._call(call)
                finally:
                    del calls.timeouts[timeout]
        except KvferryError as error:
            self.mark_failed(str(error))
        except Exception as error:
            if not timeout.expired():
                logger.exception("store tier %s failed unexpectedly", self.name)
                self.mark_failed(repr(error))
        finally:
            calls.num_bytes -= num_bytes
            late_timer.cancel()
            if watchdog is not None:
                watchdog.cancel()
        return default

    async def _watch(self) -> None:
        """Check that the store still answers other calls during a long one."""
        await asyncio.sleep(self.deadline_s * WATCHDOG_SHARE)
        if self.is_open:
            await self._ask(partial(self.store.match, [NO_BLOCK]), 0, self.deadline_s * (1 - WATCHDOG_SHARE))

    # Failures.

    def mark_failed(self, reason: str) -> None:
        """Open the breaker until the tier answers again, and end all running calls."""
        if not self.breaker.is_open:
            self.breaker.open(reason)
            self._calls.expire()

    def mark_late(self, timeout_s: float) -> None:
        """Record that a call has no answer by its deadline."""
        self.num_late += 1
        self.mark_failed(f"did not answer within {timeout_s:.3g} s")

    async def _probe(self) -> None:
        """Repeat the last read, for the breaker. Raises `StoreError` if the answer comes after the deadline."""
        await self.open()
        started, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
        await self._call(partial(self.store.match, [NO_BLOCK]))
        sizes = [self.store.layout.span_bytes(layer) for layer in range(self.store.layout.num_layers)]
        reads = [BlockRead(name, [memoryview(bytearray(size)) for size in sizes]) for name in self._last_reads]
        if reads:
            await self._call(partial(self.store.get, reads))
        num_bytes = len(reads) * self.store.layout.block_bytes
        if loop.time() - started > self.deadline_s + num_bytes / self.min_bytes_per_s:
            raise StoreError("it answers, but too late")


def _buffers_like(views: Sequence[memoryview]) -> list[memoryview]:
    return [memoryview(bytearray(len(view))) for view in views]


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Retrieve a task's exception, so that asyncio does not log it as never retrieved. Callers that still wait for the
    task get the exception."""
    if not task.cancelled():
        task.exception()


class _LateTimer:
    """Reports to a tier that a call has missed its deadline, at the moment when it passes, even if the call ends
    later."""

    grace_s = 0.1
    """If the timer fires more than these seconds too late, this machine is busy, and the store may not be slow."""

    def __init__(self, tier: Tier, timeout_s: float) -> None:
        self._tier, self._timeout_s, self._loop = tier, timeout_s, asyncio.get_running_loop()
        self._due = self._loop.time() + timeout_s
        self._timer = self._loop.call_at(self._due, self._expire)

    def _expire(self) -> None:
        now = self._loop.time()
        if now > self._due + self.grace_s:  # the answer may have arrived, but this loop had no time to read it
            self._due = now + self.grace_s
            self._timer = self._loop.call_at(self._due, self._expire)
        else:
            self._tier.mark_late(self._timeout_s)

    def cancel(self) -> None:
        """Stop the timer, because the call has ended."""
        self._timer.cancel()
