"""Writes blocks and markers on a thread of its own, in the order in which they come.

Owns the queue, bounded in bytes, and the buffers in it. A producer that finds it full waits, but not for ever: when
the disk has stood still for a while, blocks are dropped (a later request computes them again) until it moves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.connectors.reports import StoreEventBox
from kvferry.connectors.shared_storage.markers import Marker, MarkerFolder
from kvferry.core.block_hash import BlockHash
from kvferry.core.errors import StoreError
from kvferry.store.base import KVStore, LayerViews

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 1.0
CLOSE_S = 10.0
SWEEP_EVERY_S = 60.0
WARN_EVERY_S = 10.0


@dataclass(frozen=True)
class _Job:
    num_bytes: int
    do: Callable[[], object]


class StoreWriter:
    """See the module. `capacity_bytes`: most bytes of blocks that wait to be written, or at least one block.

    `box`: what became of each block.
    """

    def __init__(
        self,
        store: KVStore,
        markers: MarkerFolder,
        capacity_bytes: float,
        *,
        longest_wait_s: float = LONGEST_WAIT_S,
    ) -> None:
        self._store, self._markers, self._capacity = store, markers, capacity_bytes
        self._longest_wait_s = longest_wait_s
        self.box = StoreEventBox()
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._num_bytes = 0
        self._stalled = self._closing = self._abandoned = False
        self._counts: Counter[str] = Counter()
        self._last_sweep = self._last_warning = 0.0
        self._thread = threading.Thread(target=self._run, name="kvferry-store-writer", daemon=True)
        self._thread.start()

    # The engine's thread.

    def put(self, block_hash: BlockHash, layers: LayerViews) -> bool:
        """Write a block, soon; `layers` are the writer's now. False: dropped, the disk is too slow."""
        num_bytes = sum(len(layer) for layer in layers)
        with self._changed:
            if not self._wait_for_room(num_bytes):
                self._counts["dropped_blocks"] += 1
                self.box.dropped(block_hash)
                return False
            self._add(_Job(num_bytes, lambda: self._put(block_hash, layers)))
        return True

    def mark(self, marker: Marker) -> None:
        """Write a marker, after all blocks put before."""
        with self._changed:
            self._add(_Job(0, lambda: self._markers.write(marker)))

    def forget(self, transfer_id: str, rank: int) -> None:
        """Remove a rank's marker."""
        with self._changed:
            self._add(_Job(0, lambda: self._markers.remove(transfer_id, rank)))

    def is_empty(self) -> bool:
        """Whether everything is written."""
        with self._changed:
            return not self._jobs and not self._num_bytes

    def statistics(self) -> dict[str, float]:
        """Bytes that wait, and blocks dropped because they could not."""
        with self._changed:
            counts = {f"writer_{name}": float(count) for name, count in self._counts.items()}
            return {"writer_waiting_bytes": float(self._num_bytes), **counts}

    def close(self) -> None:
        """Write what waits, within a bound, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("the shared storage does not answer; %d blocks were not written", len(self._jobs))
            self._abandoned = True

    # Under the lock.

    def _wait_for_room(self, num_bytes: int) -> bool:
        def has_room() -> bool:
            return not self._num_bytes or self._num_bytes + num_bytes <= self._capacity

        if has_room():
            return True
        self._stalled = self._stalled or not self._changed.wait_for(has_room, self._longest_wait_s)
        return not self._stalled

    def _add(self, job: _Job) -> None:
        self._jobs.append(job)
        self._num_bytes += job.num_bytes
        self._changed.notify_all()

    # The writer's thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs or self._abandoned:
                    return
                job = self._jobs.popleft()
            self._do(job)
            with self._changed:
                self._num_bytes -= job.num_bytes
                self._stalled = False
                self._changed.notify_all()

    def _put(self, block_hash: BlockHash, layers: LayerViews) -> None:
        try:
            self._store.put(block_hash, layers)
        except StoreError:
            self.box.dropped(block_hash)
            raise
        self.box.stored(block_hash)

    def _do(self, job: _Job) -> None:
        try:
            job.do()
        except StoreError as error:
            self._warn(error)
        now = time.monotonic()
        if now - self._last_sweep > SWEEP_EVERY_S:
            self._last_sweep = now
            self._markers.sweep()

    def _warn(self, error: StoreError) -> None:
        """Say it, but not for every block of a full disk."""
        now = time.monotonic()
        if now - self._last_warning > WARN_EVERY_S:
            self._last_warning = now
            log.warning("not saved: %s", error)
