"""Reads blocks from the store into KV memory, on threads of its own, and reports how each load ended.

Owns the loads under way. A load ends, in any way, only when nothing more is written to its blocks. (A read that the
operating system does not return from, as on a hung network file system, therefore delays that end beyond the
deadline.)
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvferry.connectors.api import Failed, Loaded, Prefilled, Released
from kvferry.connectors.reports import ReportBox
from kvferry.connectors.shared_storage.plan import LoadBlocks
from kvferry.core.errors import KvferryError, StoreError, TransferTimeout
from kvferry.store.base import KVStore

log = logging.getLogger(__name__)

NUM_THREADS = 2

LayerView = Callable[[int, int], memoryview]
"""(layer, block id) → where that block's bytes of that layer lie."""


class _Load:
    """One request's load."""

    def __init__(self, load: LoadBlocks, deadline: float) -> None:
        self.load, self.deadline = load, deadline
        self.cancelled = False
        self.error: KvferryError | None = None

    def goes_on(self) -> bool:
        """Whether another block is to be read."""
        if self.error is None and time.monotonic() >= self.deadline:
            self.error = TransferTimeout("the shared storage did not deliver the blocks in time")
        return self.error is None and not self.cancelled


class LayerwiseStep:
    """The layerwise loads of one step, read layer by layer across all of them."""

    def __init__(self, loads: Sequence[_Load], num_layers: int) -> None:
        self.loads = loads
        self._num_layers = num_layers
        self._changed = threading.Condition()
        self._num_ready = 0
        self._over = False

    def layer_is_ready(self) -> None:
        """One more layer of all loads is in, or given up."""
        with self._changed:
            self._num_ready += 1
            self._changed.notify_all()

    def is_over(self) -> None:
        """Nothing is written any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def wait_layer(self, layer: int) -> None:
        """Wait until the layer is in, or the loads are over; each load bounds itself by its deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._num_ready > layer)

    def failed(self) -> set[str]:
        """Wait for the end; the requests whose KV did not come."""
        with self._changed:
            self._changed.wait_for(lambda: self._over)
        return {load.load.request_id for load in self.loads if load.error is not None}


class StoreLoader:
    """See the module. Used by the engine's thread."""

    def __init__(self, store: KVStore, view: LayerView, num_layers: int, timeout_s: float) -> None:
        self.box = ReportBox()
        self._store, self._view, self._num_layers = store, view, num_layers
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvferry-store-load")
        self._lock = threading.Lock()
        self._loads: dict[str, _Load] = {}
        self._counts: Counter[str] = Counter()

    def start(self, load: LoadBlocks) -> None:
        """Read a request's blocks."""
        self._pool.submit(self._run, self._begin(load))

    def start_layerwise(self, loads: Sequence[LoadBlocks]) -> LayerwiseStep:
        """Read the blocks of several requests, layer by layer."""
        step = LayerwiseStep([self._begin(load) for load in loads], self._num_layers)
        self._pool.submit(self._run_layerwise, step)
        return step

    def cancel(self, request_id: str) -> None:
        """Stop a load; its request is reported `released` when nothing more is written, also if it has ended."""
        with self._lock:
            load = self._loads.get(request_id)
            if load is not None:
                load.cancelled = True
        if load is None:
            self.box.add(Released(request_id))

    def is_empty(self) -> bool:
        """Whether no load is under way and no report waits."""
        with self._lock:
            return not (self._loads or self.box)

    def statistics(self) -> dict[str, float]:
        """Loads under way, done, and failed by kind of error."""
        with self._lock:
            counts = {name: float(count) for name, count in self._counts.items()}
            return {"num_loading": float(len(self._loads)), **counts}

    def close(self) -> None:
        """Stop all loads and end the threads."""
        with self._lock:
            for load in self._loads.values():
                load.cancelled = True
        self._pool.shutdown(cancel_futures=True)

    def _begin(self, load: LoadBlocks) -> _Load:
        begun = _Load(load, time.monotonic() + self._timeout_s)
        with self._lock:
            self._loads[load.request_id] = begun
        return begun

    # The loader's threads.

    def _run(self, load: _Load) -> None:
        try:
            self._read_blocks(load)
        except Exception as error:  # noqa: BLE001 - the thread's outermost edge: the request must hear of it
            load.error = _unexpected(error)
        self._end(load)

    def _run_layerwise(self, step: LayerwiseStep) -> None:
        try:
            self._read_layers(step)
        except Exception as error:  # noqa: BLE001 - as above
            for load in step.loads:
                load.error = _unexpected(error)
        for load in step.loads:
            self._end(load)
        step.is_over()

    def _read_blocks(self, load: _Load) -> None:
        for block_hash, block_id in zip(load.load.hashes, load.load.block_ids, strict=True):
            if not load.goes_on():
                return
            into = [self._view(layer, block_id) for layer in range(self._num_layers)]
            self._read(load, partial(self._store.get, block_hash, into))

    def _read_layers(self, step: LayerwiseStep) -> None:
        for layer in range(self._num_layers):
            for load in step.loads:
                self._read_layer(load, layer)
            step.layer_is_ready()

    def _read_layer(self, load: _Load, layer: int) -> None:
        for block_hash, block_id in zip(load.load.hashes, load.load.block_ids, strict=True):
            if not load.goes_on():
                return
            into = self._view(layer, block_id)
            self._read(load, partial(self._store.get_layer, block_hash, layer, into))

    def _read(self, load: _Load, read: Callable[[], bool]) -> None:
        try:
            if not read():
                load.error = StoreError("a block was evicted or damaged since it was looked for")
        except StoreError as error:
            load.error = error

    def _end(self, load: _Load) -> None:
        request_id = load.load.request_id
        with self._lock:
            del self._loads[request_id]
            cancelled = load.cancelled
            self._counts[_outcome(load)] += 1
        if cancelled:
            self.box.add(Released(request_id))
        elif load.error is not None:
            self.box.add(Failed(request_id, load.error))
        else:
            result = load.load.prefill_result
            self.box.add(*([Prefilled(request_id, result)] if result is not None else []), Loaded(request_id))


def _outcome(load: _Load) -> str:
    """For the counters."""
    if load.cancelled:
        return "cancelled_loads"
    return "loads" if load.error is None else f"failed_{type(load.error).__name__}"


def _unexpected(error: Exception) -> StoreError:
    log.exception("reading blocks failed in a way that nobody foresaw")
    return StoreError(f"reading blocks failed: {error!r}")
