"""Moves blocks between the block pool and sequences: allocates them, takes them from the prefix cache, caches and
releases them.

Owns no state: the pool has the reference counts, and each sequence has its block ids. Does not know queues, budgets or
connectors. The known tokens of a sequence are its prompt and the tokens that were sampled so far.
"""

from __future__ import annotations

from kvferry.core.errors import LeakError
from kvferry.engine.blocks.block_pool import BlockPool
from kvferry.engine.scheduling.sequence import Sequence


class SequenceBlocks:
    """Allocates blocks for sequences. `block_size`: tokens in a block."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def cached_block_ids(self, sequence: Sequence) -> list[int]:
        """Ids of the cached blocks that have the sequence's first tokens. At least one token is left to compute. The
        blocks' reference counts do not change."""
        reusable = sequence.hashes() if sequence.reuses_prefix else []
        # At least one known token must be computed: its logits give the next token.
        usable = (len(sequence.tokens) - 1) // self._block_size
        return self._pool.match(reusable[:usable])

    def reserve(self, sequence: Sequence, cached: list[int]) -> bool:
        """Allocate blocks for all known tokens of the sequence, so that a sequence begins only if its prompt fits.
        `cached`: ids of the first blocks, from `cached()`. False: there are not enough free blocks, and none was
        allocated."""
        if self.num_blocks_missing(sequence, cached) > 0:
            return False
        self._pool.acquire(cached)
        sequence.block_ids = list(cached)
        sequence.block_ids += self._pool.allocate(sequence.num_blocks_for(len(sequence.tokens)) - len(cached))
        sequence.num_computed_tokens = len(cached) * self._block_size
        sequence.hash_chain.num_cached_blocks = len(cached)
        return True

    def num_blocks_missing(self, sequence: Sequence, cached: list[int]) -> int:
        """Number of blocks that must become free before `reserve` succeeds; 0 or less: none."""
        num_needed = sequence.num_blocks_for(len(sequence.tokens)) - len(cached)
        return num_needed - self._pool.num_free_after_acquiring(cached)

    def num_blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Number of further blocks that the sequence needs to compute `num_tokens` more tokens; 0 or less: none."""
        return sequence.num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.block_ids)

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        """Allocate `num_blocks` more blocks for the sequence, at most the pool's `num_free`."""
        sequence.block_ids += self._pool.allocate(num_blocks)

    def trim(self, sequence: Sequence) -> None:
        """Release the blocks after the last known token: only drafted tokens that were rejected needed them."""
        first = sequence.num_blocks_for(len(sequence.tokens))
        if len(sequence.block_ids) > first:
            self._pool.release(sequence.block_ids[first:])
            del sequence.block_ids[first:]

    def release_all(self, sequence: Sequence) -> None:
        """Release all blocks of the sequence, which begins again from its first token."""
        self._pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed_tokens = sequence.hash_chain.num_cached_blocks = 0

    def cache_full_blocks(self, sequence: Sequence) -> None:
        """Put the blocks of the sequence that have become full into the prefix cache. Reports a KV event for each,
        unless the request has a `cache_salt` or the sequence is longer than the trained context."""
        num_cached = sequence.hash_chain.num_cached_blocks
        if sequence.num_computed_tokens // self._block_size <= num_cached:
            return
        hashes = sequence.hashes()
        num_full = min(sequence.num_computed_tokens // self._block_size, len(hashes))
        events = self._pool.events if not (sequence.request.cache_salt or sequence.is_long) else None
        for index in range(num_cached, num_full):
            parent = hashes[index - 1] if index else None
            if self._pool.publish(sequence.block_ids[index], hashes[index], parent) and events is not None:
                span = slice(index * self._block_size, (index + 1) * self._block_size)
                events.stored(hashes[index], parent, sequence.tokens[span])
        sequence.hash_chain.num_cached_blocks = max(num_full, num_cached)

    def check(self, sequence: Sequence) -> None:
        """Raise `LeakError` if a block of the sequence is in the prefix cache although the KV of some of its tokens is
        not computed."""
        cached, computed = sequence.hash_chain.num_cached_blocks * self._block_size, sequence.num_computed_tokens
        if cached > computed:
            raise LeakError(f"request {sequence.request_id}: {cached} tokens are cached, {computed} are computed")
