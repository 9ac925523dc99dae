"""Least recently used, and of one prompt its last block first: the order of vLLM's block pool."""

from __future__ import annotations

from collections import deque

from kvferry.store.eviction.base import BlockKey, EvictionPolicy

ALLOWED_STALE = 64


class LeafLru(EvictionPolicy):
    """A queue of batches. A batch has blocks that were used one after another, each deeper in its prompt than the one
    before, and is evicted from its end. A block that other cached blocks follow, because its prompt came in several
    batches, is moved to a newer batch instead."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._batches: deque[list[BlockKey]] = deque([[]])
        self._num_entries = 0
        """Number of entries in all batches, including the stale entries of blocks that were used again."""
        self._batch_of: dict[BlockKey, list[BlockKey]] = {}
        self._positions: dict[BlockKey, tuple[BlockKey | None, int]] = {}
        """Each block's parent, and the number of blocks before it in its prompt, as far as they were cached."""
        self._num_children: dict[BlockKey, int] = {}
        self._newest_depth = -1
        """The depth of the block that was used last."""

    def _insert(self, key: BlockKey, now: float, parent: BlockKey | None) -> None:
        depth = 0
        if parent is not None:
            if parent in self._positions:
                depth = self._positions[parent][1] + 1
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
        self._positions[key] = parent, depth
        self._append(key, depth)

    def _access(self, key: BlockKey, now: float) -> None:
        self._append(key, self._positions[key][1])

    def _append(self, key: BlockKey, depth: int) -> None:
        if depth <= self._newest_depth:
            self._batches.append([])
        self._newest_depth = depth
        batch = self._batch_of[key] = self._batches[-1]
        batch.append(key)
        self._num_entries += 1
        if self._num_entries > 2 * len(self._batch_of) + ALLOWED_STALE:
            self._drop_stale()

    def _drop_stale(self) -> None:
        live_batches = ([key for key in batch if self._batch_of.get(key) is batch] for batch in self._batches)
        self._batches = deque(batch for batch in live_batches if batch)
        self._batch_of = {key: batch for batch in self._batches for key in batch}
        self._num_entries = len(self._batch_of)

    def _remove(self, key: BlockKey) -> None:
        del self._batch_of[key]
        parent, _ = self._positions.pop(key)
        if parent is not None:
            left = self._num_children[parent] - 1
            if left:
                self._num_children[parent] = left
            else:
                del self._num_children[parent]

    def _victim(self, now: float) -> BlockKey | None:
        moves_left = len(self._batch_of)  # more are only needed if blocks precede each other in a circle
        while self._batch_of:
            batch = self._batches[0]
            if not batch:
                self._batches.popleft()
                if not self._batches:
                    self._batches.append([])
                continue
            key = batch.pop()
            self._num_entries -= 1
            if self._batch_of.get(key) is not batch:
                continue
            if key in self._num_children and moves_left:
                moves_left -= 1
                self._newest_depth = self._positions[key][1]  # so that it begins a batch
                self._append(key, self._newest_depth)
                continue
            self._remove(key)
            return key
        return None

    def _restore(self, key: BlockKey, now: float) -> None:
        self._insert(key, now, None)

    def _orders(self, key: BlockKey) -> bool:
        return key in self._batch_of

    def _num_ordered(self) -> int:
        return len(self._batch_of)
