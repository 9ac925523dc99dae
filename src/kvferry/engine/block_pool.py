"""Owns which KV block belongs to whom, and which free block still holds what content.

It does not know what a block's bytes are, nor who its holders are: it counts them. A block is *used* while its
reference count is above zero. A free block that was published under a hash stays findable until its place is
needed: free blocks are reused least recently used first, nameless ones before named ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.core.block_hash import BlockHash
from kvferry.core.errors import LeakError
from kvferry.engine.kv_events import BlockEvents
from kvferry.observe.figures import computed_gauge, counter, gauge


@dataclass(frozen=True)
class BlockPoolStatistics:
    """Block counts now, and counters since the start."""

    num_blocks: int = gauge("kvferry:num_kv_blocks", "Blocks of the KV cache.")
    num_free: int = 0
    num_cached: int = gauge("kvferry:num_cached_kv_blocks", "Blocks that the prefix cache can find.")
    num_evicted: int = counter("kvferry:num_evicted_kv_blocks", "Cached blocks whose place was needed.")

    @computed_gauge("vllm:kv_cache_usage_perc", "Part of the KV cache in use, from 0 to 1.")
    def usage(self) -> float:
        """Blocks that a request has, or that are held, of all."""
        return (self.num_blocks - self.num_free) / self.num_blocks if self.num_blocks else 0.0


class BlockPool:
    """`num_blocks` blocks, numbered from 0."""

    def __init__(self, num_blocks: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self._prefix_caching = prefix_caching
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}
        self._num_evicted = 0
        self.events: BlockEvents | None = None
        """Hears of names that come and go."""

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could give out now."""
        return len(self._free)

    def match(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks that hold the longest present prefix of `hashes`. They are not reserved: see `acquire`."""
        found = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_free_after_acquiring(self, block_ids: Iterable[int]) -> int:
        """How many blocks would be left to allocate once these matched ones are acquired."""
        return len(self._free) - sum(1 for block_id in block_ids if self._references[block_id] == 0)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Become one more holder of blocks that `match` found."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                del self._free[block_id]
            self._references[block_id] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks; the caller has looked at `num_free`."""
        assert count <= len(self._free), "allocate without looking at num_free"
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self._forget(block_id)
            self._references[block_id] = 1
        return taken

    def publish(self, block_id: int, block_hash: BlockHash) -> bool:
        """The block's content is complete and has this name: True when it can now be found. A second block of one name
        stays nameless."""
        if not self._prefix_caching or block_id in self._hash_of or block_hash in self._block_of:
            return False
        self._hash_of[block_id] = block_hash
        self._block_of[block_hash] = block_id
        return True

    def release(self, block_ids: Sequence[int]) -> None:
        """Stop holding blocks, given in sequence order: the last become reusable first, prefixes live longest."""
        for block_id in reversed(block_ids):
            assert self._references[block_id] > 0, f"block {block_id} released twice"
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self._hash_of:
                    self._free.move_to_end(block_id, last=False)

    def forget_all(self) -> None:
        """Drop the names of all free blocks: an empty prefix cache."""
        for block_id in self._free:
            self._forget(block_id)

    def statistics(self) -> BlockPoolStatistics:
        """A snapshot."""
        return BlockPoolStatistics(self.num_blocks, len(self._free), len(self._hash_of), self._num_evicted)

    def check(self, num_held: int = 0) -> None:
        """Raise `LeakError` unless exactly `num_held` blocks are used and the books agree with each other."""
        used = sum(1 for count in self._references if count)
        if used != num_held:
            raise LeakError(f"{used} KV blocks are in use where {num_held} should be")
        if used + len(self._free) != self.num_blocks or any(self._references[block] for block in self._free):
            raise LeakError("the free list and the reference counts disagree")
        if {name: block for block, name in self._hash_of.items()} != self._block_of:
            raise LeakError("the two halves of the block index disagree")

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of.pop(block_id, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            self._num_evicted += 1
            if self.events is not None:
                self.events.removed(block_hash)
