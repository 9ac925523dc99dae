"""Writes blocks on the store's event loop, and makes other calls to the store, in the order of their arrival.

Owns the queue, which is bounded in bytes, and the buffers in it. While the queue is full, blocks are dropped: a later
request computes them again. Only a producer, which has no answers to delay, waits for room, for a limited time. If
there is still no room, the store has stalled, and further blocks are dropped at once until it has written something.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from kvferry.connectors.caching import StoreEvents
from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import KvferryError
from kvferry.store.base import Block, KVStore, PutResult
from kvferry.transport.transfer_loop import TransferLoop

logger = logging.getLogger(__name__)

MAX_WAIT_S = 1.0
"""Maximum seconds for which a producer waits for room in the queue."""
BATCH_BLOCKS = 32
"""Maximum blocks of one put."""

Call = Callable[[], Awaitable[None]]


class StoreWriter:
    """Writes to `store` on `loop`. `capacity_bytes`: maximum bytes of queued blocks; one block may always be queued.
    `max_wait_s`: maximum seconds for which `put` waits for room."""

    warning_interval_s = 10.0
    """Minimum seconds between two warnings."""
    close_s = 10.0
    """Maximum seconds in which `close` writes the queued blocks."""

    def __init__(self, store: KVStore, loop: TransferLoop, capacity_bytes: float, *, max_wait_s: float = 0.0) -> None:
        self._store, self._loop, self._capacity, self._max_wait_s = store, loop, capacity_bytes, max_wait_s
        self._changed = threading.Condition()
        self._jobs: deque[Block | Call] = deque()
        self._num_bytes = self._num_dropped = 0
        self._is_stalled = self._is_working = False
        self._events: StoreEvents | None = None
        self._last_warning = 0.0
        self._jobs_event, self._batch_done = asyncio.Event(), asyncio.Event()
        self._running: Future[None] = loop.submit(self._run())

    # The engine's thread.

    def put(self, block: Block) -> bool:
        """Queue a block. The writer owns the block's memory from now on. False: the block is dropped, because the store
        is too slow."""
        num_bytes = _block_bytes(block)
        with self._changed:
            if not self._wait_for_room(num_bytes):
                self._num_dropped += 1
                self._record_outcome(block.block_hash, PutResult.DROPPED)
                return False
            self._num_bytes += num_bytes
            self._jobs.append(block)
        self._loop.call(self._jobs_event.set)
        return True

    def submit(self, call: Call, *, limit: int | None = None) -> None:
        """Queue a call to the store. It is made on the loop, after all blocks that were put before. `limit`: the call
        is dropped if this many jobs are queued already."""
        with self._changed:
            if limit is not None and len(self._jobs) >= limit:
                return
            self._jobs.append(call)
        self._loop.call(self._jobs_event.set)

    def drop(self, hashes: Sequence[BlockHash]) -> None:
        """Record the event that these blocks are dropped. They were to be written, but were never put."""
        with self._changed:
            for block_hash in hashes:
                self._record_outcome(block_hash, PutResult.DROPPED)

    def watch(self) -> None:
        """Start to record events of blocks, for `take_events`."""
        self._events = StoreEvents()

    def take_events(self) -> StoreEvents:
        """Return the events of blocks since the last call."""
        with self._changed:
            events, self._events = self._events or StoreEvents(), StoreEvents()
            return events

    def is_empty(self) -> bool:
        """True if no job is queued or running."""
        with self._changed:
            return not self._jobs and not self._is_working

    def statistics(self) -> dict[str, float]:
        """Bytes of queued blocks, and the number of blocks that were dropped because the queue was full."""
        dropped = {"writer_dropped_blocks": float(self._num_dropped)} if self._num_dropped else {}
        return {"writer_waiting_bytes": float(self._num_bytes), **dropped}

    def close(self) -> None:
        """Write the queued blocks, in at most `close_s` seconds, and stop."""
        with suppress(TimeoutError):
            self._loop.run(self._drain(), self.close_s + 1)

    def _wait_for_room(self, num_bytes: int) -> bool:
        def has_room() -> bool:
            return not self._num_bytes or self._num_bytes + num_bytes <= self._capacity

        if has_room():
            return True
        self._is_stalled = self._is_stalled or not self._loop.wait_for(self._changed, has_room, self._max_wait_s)
        return not self._is_stalled

    # On the loop.

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self.close_s):
                while not self.is_empty():
                    self._batch_done.clear()
                    await self._batch_done.wait()
        except TimeoutError:
            logger.warning("the store does not answer; %d blocks and markers were not written", len(self._jobs))
        finally:
            self._running.cancel()

    async def _run(self) -> None:
        while True:
            await self._jobs_event.wait()
            self._jobs_event.clear()
            while jobs := self._next():
                try:
                    first = jobs[0]
                    if isinstance(first, Block):
                        await self._put([job for job in jobs if isinstance(job, Block)])
                    else:
                        await first()
                except KvferryError as error:
                    self._warn(error)
                except Exception:  # any error ends only this job
                    logger.exception("writing to the store failed unexpectedly")
                finally:
                    self._done(jobs)

    def _next(self) -> list[Block | Call]:
        """Take the next blocks, `BATCH_BLOCKS` at most, or the next call."""
        with self._changed:
            jobs: list[Block | Call] = []
            while self._jobs and len(jobs) < BATCH_BLOCKS:
                if jobs and not (isinstance(self._jobs[0], Block) and isinstance(jobs[0], Block)):
                    break
                jobs.append(self._jobs.popleft())
            self._is_working = bool(jobs)
            return jobs

    def _done(self, jobs: Sequence[Block | Call]) -> None:
        with self._changed:
            self._num_bytes -= sum(_block_bytes(job) for job in jobs if isinstance(job, Block))
            self._is_stalled = self._is_working = False
            self._changed.notify_all()
        self._batch_done.set()

    async def _put(self, blocks: Sequence[Block]) -> None:
        outcomes: Sequence[PutResult] = [PutResult.DROPPED] * len(blocks)
        try:
            outcomes = await self._store.put(blocks)
        finally:
            with self._changed:
                for block, outcome in zip(blocks, outcomes, strict=True):
                    self._record_outcome(block.block_hash, outcome)

    def _record_outcome(self, block_hash: BlockHash, outcome: PutResult) -> None:
        if self._events is not None:
            (self._events.dropped if outcome is PutResult.DROPPED else self._events.stored).append(block_hash)

    def _warn(self, error: KvferryError) -> None:
        """Log an error, unless another one was logged less than `warning_interval_s` ago: a full disk fails for every
        block."""
        now = SYSTEM_CLOCK.monotonic()
        if now - self._last_warning > self.warning_interval_s:
            self._last_warning = now
            logger.warning("blocks are not stored: %s", error)


def _block_bytes(block: Block) -> int:
    return sum(len(layer) for layer in block.layers)
