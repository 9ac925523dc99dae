"""The worker side of the cache connector: copies full blocks out of the KV cache, and reads blocks directly into it.

Owns the store and the event loop on which it is written to and read. The engine's thread only copies. It waits only if
the model needs a layer that has not arrived.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from kvferry.connectors.api import (
    ByLayers,
    ConnectorContext,
    HasStatistics,
    Released,
    TransferReport,
    WorkerSide,
)
from kvferry.connectors.caching import StoreEvents, StoresBlocks
from kvferry.connectors.kv_store.blocks import BlockBytes, PendingCopy, block_bytes_of
from kvferry.connectors.kv_store.keys import StoredKeys
from kvferry.connectors.kv_store.loader import LayerwiseStep, StoreLoader
from kvferry.connectors.kv_store.markers import MarkerProducer, Markers
from kvferry.connectors.kv_store.plan import SaveBlocks, StoreKeys, StorePlan
from kvferry.connectors.kv_store.settings import read_settings
from kvferry.connectors.kv_store.writer import MAX_WAIT_S, StoreWriter
from kvferry.connectors.reports import Reports
from kvferry.core.errors import ConfigError, LeakError, StoreError
from kvferry.core.runtime.closing import close_all
from kvferry.store.base import Block
from kvferry.store.record import LayerViews
from kvferry.store.tiered.tier import NO_BLOCK
from kvferry.store.tiered.tiers import GAUGES
from kvferry.transport.memory import BlockMemory

logger = logging.getLogger(__name__)

OPEN_S, CLOSE_S = 60.0, 15.0


class KVStoreWorkerSide(WorkerSide[StorePlan], ByLayers, StoresBlocks, HasStatistics):
    """Saves and loads the KV of one rank. Its settings are `StoreSettings`; `kv_buffer_size` limits the bytes of copies
    that wait for the store."""

    max_jobs_ahead = 1024
    """A hint (`FinishedRequest`) is dropped if more jobs than this are queued in the writer."""

    plan_type = StorePlan
    gauges = GAUGES | {"num_loading", "writer_waiting_bytes"}

    def __init__(
        self,
        context: ConnectorContext,
        make_blocks: Callable[[BlockMemory, bool], BlockBytes] = block_bytes_of,
    ) -> None:
        super().__init__(context)
        self._settings = read_settings(context)
        self._make_blocks = make_blocks
        self._blocks: BlockBytes | None = None
        self._saves: list[tuple[SaveBlocks, PendingCopy]] = []
        self._step: LayerwiseStep | None = None
        self._store = self._settings.open_later(context.layout, context.machine)
        self._loop = context.machine.transfer_loop("kvferry-store")
        self._reports = Reports(self._settings.timeout_s, context.clock)
        self._markers = Markers(context.auth_token, context.clock)
        self._keys = StoredKeys(context.auth_token, context.clock)
        self._new_keys: list[StoreKeys] = []
        self._producer: MarkerProducer | None = None
        """Set if this instance can hand off."""
        self._writer: StoreWriter
        self._loader: StoreLoader

    # Life.

    def register(self, memory: BlockMemory) -> None:
        """Open the store for KV in this memory. Raises `ConfigError` if the memory is neither host memory nor CUDA
        memory."""
        config, layout = self.context.config, self.context.layout
        self._blocks = self._make_blocks(memory, self.context.saves_are_complete)
        self._loop.start()
        max_wait_s = MAX_WAIT_S if config.kv_role == "kv_producer" else 0.0
        self._writer = StoreWriter(self._store, self._loop, config.kv_buffer_size, max_wait_s=max_wait_s)
        if config.produces and self._store.is_shared:
            self._producer = MarkerProducer(
                self._store,
                self._markers,
                config.engine_id,
                is_writing=lambda: not self._writer.is_empty(),
                report=self._reports.add,
            )
        self._loader = StoreLoader(
            self._store, self._loop, self._blocks, layout.num_layers, self._settings.timeout_s, self._reports
        )
        try:
            self._loop.run(self._open_store(), OPEN_S)
        except TimeoutError as error:
            raise ConfigError(f"the store did not open within {OPEN_S:g} s") from error

    async def _open_store(self) -> None:
        await self._store.open()
        with suppress(StoreError):  # no tier answers: each tier has logged this now, not with the first request
            await self._store.match([NO_BLOCK])

    def close(self) -> None:
        """Stop loading, write the queued blocks, and end the thread. May be called twice."""
        blocks, self._blocks = self._blocks, None
        if blocks is not None:
            close_all(self._loader.close, self._writer.close, self._close_store, self._loop.close, blocks.close)

    def _close_store(self) -> None:
        try:
            self._loop.run(self._store.close(), CLOSE_S)
        except TimeoutError:
            logger.warning("a store could not be closed")

    # Steps.

    def start(self, plan: StorePlan | None) -> None:
        """Begin to load, and to copy the blocks to save."""
        if plan is None:
            return
        for request_id in plan.cancels:
            self._reports.forget(request_id)
            self._loader.cancel(request_id)
        for load in plan.loads:
            if not load.layerwise:
                self._reports.begin(load.request_id)
                self._loader.start(load)
        if layerwise := [load for load in plan.loads if load.layerwise]:
            self._step = self._loader.start_layerwise(layerwise)
        self._saves, self._new_keys = [], plan.keys
        for save in plan.saves:
            self._begin_to_save(save)
        if self._producer is not None and (plan.marks or plan.saves):
            self._loop.call(self._producer.start_heartbeats)
            for marker in plan.marks:
                own_marker = msgspec.structs.replace(marker, layout=self.context.layout)
                self._writer.submit(partial(self._producer.write_marker, own_marker))
        for finished in plan.finished:
            finish = partial(self._store.finish, finished.hashes, finished.num_output_tokens)
            self._writer.submit(finish, limit=self.max_jobs_ahead)
        for transfer_id in plan.forgets:
            rank = self.context.layout.tp_rank
            self._writer.submit(partial(self._markers.remove, self._store, transfer_id, rank))
        for request_id in plan.flushes:
            self._loop.submit(self._release_when_written(request_id, self._written()))

    def _written(self) -> asyncio.Event:
        """An event that is set when all jobs that are queued in the writer now have been written or dropped."""
        written = asyncio.Event()

        async def set_written() -> None:
            written.set()

        self._writer.submit(set_written)
        return written

    async def _release_when_written(self, request_id: str, written: asyncio.Event) -> None:
        if not await self._within_deadline(written):
            logger.warning("request %s: its answer ends before all of its KV is stored", request_id)
        self._reports.add(Released(request_id))

    def _begin_to_save(self, save: SaveBlocks) -> None:
        assert self._blocks is not None
        try:
            self._saves.append((save, self._blocks.begin_copy(save.block_ids)))
        except MemoryError as error:
            logger.warning("%d blocks are not saved: %s", len(save.block_ids), error)
            self._writer.drop(save.hashes)

    def wait_layer(self, layer: int) -> None:
        """Wait for the layerwise loads of this step."""
        if self._step is not None:
            self._step.wait_layer(layer)

    def save_layer(self, layer: int) -> None:
        """Begin to copy this layer of the blocks that have become full."""
        for _, copy in self._saves:
            copy.layer(layer)

    def flush(self) -> None:
        """Copy the blocks that have become full, unless a load of this step failed: requests may share blocks, so each
        of these blocks may depend on KV that never arrived."""
        has_failed = self._end_loads()
        saves, self._saves = self._saves, []
        for save, copy in saves:
            if has_failed:
                self._drop(save, copy)
            else:
                self._put(save, copy.end())
        keys, self._new_keys = self._new_keys, []
        for store_keys in () if has_failed else keys:
            self._writer.submit(partial(self._keys.write, self._store, store_keys))
        if keys and not self.context.delays_answers:
            self._wait_until_written()

    def _wait_until_written(self) -> None:
        """Wait until the keys of the step's answers are stored, in an engine that cannot delay answers."""
        future = self._loop.submit(self._within_deadline(self._written()))
        if not future.result():
            logger.warning("answers end before all of their KV is stored")

    async def _within_deadline(self, written: asyncio.Event) -> bool:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await written.wait()
        except TimeoutError:
            return False

    def _drop(self, save: SaveBlocks, copy: PendingCopy) -> None:
        copy.drop()
        self._writer.drop(save.hashes)

    def _put(self, save: SaveBlocks, blocks: Sequence[LayerViews]) -> None:
        parent = save.parent
        for block_hash, layers in zip(save.hashes, blocks, strict=True):
            self._writer.put(Block(block_hash, layers, parent))
            parent = block_hash

    def _end_loads(self) -> bool:
        """Wait for the layerwise loads of this step. Returns True if one of them failed."""
        step, self._step = self._step, None
        return step is not None and bool(step.failed())

    def discard(self) -> None:
        """Drop the work of the failed step. Waits for its layerwise loads, which end by their deadlines."""
        self._end_loads()
        saves, self._saves, self._new_keys = self._saves, [], []
        for save, copy in saves:
            self._drop(save, copy)

    def poll(self) -> TransferReport:
        """Report loads that have ended, and hand-offs that were written."""
        return self._reports.take()

    def on_report(self, wake: Callable[[], None]) -> None:
        """`wake` is called from the store's thread."""
        self._reports.wake = wake

    # Insight.

    def watch_store(self) -> None:
        """Start to record which blocks are stored and dropped."""
        self._store.activity.watch()
        self._writer.watch()

    def store_events(self) -> StoreEvents:
        """The blocks that were stored and dropped since the last call."""
        events = self._writer.take_events()
        events.changes = self._store.activity.take_changes()
        return events

    def statistics(self) -> dict[str, float]:
        """The statistics of the store, the writer and the loader."""
        keys = {name: float(count) for name, count in self._keys.counts.items()}
        return self._store.statistics() | self._writer.statistics() | self._loader.statistics() | keys

    def is_flushed(self) -> bool:
        """True if all saved blocks and their markers have been written or dropped."""
        return self._writer.is_empty()

    def check(self) -> None:
        """Raise `LeakError` if a load is left. Blocks may still be queued for the store."""
        if self._saves or self._step is not None or not self._loader.is_empty():
            raise LeakError("the cache connector still moves blocks of requests that are gone")
