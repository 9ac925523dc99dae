"""The cache connector beside the KV cache: copies full blocks out, and reads blocks straight in.

Owns the store and the event loop on which it is written to and read. The engine's thread only copies, and waits only
where the model wants a layer that is still on its way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from kvferry.connectors.api import (
    ByLayers,
    ConnectorContext,
    HasStatistics,
    Reports,
    StoreEvents,
    StoresBlocks,
    TransferReport,
    WorkerSide,
)
from kvferry.connectors.kv_store.loader import LayerwiseStep, StoreLoader
from kvferry.connectors.kv_store.markers import MarkerProducer, Markers
from kvferry.connectors.kv_store.plan import SaveBlocks, StorePlan
from kvferry.connectors.kv_store.settings import read_settings
from kvferry.connectors.kv_store.writer import LONGEST_WAIT_S, StoreWriter
from kvferry.connectors.overdue import OverdueLoads
from kvferry.core.closing import close_all
from kvferry.core.errors import ConfigError, LeakError, StoreError
from kvferry.store.base import Block
from kvferry.store.tier import NO_BLOCK
from kvferry.store.tiers import GAUGES
from kvferry.transport.memory import BlockMemory
from kvferry.transport.transfer_loop import TransferLoop

log = logging.getLogger(__name__)

OPEN_S, CLOSE_S = 60.0, 15.0
MAX_FINISHED_BEHIND = 1024
"""If more jobs of the writer than this wait when a hint (`FinishedRequest`) comes, the hint is dropped."""


class KVStoreWorkerSide(WorkerSide[StorePlan], ByLayers, StoresBlocks, HasStatistics):
    """Saves and loads the KV of one rank. `StoreSettings` says what can be set; `kv_buffer_size` bounds the copies that
    wait for the disk."""

    plan_type = StorePlan
    gauges = GAUGES | {"num_loading", "writer_waiting_bytes"}

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._settings = read_settings(context)
        self._memory: BlockMemory | None = None
        self._saves: list[SaveBlocks] = []
        self._step: LayerwiseStep | None = None
        self._store = self._settings.open_later(context.layout)
        self._loop = TransferLoop("kvferry-store")
        self._reports = Reports()
        self._markers = Markers(context.auth_token, context.clock)
        self._producer: MarkerProducer | None = None
        """Set if this instance can hand off."""
        self._overdue = OverdueLoads(self._settings.timeout_s, context.clock)
        self._writer: StoreWriter
        self._loader: StoreLoader

    # Life.

    def register(self, memory: BlockMemory) -> None:
        """Open the store for KV in this memory. Raises `ConfigError` for memory of a device."""
        if memory.device != "cpu":
            raise ConfigError(
                f"{self.context.config.kv_connector} moves KV in host memory only, and this engine's is on"
                f" {memory.device}; run it with --device cpu"
            )
        config, layout = self.context.config, self.context.layout
        self._loop.start()
        self._memory = memory
        longest_wait_s = LONGEST_WAIT_S if config.kv_role == "kv_producer" else 0.0
        self._writer = StoreWriter(self._store, self._loop, config.kv_buffer_size, longest_wait_s=longest_wait_s)
        if config.produces and any(tier.store.is_shared for tier in self._store.tiers):
            self._producer = MarkerProducer(
                self._store,
                self._markers,
                config.engine_id,
                is_writing=lambda: not self._writer.is_empty(),
                report=self._reports.add,
            )
        self._loader = StoreLoader(
            self._store, self._loop, self._block_views, layout.num_layers, self._settings.timeout_s, self._reports
        )
        try:
            self._loop.submit(self._open_store()).result(OPEN_S)
        except TimeoutError as error:
            raise ConfigError(f"the store did not open within {OPEN_S:g} s") from error

    async def _open_store(self) -> None:
        await self._store.open()
        with suppress(StoreError):  # no tier answers: each has said so in the log, now and not with the first request
            await self._store.match([NO_BLOCK])

    def close(self) -> None:
        """Stop loading, write what waits, end the thread. May be called twice."""
        if self._memory is None:
            return
        try:
            close_all(self._loader.close, self._writer.close, self._close_store, self._loop.close)
        finally:
            self._memory = None

    def _close_store(self) -> None:
        try:
            self._loop.submit(self._store.close()).result(CLOSE_S)
        except TimeoutError:
            log.warning("a store could not be closed")

    # Steps.

    def start(self, plan: StorePlan | None) -> None:
        """Begin to load; note what to save."""
        if plan is None:
            return
        for request_id in plan.cancels:
            self._overdue.forget(request_id)
            self._loader.cancel(request_id)
        for load in plan.loads:
            if not load.layerwise:
                self._overdue.begin(load.request_id)
                self._loader.start(load)
        if layerwise := [load for load in plan.loads if load.layerwise]:
            self._step = self._loader.start_layerwise(layerwise)
        self._saves = list(plan.saves)
        if self._producer is not None and (plan.marks or plan.saves):
            self._loop.call(self._producer.writes)
            for marker in plan.marks:
                ours = msgspec.structs.replace(marker, layout=self.context.layout)
                self._writer.then(partial(self._producer.mark, ours))
        for finished in plan.finished:
            finish = partial(self._store.finish, finished.hashes, finished.num_output_tokens)
            self._writer.then(finish, limit=MAX_FINISHED_BEHIND)
        for transfer_id in plan.forgets:
            rank = self.context.layout.tp_rank
            self._writer.then(partial(self._markers.remove, self._store, transfer_id, rank))

    def wait_layer(self, layer: int) -> None:
        """Wait for the layerwise loads of this step."""
        if self._step is not None:
            self._step.wait_layer(layer)

    def flush(self) -> None:
        """Copy the blocks that are full now, unless a load of this step failed: then it is unknown which requests were
        computed on KV that never arrived, since they may share blocks."""
        keep = self._drop if self._end_loads() else self._save
        saves, self._saves = self._saves, []
        for save in saves:
            keep(save)

    def _end_loads(self) -> bool:
        """Wait for the layerwise loads of this step. Returns whether any of them failed."""
        step, self._step = self._step, None
        return step is not None and bool(step.failed())

    def discard(self) -> None:
        """The step failed: nothing of it is kept. Waits for its layerwise loads, bounded by their deadlines."""
        self._end_loads()
        saves, self._saves = self._saves, []
        for save in saves:
            self._drop(save)

    def _save(self, save: SaveBlocks) -> None:
        parent, layers = save.parent, range(self.context.layout.num_layers)
        by_layer = [self._block_views(layer, save.block_ids) for layer in layers]
        for block_hash, views in zip(save.hashes, zip(*by_layer, strict=True), strict=True):
            copies = [memoryview(bytes(view)) for view in views]
            self._writer.put(Block(block_hash, copies, parent))
            parent = block_hash

    def _drop(self, save: SaveBlocks) -> None:
        self._writer.drop(save.hashes)

    def poll(self) -> TransferReport:
        """Report loads that have ended, and hand-offs that were written."""
        return self._overdue.checked(self._reports.take())

    def on_report(self, wake: Callable[[], None]) -> None:
        """`wake` is called from the store's thread."""
        self._reports.wake = wake

    # Insight.

    def watch_store(self) -> None:
        """Record from now on which blocks are stored and dropped."""
        self._store.watch()
        self._writer.watch()

    def store_events(self) -> StoreEvents:
        """The blocks that were stored and dropped since the last call."""
        events = self._writer.take_events()
        events.changes = self._store.take_changes()
        return events

    def statistics(self) -> dict[str, float]:
        """The statistics of the store, the writer and the loader."""
        return self._store.statistics() | self._writer.statistics() | self._loader.statistics()

    def check(self) -> None:
        """Raise `LeakError` when a load is left. Blocks may still be on their way to the disk."""
        if self._saves or self._step is not None or not self._loader.is_empty():
            raise LeakError("the cache connector still moves blocks of requests that are gone")

    # Memory.

    def _block_views(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        assert self._memory is not None
        return self._memory.block_views(layer, block_ids)
