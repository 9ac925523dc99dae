"""Copies of blocks between the tiers of one store: upwards when they are read, downwards after they were written.

Owns the tasks that copy, the memory that they use, and the queue of blocks that write policy "back" has yet to copy to
lower tiers. `tiers` decides from which tier a block is read, and to which it is written first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.runtime.tasks import BackgroundTasks
from kvferry.store.base import Block, BlockRead, PutResult
from kvferry.store.tiered.tier import Tier

logger = logging.getLogger(__name__)

BATCH_BLOCKS = 16
"""Maximum number of blocks in one batch of copies."""


class TierCopies:
    """Copies between `tiers`, the fastest first. `count`: adds to a counter of the store, by name. Used on one event
    loop."""

    settle_s = 30.0
    """Maximum seconds that a note waits for the blocks that were put before it to reach the lower tiers."""
    max_dirty = 65536
    """Maximum number of blocks that wait to be copied to lower tiers. Further blocks stay in the first tier only."""
    max_copy_bytes = 256 * 2**20
    """Maximum bytes of blocks that are being copied between tiers. With more, no further blocks are promoted or
    prefetched."""

    def __init__(self, tiers: Sequence[Tier], layout: KVLayout, count: Callable[..., None]) -> None:
        self._tiers, self._layout, self._count = tiers, layout, count
        self._tasks = BackgroundTasks(_log_error)
        self._moving_bytes = 0
        self._moving: set[BlockHash] = set()
        """Blocks that are being promoted or prefetched."""
        self._dirty: asyncio.Queue[BlockHash] = asyncio.Queue(self.max_dirty)
        self._parents: dict[BlockHash, BlockHash | None] = {}
        """The parent of each block in `_dirty`, or in the batch that is being flushed."""
        self._flusher: asyncio.Task[None] | None = None

    async def close(self, flush_s: float) -> None:
        """Wait up to `flush_s` seconds for the blocks that wait for lower tiers, and cancel all tasks."""
        if self._flusher is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(flush_s):
                    await self._dirty.join()
        await self._tasks.close()

    def statistics(self) -> dict[str, float]:
        """`moving_bytes`: bytes of blocks being copied to higher tiers. `dirty_blocks`: blocks not yet copied to lower
        tiers."""
        return {"moving_bytes": float(self._moving_bytes), "dirty_blocks": float(len(self._parents))}

    # Upwards.

    def promote(self, reads: Sequence[BlockRead], level: int) -> None:
        """Copy blocks that were just read from tier `level` to all tiers above it, in the background. The caller's
        memory is copied before this returns."""
        fresh = [read for read in reads if read.block_hash not in self._moving]
        if fresh and self._may_move(len(fresh)):
            copies = [Block(read.block_hash, [memoryview(bytes(view)) for view in read.into]) for read in fresh]
            self._tasks.start(self._put_above(copies, level))

    async def _put_above(self, blocks: Sequence[Block], level: int) -> None:
        with self._counted_as_moving([block.block_hash for block in blocks]):
            for tier in self._tiers[:level]:
                outcomes = await tier.put(blocks)
                self._count(promoted_blocks=outcomes.count(PutResult.STORED))

    async def prefetch(self, hashes: Sequence[BlockHash]) -> None:
        """Copy to the first tier the blocks that only lower tiers have, as far as `max_copy_bytes` allows."""
        first = self._tiers[0]
        for start in range(0, len(hashes), BATCH_BLOCKS):
            part = hashes[start : start + BATCH_BLOCKS]
            num_present = await first.match(part)
            if not first.is_up:
                return
            missing = [name for name in part[num_present:] if name not in self._moving]
            if not missing or not self._may_move(len(missing)):
                continue
            with self._counted_as_moving(missing):
                await self._copy_to_first(missing)

    async def _copy_to_first(self, hashes: Sequence[BlockHash]) -> None:
        sizes = [self._layout.span_bytes(layer) for layer in range(self._layout.num_layers)]
        reads = [BlockRead(name, [memoryview(bytearray(size)) for size in sizes]) for name in hashes]
        reads_by_hash: dict[BlockHash, BlockRead] = {}
        for tier in self._tiers[1:]:
            missing = [read for read in reads if read.block_hash not in reads_by_hash]
            hits = await tier.get(missing)
            reads_by_hash |= {read.block_hash: read for read, is_hit in zip(missing, hits, strict=True) if is_hit}
        blocks = [Block(name, reads_by_hash[name].into) for name in hashes if name in reads_by_hash]
        if blocks:
            outcomes = await self._tiers[0].put(blocks)
            self._count(prefetched_blocks=outcomes.count(PutResult.STORED))

    def _may_move(self, num_blocks: int) -> bool:
        return self._moving_bytes + num_blocks * self._layout.block_bytes <= self.max_copy_bytes

    @contextmanager
    def _counted_as_moving(self, hashes: Sequence[BlockHash]) -> Iterator[None]:
        """Count these blocks, and the memory of their copies, as moving while the body runs."""
        num_bytes = len(hashes) * self._layout.block_bytes
        self._moving_bytes += num_bytes
        self._moving.update(hashes)
        try:
            yield
        finally:
            self._moving_bytes -= num_bytes
            self._moving.difference_update(hashes)

    # Downwards.

    def flush_later(self, blocks: Sequence[Block]) -> None:
        """Copy these blocks, which an upper tier has just stored, to the tiers below, in the background and in order.
        Blocks beyond `max_dirty` are counted as `unflushed_blocks`."""
        for block in blocks:
            try:
                self._dirty.put_nowait(block.block_hash)
                self._parents[block.block_hash] = block.parent
            except asyncio.QueueFull:
                self._count(unflushed_blocks=1)
        if self._flusher is None:
            self._flusher = self._tasks.start(self._flush())

    async def settle(self) -> None:
        """Wait until all blocks of `flush_later` have been copied, for at most `settle_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settle_s):
                await self._dirty.join()

    async def _flush(self) -> None:
        sizes = [self._layout.span_bytes(layer) for layer in range(self._layout.num_layers)]
        while True:
            names = [await self._dirty.get()]
            while len(names) < BATCH_BLOCKS and not self._dirty.empty():
                names.append(self._dirty.get_nowait())
            try:
                await self._flush_batch(
                    [BlockRead(name, [memoryview(bytearray(size)) for size in sizes]) for name in names]
                )
            except Exception:  # an error must not end this task: later blocks are still copied
                logger.exception("copying blocks to lower tiers failed unexpectedly")
                self._count(unflushed_blocks=len(names))
            finally:
                for name in names:
                    self._parents.pop(name, None)
                    self._dirty.task_done()

    async def _flush_batch(self, reads: Sequence[BlockRead]) -> None:
        hits = [False] * len(reads)
        for tier in self._tiers[:-1]:  # the first tier may have been down when they were put, or have evicted them
            missing = [read for read, is_hit in zip(reads, hits, strict=True) if not is_hit]
            if missing:
                rest = iter(await tier.get(missing))
                hits = [is_hit or next(rest) for is_hit in hits]
        blocks = [
            Block(read.block_hash, read.into, self._parents.get(read.block_hash))
            for read, is_hit in zip(reads, hits, strict=True)
            if is_hit
        ]
        stored = [False] * len(blocks)
        for tier in self._tiers[1:]:
            outcomes = await tier.put(blocks)
            stored = [was or now is not PutResult.DROPPED for was, now in zip(stored, outcomes, strict=True)]
        self._count(flushed_blocks=sum(stored), unflushed_blocks=len(reads) - sum(stored))


def _log_error(error: BaseException) -> None:
    logger.error("copying blocks between tiers failed", exc_info=error)
