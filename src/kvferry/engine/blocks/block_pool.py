"""Owns the reference counts of all KV blocks, and the prefix cache: the map from hashes to blocks.

It knows neither the blocks' bytes nor their users. A block is *in use* while its reference count is above zero,
otherwise *free*, and *cached* while it is in the map, in use or free. A free cached block is evicted when it is needed
for other content: free uncached blocks are allocated first, then cached ones in the order of `CachedOrder`, as in
vLLM's `BlockPool`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.errors import LeakError
from kvferry.engine.blocks.cached_order import CachedOrder, ReleaseOrder
from kvferry.engine.kv_events import BlockEvents
from kvferry.observe.metric_fields import computed_gauge, counter, gauge


@dataclass(frozen=True)
class BlockPoolStatistics:
    """Gauges now and counters since the start, in blocks."""

    num_blocks: int = gauge("kvferry:num_kv_blocks", "Blocks of the KV cache.")
    num_free: int = 0
    num_cached: int = gauge("kvferry:num_cached_kv_blocks", "Blocks that the prefix cache can find.")
    num_evicted: int = counter("kvferry:num_evicted_kv_blocks", "Cached blocks that were evicted.")

    @computed_gauge("vllm:kv_cache_usage_perc", "Fraction of the KV cache in use, from 0 to 1.")
    def usage(self) -> float:
        """Blocks in use, by running requests or held for peers, divided by all blocks."""
        return (self.num_blocks - self.num_free) / self.num_blocks if self.num_blocks else 0.0


class BlockPool:
    """Blocks `0` to `num_blocks - 1`. `order` evicts; default: least recently released first."""

    def __init__(self, num_blocks: int, *, prefix_caching: bool = True, order: CachedOrder | None = None) -> None:
        self.num_blocks = num_blocks
        self._prefix_caching = prefix_caching
        self._order = order or ReleaseOrder()
        self._references = [0] * num_blocks
        self._num_free = num_blocks
        self._free_uncached: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        """The free uncached blocks, the next one to allocate first."""
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}
        self._num_evicted = 0
        self.events: BlockEvents | None = None
        """Called for evicted blocks; `SequenceBlocks.cache_full_blocks` calls it for newly cached ones."""

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` could return now."""
        return self._num_free

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Ids of the blocks of the longest cached prefix of `hashes`. Their reference counts stay unchanged: see
        `acquire`."""
        block_ids = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_free_after_acquiring(self, block_ids: Iterable[int]) -> int:
        """Number of blocks that `allocate` could return after `acquire` of these blocks, which `match` found."""
        return self._num_free - sum(1 for block_id in block_ids if self._references[block_id] == 0)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Raise the reference counts of blocks that `match` found, by one each."""
        for block_id in block_ids:
            was_free = self._references[block_id] == 0
            self._order.acquired(self._hash_of[block_id], was_free=was_free)
            self._num_free -= was_free
            self._references[block_id] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, at most `num_free`, each with a reference count of 1. May evict cached ones."""
        assert count <= self._num_free, "allocate without checking num_free"
        block_ids = [self._take() for _ in range(count)]
        self._num_free -= count
        for block_id in block_ids:
            self._references[block_id] = 1
        return block_ids

    def publish(self, block_id: int, block_hash: BlockHash, parent: BlockHash | None = None) -> bool:
        """Cache a full block in use under the hash of its content; `parent`: the hash of the block before it, if any.

        Returns False if it is cached already, another block has this hash, or there is no prefix cache.
        """
        if not self._prefix_caching or block_id in self._hash_of or block_hash in self._block_of:
            return False
        self._hash_of[block_id] = block_hash
        self._block_of[block_hash] = block_id
        self._order.published(block_hash, parent)
        return True

    def release(self, block_ids: Sequence[int]) -> None:
        """Lower the counts of a sequence's blocks, in its order: its last block is evicted before its first."""
        for block_id in reversed(block_ids):
            assert self._references[block_id] > 0, f"block {block_id} released twice"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._num_free += 1
                if block_id in self._hash_of:
                    self._order.freed(self._hash_of[block_id])
                else:
                    self._free_uncached[block_id] = None
                    self._free_uncached.move_to_end(block_id, last=False)

    def finished(self, hashes: Sequence[BlockHash], num_output_tokens: int) -> None:
        """Record that the answer to the prompt with these block hashes is complete, with `num_output_tokens` tokens."""
        self._order.finished(hashes, num_output_tokens)

    def forget_all(self) -> None:
        """Evict all free cached blocks. Those in use stay cached."""
        for block_id, block_hash in list(self._hash_of.items()):
            if self._references[block_id] == 0:
                self._order.forget(block_hash)
                self._forget(block_hash)
                self._free_uncached[block_id] = None

    def statistics(self) -> BlockPoolStatistics:
        """The current counts of blocks."""
        return BlockPoolStatistics(self.num_blocks, self._num_free, len(self._hash_of), self._num_evicted)

    def check(self, num_held: int = 0) -> None:
        """Raise `LeakError` unless exactly `num_held` blocks are in use, and counts, free blocks and hashes agree."""
        references = self._references.__getitem__
        used = len(self._references) - self._references.count(0)
        if used != num_held:
            raise LeakError(f"{used} KV blocks are in use where {num_held} should be")
        free_cached = list(map(references, self._hash_of)).count(0)
        if used + self._num_free != self.num_blocks or any(map(references, self._free_uncached)):
            raise LeakError("the free list and the reference counts disagree")
        if free_cached + len(self._free_uncached) != self._num_free:
            raise LeakError("the free list lacks blocks, or has some that are cached")
        if dict(zip(self._hash_of.values(), self._hash_of, strict=True)) != self._block_of:
            raise LeakError("the two halves of the block index disagree")
        self._order.check(free_cached, len(self._hash_of) - free_cached)

    def _take(self) -> int:
        """Remove a free block from the free list; it is no longer cached."""
        if self._free_uncached:
            return self._free_uncached.popitem(last=False)[0]
        return self._forget(self._order.evict())

    def _forget(self, block_hash: BlockHash) -> int:
        block_id = self._block_of.pop(block_hash)
        del self._hash_of[block_id]
        self._num_evicted += 1
        if self.events is not None:
            self.events.removed(block_hash)
        return block_id
