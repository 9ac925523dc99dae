"""Reads blocks from the store into KV memory, on the store's event loop, and reports the end of each load.

Owns the running loads. However a load ends, nothing writes to its blocks afterwards. (So a read that does not return,
as on a network file system that hangs, delays the end beyond the deadline. Layerwise loads, for which the engine waits,
are read to the loader's own memory and then copied.)
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvferry.connectors.api import Failed, Loaded, Prefilled, Released
from kvferry.connectors.kv_store.blocks import BlockBytes
from kvferry.connectors.kv_store.plan import LoadBlocks
from kvferry.connectors.reports import Reports
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import KvferryError, StoreError, TransferTimeout
from kvferry.core.runtime.tasks import BackgroundTasks
from kvferry.store.base import BlockRead
from kvferry.store.tiered.tiers import TieredStore
from kvferry.transport.transfer_loop import TransferLoop

logger = logging.getLogger(__name__)

BATCH_BLOCKS = 32


@dataclass(eq=False)
class _Load:
    """One request's load. `seconds`: duration of reading, without the wait for `_concurrency`."""

    load: LoadBlocks
    error: KvferryError | None = None
    seconds: float | None = None
    is_cancelled: bool = False
    task: asyncio.Task[None] | None = None


class LayerwiseStep:
    """The layerwise loads of one step. They are read layer by layer: one layer of all loads, then the next. The
    engine's thread waits for them."""

    def __init__(self, loads: Sequence[LoadBlocks]) -> None:
        self.loads = [_Load(load) for load in loads]
        self.is_abandoned = False
        """True if nothing may write to the step's blocks any more. Used on the loop only."""
        self._changed = threading.Condition()
        self._num_ready = 0.0

    def set_ready(self, num_layers: float) -> None:
        """Record that the first `num_layers` layers of all loads have arrived or failed. Infinity: all loads have
        ended."""
        with self._changed:
            self._num_ready = num_layers
            self._changed.notify_all()

    def wait_layer(self, layer: int) -> None:
        """Wait until the layer has arrived or the loads have ended. They end at their deadline at the latest."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_ready > layer)

    def failed(self) -> set[str]:
        """Wait until the loads have ended. Returns the ids of the requests whose loads failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_ready == float("inf"))
        return {load.load.request_id for load in self.loads if load.error is not None}


