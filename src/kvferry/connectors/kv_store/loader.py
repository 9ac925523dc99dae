"""Reads blocks from the store into KV memory, on the store's event loop, and reports how each load ended.

Owns the loads under way. A load ends, in any way, only when nothing more is written to its blocks. (A read that the
operating system does not return from, as on a hung network file system, therefore delays that end beyond the
deadline. Not so layerwise: the engine waits for those, so they are read to memory of the loader's and copied.)
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvferry.connectors.api import Failed, Loaded, Prefilled, Released
from kvferry.connectors.kv_store.plan import LoadBlocks
from kvferry.connectors.kv_store.reports import ReportBox
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import KvferryError, StoreError, TransferTimeout
from kvferry.store.base import KVStore, Read
from kvferry.store.copying import copy_bytes
from kvferry.transport.transfer_loop import TransferLoop

log = logging.getLogger(__name__)

NUM_AT_A_TIME = 4
"""Loads; the others wait for their turn, within their deadlines."""
BATCH_BLOCKS = 32

LayerViews = Callable[[int, Sequence[int]], list[memoryview]]
"""(layer, block ids) → where each block's bytes of that layer lie."""


class _Load:
    """One request's load."""

    def __init__(self, load: LoadBlocks) -> None:
        self.load = load
        self.cancelled = False
        self.error: KvferryError | None = None
        self.seconds: float | None = None
        """How long reading took, without the wait for its turn."""
        self.future: Future[None] | None = None


class LayerwiseStep:
    """The layerwise loads of one step, read layer by layer across all of them."""

    def __init__(self, loads: Sequence[_Load]) -> None:
        self.loads = loads
        self._changed = threading.Condition()
        self._num_ready = 0
        self._over = False
        self.is_given_up = False
        """On the loop: whether nothing may be written to its blocks any more."""

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
    """See the module. Used by the engine's thread; the store is asked on `loop`."""

    def __init__(
        self, store: KVStore, loop: TransferLoop, views: LayerViews, num_layers: int, timeout_s: float
    ) -> None:
        self.box = ReportBox()
        self._store, self._loop, self._views, self._num_layers = store, loop, views, num_layers
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(NUM_AT_A_TIME)
        self._lock = threading.Lock()
        self._loads: dict[str, _Load] = {}
        self._counts: Counter[str] = Counter()
        self._left: set[asyncio.Task[None]] = set()
        """Reads of steps that were given up, until they end."""

    def start(self, load: LoadBlocks) -> None:
        """Read a request's blocks."""
        begun = self._begin(load)
        begun.future = self._loop.submit(self._run(begun))

    def start_layerwise(self, loads: Sequence[LoadBlocks]) -> LayerwiseStep:
        """Read the blocks of several requests, layer by layer."""
        step = LayerwiseStep([self._begin(load) for load in loads])
        self._loop.submit(self._run_layerwise(step))
        return step

    def cancel(self, request_id: str) -> None:
        """Stop a load; its request is reported `released` when nothing more is written, also if it has ended."""
        with self._lock:
            load = self._loads.get(request_id)
            if load is not None:
                load.cancelled = True
        if load is None:
            self.box.add(Released(request_id))
        elif load.future is not None:
            load.future.cancel()

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
        """Stop all loads."""
        with self._lock:
            loads = list(self._loads.values())
        for load in loads:
            load.cancelled = True
            if load.future is not None:
                load.future.cancel()

    def _begin(self, load: LoadBlocks) -> _Load:
        begun = _Load(load)
        with self._lock:
            self._loads[load.request_id] = begun
        return begun

    # On the loop.

    async def _run(self, load: _Load) -> None:
        try:
            async with asyncio.timeout(self._timeout_s), self._turns:
                begun = SYSTEM_CLOCK.monotonic()
                await self._read_blocks(load)
                load.seconds = SYSTEM_CLOCK.monotonic() - begun
        except asyncio.CancelledError:
            load.cancelled = True
        except Exception as error:  # noqa: BLE001 - the task's outermost edge: the request must hear of it
            load.error = _as_ours(error)
        self._end(load)

    async def _run_layerwise(self, step: LayerwiseStep) -> None:
        begun, reading = SYSTEM_CLOCK.monotonic(), asyncio.create_task(self._read_layers(step))
        try:
            done, _ = await asyncio.wait({reading}, timeout=self._timeout_s)
            if not done:
                raise TimeoutError
            reading.result()
            if len(step.loads) == 1:  # of several, whose time it was is not known
                step.loads[0].seconds = SYSTEM_CLOCK.monotonic() - begun
        except asyncio.CancelledError:
            for load in step.loads:
                load.error = StoreError("the engine ends")
        except Exception as error:  # noqa: BLE001 - as above
            for load in step.loads:
                load.error = load.error or _as_ours(error)
        step.is_given_up = True
        if reading.cancel():  # it may be long in ending
            self._left.add(reading)
            reading.add_done_callback(self._left.discard)
        for load in step.loads:
            self._end(load)
        step.is_over()

    async def _read_layers(self, step: LayerwiseStep) -> None:
        for layer in range(self._num_layers):
            for load in step.loads:
                await self._read_layer(step, load, layer)
            step.layer_is_ready()

    async def _read_blocks(self, load: _Load) -> None:
        wanted = list(zip(load.load.hashes, load.load.block_ids, strict=True))
        layers = range(self._num_layers)
        for first in range(0, len(wanted), BATCH_BLOCKS):
            part = wanted[first : first + BATCH_BLOCKS]
            by_layer = [self._views(layer, [block_id for _, block_id in part]) for layer in layers]
            reads = [
                Read(name, list(views)) for (name, _), views in zip(part, zip(*by_layer, strict=True), strict=True)
            ]
            _require_all(await self._store.get(reads))

    async def _read_layer(self, step: LayerwiseStep, load: _Load, layer: int) -> None:
        if load.cancelled or load.error is not None:
            return
        views = self._views(layer, load.load.block_ids)
        reads = [(name, memoryview(bytearray(len(view)))) for name, view in zip(load.load.hashes, views, strict=True)]
        try:
            _require_all(await self._store.get_layer(layer, reads))
        except StoreError as error:
            load.error = error
            return
        if not step.is_given_up:
            for view, (_, content) in zip(views, reads, strict=True):
                copy_bytes(view, content)

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
            result, loaded = load.load.prefill_result, Loaded(request_id, seconds=load.seconds)
            self.box.add(*([Prefilled(request_id, result)] if result is not None else []), loaded)


def _require_all(found: Sequence[bool]) -> None:
    if not all(found):
        raise StoreError("a block was evicted or damaged since it was looked for, or its store did not answer")


def _outcome(load: _Load) -> str:
    """For the counters."""
    if load.cancelled:
        return "cancelled_loads"
    return "loads" if load.error is None else f"failed_{type(load.error).__name__}"


def _as_ours(error: Exception) -> KvferryError:
    if isinstance(error, KvferryError):
        return error
    if isinstance(error, TimeoutError):
        return TransferTimeout("the store did not deliver the blocks in time")
    log.error("reading blocks failed unexpectedly", exc_info=error)
    return StoreError(f"reading blocks failed: {error!r}")
