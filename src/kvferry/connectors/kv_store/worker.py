"""The shared storage connector beside the KV cache: copies full blocks out, and reads blocks straight in.

Owns the store and the threads that write to and read from it. The engine's thread only copies, and waits only where
the model wants a layer that is still on its way.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvferry.connectors.api import ConnectorContext, StoreEvents, TransferReport, WorkerSide
from kvferry.connectors.shared_storage.loader import LayerwiseStep, StoreLoader
from kvferry.connectors.shared_storage.markers import MarkerFolder
from kvferry.connectors.shared_storage.plan import SaveBlocks, StoragePlan
from kvferry.connectors.shared_storage.settings import read_settings
from kvferry.connectors.shared_storage.writer import StoreWriter
from kvferry.core.errors import ConfigError, LeakError
from kvferry.store.file import FileStore
from kvferry.transport.memory import BlockMemory


class SharedStorageWorkerSide(WorkerSide):
    """See the module, and `settings` for what can be set. `kv_buffer_size` bounds the copies that wait for the disk."""

    plan_type = StoragePlan
    gauges = frozenset({"num_loading", "kept_bytes", "writer_waiting_bytes"})

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._settings = read_settings(context)
        self._memory: BlockMemory | None = None
        self._saves: list[SaveBlocks] = []
        self._step: LayerwiseStep | None = None
        self._store: FileStore
        self._writer: StoreWriter
        self._loader: StoreLoader

    # Life.

    def register(self, memory: BlockMemory) -> None:
        """Open the store and start the threads."""
        if memory.device != "cpu":
            raise ConfigError(
                f"SharedStorageConnector moves KV in host memory only, and this engine's is on {memory.device};"
                " run it with --device cpu"
            )
        settings, layout = self._settings, self.context.layout
        self._store = FileStore(
            settings.path, layout, max_bytes=settings.max_bytes, fsync=settings.fsync, access=settings.access
        )
        markers = MarkerFolder(settings.path, settings.access)
        self._memory = memory
        self._writer = StoreWriter(self._store, markers, self.context.config.kv_buffer_size)
        self._loader = StoreLoader(self._store, self._block_view, layout.num_layers, settings.timeout_s)

    def close(self) -> None:
        """Stop loading, write what waits, end the threads."""
        if self._memory is None:
            return
        self._loader.close()
        self._writer.close()
        self._store.close()

    # Steps.

    def start(self, plan: StoragePlan | None) -> None:
        """Begin to load; note what to save."""
        if plan is None:
            return
        for request_id in plan.cancels:
            self._loader.cancel(request_id)
        for load in plan.loads:
            if not load.layerwise:
                self._loader.start(load)
        if layerwise := [load for load in plan.loads if load.layerwise]:
            self._step = self._loader.start_layerwise(layerwise)
        self._saves = list(plan.saves)
        for marker in plan.marks:
            self._writer.mark(msgspec.structs.replace(marker, layout=self.context.layout))
        for transfer_id in plan.forgets:
            self._writer.forget(transfer_id, self.context.layout.tp_rank)

    def wait_layer(self, layer: int) -> None:
        """Wait for the layerwise loads of this step."""
        if self._step is not None:
            self._step.wait_layer(layer)

    def flush(self) -> None:
        """Copy the blocks that are full now, unless a load of this step failed: then nobody here knows which of its
        requests were computed on what never came, since they may share blocks."""
        keep = self._drop if self._end_loads() else self._save
        saves, self._saves = self._saves, []
        for save in saves:
            keep(save)

    def _end_loads(self) -> bool:
        """Wait for the layerwise loads of this step; whether one failed."""
        step, self._step = self._step, None
        return step is not None and bool(step.failed())

    def discard(self) -> None:
        """The step failed: nothing of it is kept. Waits for its layerwise loads, bounded by their deadlines."""
        self._end_loads()
        saves, self._saves = self._saves, []
        for save in saves:
            self._drop(save)

    def _save(self, save: SaveBlocks) -> None:
        for block_hash, block_id in zip(save.hashes, save.block_ids, strict=True):
            layers = range(self.context.layout.num_layers)
            copies = [memoryview(bytes(self._block_view(layer, block_id))) for layer in layers]
            self._writer.put(block_hash, copies)

    def _drop(self, save: SaveBlocks) -> None:
        for block_hash in save.hashes:
            self._writer.box.dropped(block_hash)

    def poll(self) -> TransferReport:
        """Loads that ended."""
        return self._loader.box.take()

    def on_report(self, wake: Callable[[], None]) -> None:
        """`wake` is called from the loader's threads."""
        self._loader.box.wake = wake

    # Insight.

    def watch_store(self) -> None:
        """From now on, note what becomes of blocks."""
        self._store.watch()
        self._writer.box.open()

    def store_events(self) -> StoreEvents:
        """What became of them."""
        removed = self._store.take_removed()  # first: what comes and goes between the two is then removed next time
        events = self._writer.box.take()
        events.removed = removed
        return events

    def statistics(self) -> dict[str, float]:
        """Of the store, the writer and the loader."""
        return self._store.statistics() | self._writer.statistics() | self._loader.statistics()

    def check(self) -> None:
        """Raise `LeakError` when a load or a report is left. Blocks may still be on their way to the disk."""
        if self._saves or self._step is not None or not self._loader.is_empty():
            raise LeakError("the shared storage connector still moves blocks of requests that are gone")

    # Memory.

    def _block_view(self, layer: int, block_id: int) -> memoryview:
        assert self._memory is not None
        [span] = self._memory.spans(layer, [block_id])
        return self._memory.view(span)
