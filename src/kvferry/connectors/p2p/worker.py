"""The worker side of the P2P connector: announces blocks of hand-offs, and with `Arrivals` fetches the hand-offs of
others.

Owns the transfer thread, the table of this rank's hand-offs, the lookup buffer by which consumers fetch them, and the
hand-offs that have not ended. The engine's thread calls it; everything that waits runs on the transfer thread.

A plan names blocks of requests that run in its step. They are announced layer by layer, each layer when the step has
passed it: by then, all blocks of the layer are written, whichever request computed or loaded them. On a device, the
kernels of a layer may still be running then, so all layers are announced at the end of the step, after waiting for the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvferry.connectors.api import (
    ByLayers,
    ConnectorContext,
    HasStatistics,
    Released,
    ServesPeers,
    TransferReport,
    WorkerSide,
)
from kvferry.connectors.p2p.arrivals import Arrivals
from kvferry.connectors.p2p.plan import P2pPlan, Save, Seal
from kvferry.connectors.reports import Reports
from kvferry.core.errors import ConnectorLost, LeakError
from kvferry.core.runtime.closing import close_all
from kvferry.transport.connection import Identity
from kvferry.transport.lookup_buffer.base import LookupBuffer, LookupBufferContext, lookup_buffer_class
from kvferry.transport.lookup_buffer.entries import EntryBounds, EntryTable
from kvferry.transport.lookup_buffer.messages import Part
from kvferry.transport.memory import BlockMemory
from kvferry.transport.options import options_of
from kvferry.transport.transfer_loop import call_contained, run_together


class P2pWorkerSide(WorkerSide[P2pPlan], ServesPeers[P2pPlan], ByLayers, HasStatistics):
    """Hands off, and fetches, the KV of one rank. Its settings are `TransportOptions`."""

    start_s = 10.0
    gather_bytes = 2 * 2**20
    """Announcements to a consumer are sent when they have at least this many bytes of KV together: one layer, or
    several small ones."""

    plan_type = P2pPlan
    gauges = frozenset({"num_loading", "num_keys", "held_bytes", "open_connections"})

    table: EntryTable
    _buffer: LookupBuffer
    _arrivals: Arrivals

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._config = context.config
        self._settings = options_of(context.config)
        self._loop = context.machine.transfer_loop("kvferry-transfer")
        self.reports = Reports(self._settings.timeout_s, context.clock)
        self._service: Future[list[None]] | None = None
        self._wait_for_device: Callable[[], None] | None = None
        self._saves: list[Save] = []
        """Blocks that this step announces when it has passed the layers."""
        self._written: list[int] = []
        """Layers that were saved in this step and wait for the device."""
        self._held: dict[str, str] = {}
        """By transfer id, the requests whose blocks are under `Hold` until the table no longer has the key."""

    # Life.

    def register(self, memory: BlockMemory) -> None:
        """Listen, and start the transfer thread."""
        config, layout, settings = self._config, self.context.layout, self._settings
        # The scheduler side lets prefills wait at `kv_buffer_size`; the double value is a safeguard against mistakes.
        bounds = EntryBounds(
            settings.lease_s,
            settings.unsealed_s,
            capacity_bytes=2 * config.kv_buffer_size,
            gather_bytes=self.gather_bytes,
        )
        self.table = EntryTable(memory.geometry, self.context.clock, bounds)
        identity = Identity(config.engine_id, layout)
        self._buffer = lookup_buffer_class(settings).build(
            LookupBufferContext(config, settings, memory, identity, self.context.auth_token, self.table)
        )
        self._wait_for_device = None if self.context.saves_are_complete else self.device_wait(memory.device)
        keep_lease = config.kv_load_failure_policy == "fail"
        self._arrivals = Arrivals(
            self._buffer, layout, settings.timeout_s, self.reports, keep_lease_on_failure=keep_lease
        )
        self._loop.start()
        self._service = self._loop.submit(run_together(self._buffer.run(), self._arrivals.run()))
        self._loop.run(self._arrivals.started.wait(), self.start_s)

    def device_wait(self, device: str) -> Callable[[], None] | None:
        """A function that waits for all work that this thread has queued on the device; None for host memory."""
        if device == "cpu":
            return None
        from kvferry.transport.cuda import copies  # only if the KV cache is on a device

        return copies.device_wait(device)

    def address(self) -> dict[str, Any]:
        return {**self._buffer.address(), "engine_id": self._config.engine_id}

    def close(self) -> None:
        """End the transfer thread and all its tasks, connections and mappings."""
        if self._service is None:
            return
        close_all(self._loop.close, self._buffer.close)

    # Steps.

    def withdraw(self, plan: P2pPlan | None) -> None:
        """Withdraw the announcements of hand-offs that begin again, so that no consumer can fetch the blocks."""
        for transfer_id in plan.resets if plan is not None else ():
            self.table.reset(transfer_id)

    def start(self, plan: P2pPlan | None) -> None:
        """Carry out the plan, except that its `saves` wait for the layers of this step."""
        if plan is None:
            return
        self.discard()  # left over from a step that neither `flush` nor `discard` ended
        for transfer_id, request_id in plan.drops.items():
            if request_id:
                self._held[transfer_id] = request_id
            self._contain(transfer_id, partial(self.table.drop, transfer_id))
        for transfer_id in plan.ends:
            self._contain(transfer_id, partial(self.table.release, transfer_id))
        for save in plan.saves:
            self._contain(save.transfer_id, partial(self._begin, save))
        for seal in plan.seals:
            self._held[seal.transfer_id] = seal.request_id
            self._contain(seal.transfer_id, partial(self._seal, seal))
        for request_id in plan.cancels:
            self.reports.forget(request_id)
        for load in plan.loads.values():
            self.reports.begin(load.request_id)
        if plan.cancels or plan.waits or plan.loads or plan.unwanted:
            self._loop.call(partial(self._arrivals.begin, plan))

    def save_layer(self, layer: int) -> None:
        """Announce this step's blocks of `layer`, once they have their KV."""
        if self._wait_for_device is None:
            self._announce(layer)
        elif self._saves:
            self._written.append(layer)

    def flush(self) -> None:
        """Announce the layers that waited for the device."""
        if self._wait_for_device is not None and self._written:
            self._wait_for_device()
            for layer in self._written:
                self._announce(layer)
        self._written, self._saves = [], []

    def discard(self) -> None:
        """Withdraw the hand-offs whose blocks the failed step was to announce."""
        for save in self._saves:
            self._withdraw(save.transfer_id)
        self._written, self._saves = [], []

    def _begin(self, save: Save) -> None:
        if save.opens:
            self.table.open(save.transfer_id)
        if save.block_ids:
            self._saves.append(save)

    def _seal(self, seal: Seal) -> None:
        if seal.kept_blocks:
            self.table.open(seal.transfer_id)
            self.table.insert(seal.transfer_id, Part(0, self.context.layout.num_layers, 0, seal.kept_blocks))
        self.table.seal(seal.transfer_id, seal.meta, seal.lease_s)

    def _announce(self, layer: int) -> None:
        for save in self._saves:
            part = Part(layer, 1, save.first_block, save.block_ids)
            self._contain(save.transfer_id, partial(self.table.insert, save.transfer_id, part))

    def _contain(self, transfer_id: str, call: Callable[[], object]) -> None:
        """Make a call for one hand-off. If the call fails, this hand-off is withdrawn, and others continue."""
        call_contained(call, f"hand-off {transfer_id}", lambda error: self._withdraw(transfer_id))

    def _withdraw(self, transfer_id: str) -> None:
        """Withdraw a hand-off, so that no consumer can fetch it. If this fails too, its lease expires."""
        self._saves = [save for save in self._saves if save.transfer_id != transfer_id]
        self.table.drop(transfer_id)

    def poll(self) -> TransferReport:
        """Return ended loads, and blocks that are no longer needed. Raises `ConnectorLost` if the transfer thread's
        work has ended."""
        if self._service is not None and self._service.done():
            try:
                self._service.result()
            except Exception as error:
                raise ConnectorLost(f"the transfers of this instance have ended: {error!r}") from error
        ended = self.table.ended(self._held)
        events = self.reports.take()
        return [*(Released(self._held.pop(transfer_id)) for transfer_id in ended), *events]

    def on_report(self, wake: Callable[[], None]) -> None:
        """`wake` is called from the transfer thread."""
        self.reports.wake = self.table.on_end = wake

    # Statistics and checks.

    def statistics(self) -> dict[str, float]:
        """The statistics of the table, the lookup buffer and loads, and `transfer_errors`: errors on the transfer
        thread."""
        errors = {"transfer_errors": float(self._loop.num_errors)}
        return self.table.statistics() | self._buffer.statistics() | self._arrivals.statistics() | errors

    def check(self) -> None:
        self.table.check()
        if self._held or self.reports or not self._arrivals.is_empty():
            raise LeakError("the P2P connector still waits for the end of hand-offs")
