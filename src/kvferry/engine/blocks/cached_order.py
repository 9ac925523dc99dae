"""The order in which the prefix cache evicts cached blocks that no request uses.

Either least recently released first, as in vLLM's block pool, or by an eviction policy of the stores
(`kvferry.store.eviction`), which is called for every use and may learn from it. Blocks are identified by their hashes;
block ids and reference counts belong to the block pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import LeakError
from kvferry.store.eviction.base import EvictionPolicy
from kvferry.store.eviction.guarded import GuardedPolicy
from kvferry.store.eviction.table import make_eviction_policy

BY_RELEASE = "lru"


class CachedOrder(ABC):
    """The eviction order of a pool's cached blocks. Blocks in use are never evicted."""

    @abstractmethod
    def published(self, block_hash: BlockHash, parent: BlockHash | None) -> None:
        """Record that a block in use is cached under this hash; `parent`: the hash of the block before it, if any."""

    @abstractmethod
    def acquired(self, block_hash: BlockHash, *, was_free: bool) -> None:
        """Record that one more sequence uses the block; `was_free`: no sequence used it before."""

    @abstractmethod
    def freed(self, block_hash: BlockHash) -> None:
        """Record that no sequence uses the block any more. A sequence's blocks are freed from its last to its first."""

    @abstractmethod
    def evict(self) -> BlockHash:
        """Choose a free block, forget it and return its hash. There must be one."""

    @abstractmethod
    def forget(self, block_hash: BlockHash) -> None:
        """Remove a free block that is no longer cached, for another reason than `evict`."""

    def finished(self, hashes: Sequence[BlockHash], num_output_tokens: int) -> None:
        """Record that the answer to the prompt with these blocks is complete. Default: does nothing."""
        return

    @abstractmethod
    def check(self, num_free: int, num_used: int) -> None:
        """Raise `LeakError` unless the order agrees with these numbers of cached blocks, free and in use."""


class ReleaseOrder(CachedOrder):
    """Evicts the block that was freed first; within one sequence, its last block. Knows free blocks only."""

    def __init__(self) -> None:
        self._free: OrderedDict[BlockHash, None] = OrderedDict()

    def published(self, block_hash: BlockHash, parent: BlockHash | None) -> None:
        """Does nothing: a block in use is not in the order."""

    def acquired(self, block_hash: BlockHash, *, was_free: bool) -> None:
        """Take the block out of the order, if it was free."""
        if was_free:
            del self._free[block_hash]

    def freed(self, block_hash: BlockHash) -> None:
        """Put the block at the end of the order."""
        self._free[block_hash] = None

    def evict(self) -> BlockHash:
        """Take the first of the order."""
        return self._free.popitem(last=False)[0]

    def forget(self, block_hash: BlockHash) -> None:
        """Take the block out of the order."""
        del self._free[block_hash]

    def check(self, num_free: int, num_used: int) -> None:
        """Raise `LeakError` unless exactly the free cached blocks are in the order."""
        if len(self._free) != num_free:
            raise LeakError(f"{len(self._free)} cached KV blocks can be evicted where {num_free} are free")


class PolicyOrder(CachedOrder):
    """Evicts the block that an eviction policy chooses. The policy has all cached blocks; blocks in use are pinned."""

    def __init__(self, policy: EvictionPolicy, clock: Clock) -> None:
        self._policy, self._clock = GuardedPolicy(policy), clock

    def published(self, block_hash: BlockHash, parent: BlockHash | None) -> None:
        """Insert the block into the policy, pinned."""
        self._policy.insert(block_hash, self._clock.monotonic(), parent)
        self._policy.pin(block_hash)

    def acquired(self, block_hash: BlockHash, *, was_free: bool) -> None:
        """Count a use, and pin the block if it was free."""
        self._policy.access(block_hash, self._clock.monotonic())
        if was_free:
            self._policy.pin(block_hash)

    def freed(self, block_hash: BlockHash) -> None:
        """Unpin the block in the policy."""
        self._policy.unpin(block_hash, self._clock.monotonic())

    def evict(self) -> BlockHash:
        """Remove the block that the policy evicts; returns its hash."""
        block_hash = self._policy.evict(self._clock.monotonic())
        assert isinstance(block_hash, bytes), "a cached block is free, so the policy knows one that is not pinned"
        return block_hash

    def forget(self, block_hash: BlockHash) -> None:
        """Remove the block from the policy."""
        self._policy.remove(block_hash)

    def finished(self, hashes: Sequence[BlockHash], num_output_tokens: int) -> None:
        """Pass an answer's end on to the policy, which may learn from its length."""
        self._policy.finish(hashes, num_output_tokens, self._clock.monotonic())

    def check(self, num_free: int, num_used: int) -> None:
        """Raise `LeakError` unless the policy has as many blocks as are cached."""
        if len(self._policy) != num_free + num_used:
            raise LeakError(f"the policy keeps {len(self._policy)} blocks where {num_free + num_used} are cached")


def make_cached_order(eviction: str, num_blocks: int, clock: Clock = SYSTEM_CLOCK) -> CachedOrder:
    """Make a `ReleaseOrder` for `lru`, else a `PolicyOrder` with that policy. Raises `UnknownName` or `ConfigError`."""
    if eviction == BY_RELEASE:
        return ReleaseOrder()
    return PolicyOrder(make_eviction_policy(eviction, num_blocks), clock)
