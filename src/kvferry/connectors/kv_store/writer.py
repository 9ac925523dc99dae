"""Writes blocks and markers on the store's event loop, in the order in which they come.

Owns the queue, bounded in bytes, and the buffers in it. Blocks that find it full are dropped: a later request computes
them again. Only a producer, which has no answers to hold up, waits for room, and not for ever: when the store has stood
still for a while, its blocks are dropped too, until it moves.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvferry.connectors.kv_store.markers import Marker, Markers
from kvferry.connectors.kv_store.plan import FinishedRequest
from kvferry.connectors.kv_store.reports import StoreEventBox
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import KvferryError
from kvferry.store.base import Block, KVStore, Put
from kvferry.transport.transfer_loop import TransferLoop

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 1.0
CLOSE_S = 10.0
WARN_EVERY_S = 10.0
BATCH_BLOCKS = 32


@dataclass(frozen=True)
class _Forget:
    transfer_id: str
    rank: int


@dataclass(frozen=True)
class _Late:
    """A marker that the store did not take; it is tried until then (s, monotonic)."""

    marker: Marker
    until: float


_Job = Block | Marker | FinishedRequest | _Forget | _Late
MARK_S, AGAIN_S = 30.0, 0.5
"""How long, and how often, a marker is tried that the store does not take: a consumer waits for it."""
MOST_AGAIN = 1024
"""Markers that are tried again; beyond, a consumer waits in vain, and computes."""
MAX_FINISHED_BEHIND = 1024
"""Jobs that may wait when one more of these hints comes; beyond, it is dropped."""


class StoreWriter:
    """See the module. `capacity_bytes`: most bytes of blocks that wait to be written, or at least one block.

    `box`: what became of each block. `longest_wait_s`: how long `put` waits for room.
    """

    def __init__(
        self,
        store: KVStore,
        loop: TransferLoop,
        markers: Markers,
        capacity_bytes: float,
        *,
        longest_wait_s: float = 0.0,
    ) -> None:
        self._store, self._loop, self._markers, self._capacity = store, loop, markers, capacity_bytes
        self._longest_wait_s = longest_wait_s
        self.box = StoreEventBox()
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._num_bytes = 0
        self._stalled = self._working = False
        self._counts: Counter[str] = Counter()
        self._last_warning = 0.0
        self._news = asyncio.Event()
        self._again: dict[tuple[str, int], asyncio.TimerHandle] = {}
        self._running: Future[None] = loop.submit(self._run())

    # The engine's thread.

    def put(self, block: Block) -> bool:
        """Write a block, soon; its bytes are the writer's now. False: dropped, the store is too slow."""
        num_bytes = _size(block)
        with self._changed:
            if not self._wait_for_room(num_bytes):
                self._counts["dropped_blocks"] += 1
                self.box.dropped(block.block_hash)
                return False
            self._num_bytes += num_bytes
            self._jobs.append(block)
        self._loop.call(self._news.set)
        return True

    def mark(self, marker: Marker) -> None:
        """Write a marker, after all blocks put before."""
        self._add(marker)

    def finished(self, request: FinishedRequest) -> None:
        """Tell the store, after all blocks put before."""
        with self._changed:
            if len(self._jobs) >= MAX_FINISHED_BEHIND:
                return
        self._add(request)

    def forget(self, transfer_id: str, rank: int) -> None:
        """Remove a rank's marker."""
        self._add(_Forget(transfer_id, rank))

    def is_empty(self) -> bool:
        """Whether everything is written."""
        with self._changed:
            return not self._jobs and not self._working

    def statistics(self) -> dict[str, float]:
        """Bytes that wait, and blocks dropped because they could not."""
        with self._changed:
            counts = {f"writer_{name}": float(count) for name, count in self._counts.items()}
            return {"writer_waiting_bytes": float(self._num_bytes), **counts}

    def close(self) -> None:
        """Write what waits, within a bound."""
        deadline = SYSTEM_CLOCK.monotonic() + CLOSE_S
        with self._changed:
            if not self._changed.wait_for(
                lambda: not self._jobs and not self._working, deadline - SYSTEM_CLOCK.monotonic()
            ):
                log.warning("the store does not answer; %d blocks and markers were not written", len(self._jobs))
        self._running.cancel()

    def _add(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
        self._loop.call(self._news.set)

    def _wait_for_room(self, num_bytes: int) -> bool:
        def has_room() -> bool:
            return not self._num_bytes or self._num_bytes + num_bytes <= self._capacity

        if has_room():
            return True
        self._stalled = self._stalled or not self._changed.wait_for(has_room, self._longest_wait_s)
        return not self._stalled

    # On the loop.

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while jobs := self._next():
                try:
                    await self._do(jobs)
                except KvferryError as error:
                    self._warn(error)
                except Exception:  # the writer's outermost edge: it goes on with the next
                    log.exception("writing to the store failed unexpectedly")
                finally:
                    self._done(jobs)

    def _next(self) -> list[_Job]:
        """The next blocks, as many as go together; or one other job."""
        with self._changed:
            jobs: list[_Job] = []
            while self._jobs and len(jobs) < BATCH_BLOCKS:
                if jobs and not (isinstance(self._jobs[0], Block) and isinstance(jobs[0], Block)):
                    break
                jobs.append(self._jobs.popleft())
            self._working = bool(jobs)
            return jobs

    def _done(self, jobs: Sequence[_Job]) -> None:
        with self._changed:
            self._num_bytes -= sum(_size(job) for job in jobs if isinstance(job, Block))
            self._stalled = self._working = False
            self._changed.notify_all()

    async def _do(self, jobs: Sequence[_Job]) -> None:
        match jobs[0]:
            case Marker() as marker:
                await self._mark(marker, SYSTEM_CLOCK.monotonic() + MARK_S)
            case _Late(marker, until):
                await self._mark(marker, until)
            case FinishedRequest() as finished:
                await self._store.finish(finished.hashes, finished.num_output_tokens)
            case _Forget() as forget:
                self._not_again(forget.transfer_id, forget.rank)
                await self._markers.remove(self._store, forget.transfer_id, forget.rank)
            case _:
                await self._put([job for job in jobs if isinstance(job, Block)])

    async def _mark(self, marker: Marker, until: float) -> None:
        name = marker.transfer_id, marker.layout.tp_rank
        self._not_again(*name)  # of an earlier marker of that name
        try:
            await self._markers.write(self._store, marker)
        except KvferryError:
            if SYSTEM_CLOCK.monotonic() < until and len(self._again) < MOST_AGAIN:
                loop = asyncio.get_running_loop()
                self._again[name] = loop.call_later(AGAIN_S, self._add, _Late(marker, until))
            raise

    def _not_again(self, transfer_id: str, rank: int) -> None:
        if (waiting := self._again.pop((transfer_id, rank), None)) is not None:
            waiting.cancel()

    async def _put(self, blocks: Sequence[Block]) -> None:
        outcomes: Sequence[Put] = [Put.DROPPED] * len(blocks)
        try:
            outcomes = await self._store.put(blocks)
        finally:
            for block, outcome in zip(blocks, outcomes, strict=True):
                if outcome is Put.DROPPED:
                    self.box.dropped(block.block_hash)
                else:
                    self.box.stored(block.block_hash)

    def _warn(self, error: KvferryError) -> None:
        """Say it, but not for every block of a full disk."""
        now = SYSTEM_CLOCK.monotonic()
        if now - self._last_warning > WARN_EVERY_S:
            self._last_warning = now
            log.warning("not saved: %s", error)


def _size(block: Block) -> int:
    return sum(len(layer) for layer in block.layers)