class StoreLoader:
    """Starts, cancels and counts loads. Called on the engine's thread; calls to the store run on `loop`."""

    max_concurrent_loads = 4
    """Maximum number of loads that read at the same time. Other loads wait, within their deadlines."""

    def __init__(
        self,
        store: TieredStore,
        loop: TransferLoop,
        blocks: BlockBytes,
        num_layers: int,
        timeout_s: float,
        reports: Reports,
    ) -> None:
        self._store, self._loop, self._blocks, self._num_layers = store, loop, blocks, num_layers
        self._timeout_s, self._reports = timeout_s, reports
        self._concurrency = asyncio.Semaphore(self.max_concurrent_loads)
        self._loads: dict[str, _Load] = {}
        self._counts: Counter[str] = Counter()
        self._tasks = BackgroundTasks()
        """Steps and the tasks of their reads. A read may end long after it was abandoned."""

    def start(self, load: LoadBlocks) -> None:
        """Read a request's blocks."""
        self._loop.call(partial(self._start, _Load(load)))

    def start_layerwise(self, loads: Sequence[LoadBlocks]) -> LayerwiseStep:
        """Read the blocks of several requests, layer by layer."""
        step = LayerwiseStep(loads)
        self._loop.call(partial(self._start_layerwise, step))
        return step

    def cancel(self, request_id: str) -> None:
        """Stop a load. Its request is reported as `Released` when nothing writes to its blocks any more, also if the
        load has already ended."""
        self._loop.call(partial(self._cancel, request_id))

    def is_empty(self) -> bool:
        """True if no load is running."""
        return not self._loads

    def statistics(self) -> dict[str, float]:
        """Numbers of running and completed loads, and of failed loads by kind of error."""
        counts = {name: float(count) for name, count in self._counts.copy().items()}
        return {"num_loading": float(len(self._loads)), **counts}

    def close(self) -> None:
        """Stop all loads."""
        for request_id in list(self._loads):
            self.cancel(request_id)

    # On the loop.

    def _start(self, load: _Load) -> None:
        self._loads[load.load.request_id] = load
        load.task = asyncio.create_task(self._run(load))
        load.task.add_done_callback(
            lambda task: self._on_load_ended(load)
        )  # called also if the task was cancelled before it began

    def _start_layerwise(self, step: LayerwiseStep) -> None:
        self._loads |= {load.load.request_id: load for load in step.loads}
        self._tasks.start(self._run_layerwise(step))

    def _cancel(self, request_id: str) -> None:
        load = self._loads.get(request_id)
        if load is None:
            self._reports.add(Released(request_id))
            return
        load.is_cancelled = True
        if load.task is not None:
            load.task.cancel()

    async def _run(self, load: _Load) -> None:
        try:
            async with asyncio.timeout(self._timeout_s), self._concurrency:
                started = SYSTEM_CLOCK.monotonic()
                await self._read_blocks(load.load)
                load.seconds = SYSTEM_CLOCK.monotonic() - started
        except Exception as error:  # noqa: BLE001 - the task's outermost edge: the error is reported for the request
            load.error = _as_kvferry_error(error)
        except asyncio.CancelledError:
            load.is_cancelled = True
            raise

    async def _run_layerwise(self, step: LayerwiseStep) -> None:
        started, read_task = SYSTEM_CLOCK.monotonic(), self._tasks.start(self._read_layers(step))
        try:
            done, _ = await asyncio.wait({read_task}, timeout=self._timeout_s)
            if not done:
                raise TimeoutError
            read_task.result()
            if len(step.loads) == 1:  # the time of each of several loads is not known
                step.loads[0].seconds = SYSTEM_CLOCK.monotonic() - started
        except asyncio.CancelledError:
            for load in step.loads:
                load.error = StoreError("the engine ends")
        except Exception as error:  # noqa: BLE001 - as above
            for load in step.loads:
                load.error = load.error or _as_kvferry_error(error)
        step.is_abandoned = True
        read_task.cancel()  # it may be long in ending
        for load in step.loads:
            self._on_load_ended(load)
        step.set_ready(float("inf"))

    async def _read_layers(self, step: LayerwiseStep) -> None:
        for layer in range(self._num_layers):
            for load in step.loads:
                await self._read_layer(step, load, layer)
            step.set_ready(layer + 1)

    async def _read_blocks(self, load: LoadBlocks) -> None:
        for first in range(0, len(load.hashes), BATCH_BLOCKS):
            names, block_ids = load.hashes[first : first + BATCH_BLOCKS], load.block_ids[first : first + BATCH_BLOCKS]
            buffer = self._blocks.staging_buffer(range(self._num_layers), block_ids)
            reads = [BlockRead(name, views) for name, views in zip(names, buffer.views, strict=True)]
            _require_all(await self._store.get(reads))
            buffer.commit()

    async def _read_layer(self, step: LayerwiseStep, load: _Load, layer: int) -> None:
        if load.is_cancelled or load.error is not None:
            return
        buffer = self._blocks.staging_buffer([layer], load.load.block_ids, in_place=False)
        reads = [(name, view) for name, [view] in zip(load.load.hashes, buffer.views, strict=True)]
        try:
            _require_all(await self._store.get_layer(layer, reads))
        except StoreError as error:
            load.error = error
            return
        if not step.is_abandoned:
            buffer.commit()

    def _on_load_ended(self, load: _Load) -> None:
        """Report the end of a load. Nothing writes to its blocks any more."""
        request_id, result = load.load.request_id, load.load.prefill_result
        del self._loads[request_id]
        if load.is_cancelled:
            self._counts["cancelled_loads"] += 1
            self._reports.add(Released(request_id))
        elif load.error is not None:
            self._counts[f"failed_{type(load.error).__name__}"] += 1
            self._reports.add(Failed(request_id, load.error))
        else:
            self._counts["loads"] += 1
            loaded = Loaded(request_id, seconds=load.seconds)
            self._reports.add(*([Prefilled(request_id, result)] if result is not None else []), loaded)


def _require_all(hits: Sequence[bool]) -> None:
    if not all(hits):
        raise StoreError("a block was evicted or damaged since it was found, or its store did not answer")


def _as_kvferry_error(error: Exception) -> KvferryError:
    if isinstance(error, KvferryError):
        return error
    if isinstance(error, TimeoutError):
        return TransferTimeout("the store did not deliver the blocks in time")
    logger.error("reading blocks failed unexpectedly", exc_info=error)
    return StoreError(f"reading blocks failed: {error!r}")
