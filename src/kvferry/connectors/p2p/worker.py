"""The P2P connector beside the KV cache: moves blocks from a prefill instance's memory into a decode instance's.

Owns the transfer thread, the table of what is handed off from here, and the lookup buffer by which consumers get it.
The engine's thread calls it; whatever waits runs on the transfer thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from kvferry.connectors.api import ConnectorContext, Released, TransferReport, WorkerSide
from kvferry.connectors.p2p.arrivals import Arrivals
from kvferry.connectors.p2p.departures import Departures
from kvferry.connectors.p2p.options import options_of
from kvferry.connectors.p2p.plan import P2pPlan
from kvferry.core.clock import SystemClock
from kvferry.core.errors import ConnectorLost, LeakError
from kvferry.transport.lookup_buffer.base import LookupBuffer, LookupBufferContext
from kvferry.transport.lookup_buffer.build import build_lookup_buffer
from kvferry.transport.lookup_buffer.entries import EntryBounds, EntryTable
from kvferry.transport.memory import BlockMemory
from kvferry.transport.tasks import run_together
from kvferry.transport.transfer_loop import TransferLoop
from kvferry.transport.wire import Identity

START_S = 10.0
GATHER_BYTES = 2 * 2**20
"""KV of a hand-off that its consumer is told of at once: a layer, or several small ones together."""


class P2pWorkerSide(WorkerSide[P2pPlan]):
    """See the module. What can be set is in `P2pOptions`."""

    plan_type = P2pPlan
    gauges = frozenset({"num_loading", "num_keys", "held_bytes", "open_connections"})

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._config = context.config
        self._settings = options_of(context.config)
        self._loop = TransferLoop()
        self._service: Future[None] | None = None
        self._report: TransferReport = []
        """What is to be said, as far as it was put together."""
        self._table: EntryTable
        self._buffer: LookupBuffer
        self._departures: Departures
        self._arrivals: Arrivals

    # Life.

    def register(self, memory: BlockMemory) -> None:
        """Listen, and start the transfer thread."""
        self._build(memory)
        self._loop.start()
        self._service = self._loop.submit(self._serve())
        self._loop.submit(self._arrivals.started()).result(START_S)

    def _build(self, memory: BlockMemory) -> None:
        config, layout, settings = self._config, self.context.layout, self._settings
        # The scheduler side keeps prefills waiting at `kv_buffer_size`; here twice that only guards against mistakes.
        bounds = EntryBounds(
            settings.lease_s,
            settings.unsealed_s,
            capacity_bytes=2 * config.kv_buffer_size,
            gather_bytes=GATHER_BYTES,
        )
        self._table = EntryTable(memory.geometry, SystemClock(), bounds)
        identity = Identity(config.engine_id, layout)
        self._buffer = build_lookup_buffer(
            LookupBufferContext(config, settings, memory, identity, self.context.auth_token, self._table)
        )
        wait = None if self.context.saves_are_complete else _device_wait(memory.device)
        self._departures = Departures(self._buffer, layout.num_layers, wait)
        self._arrivals = Arrivals(
            self._buffer, layout, settings.timeout_s, keep_lease_on_failure=config.kv_load_failure_policy == "fail"
        )

    async def _serve(self) -> None:
        await run_together(self._buffer.run(), self._arrivals.run())

    def address(self) -> dict[str, Any]:
        """Where peers reach this rank."""
        return {**self._buffer.address(), "engine_id": self._config.engine_id}

    def close(self) -> None:
        """End the transfer thread, and with it every task, connection and mapping."""
        if self._service is None:
            return
        self._loop.close()
        self._buffer.close()

    # Steps.

    def withdraw(self, plan: P2pPlan | None) -> None:
        """Preempted prefills begin again."""
        if plan is not None:
            self._departures.withdraw(plan)

    def start(self, plan: P2pPlan | None) -> None:
        """Announce and fetch."""
        if plan is None:
            return
        self._departures.start(plan)
        if plan.cancels or plan.waits or plan.loads or plan.unwanted:
            self._loop.call(partial(self._arrivals.begin, plan))

    def save_layer(self, layer: int) -> None:
        """Announce this step's blocks of `layer`."""
        self._departures.save_layer(layer)

    def flush(self) -> None:
        """Forget this step's blocks: all are announced."""
        self._departures.flush()

    def discard(self) -> None:
        """The step failed: nobody may take what it was to announce."""
        self._departures.discard()

    def poll(self) -> TransferReport:
        """Loads that ended, blocks that are free. Raises `ConnectorLost`."""
        self._require_service()
        self._report += [Released(request_id) for request_id in self._departures.released()]
        self._report += self._arrivals.box.take()
        report, self._report = self._report, []
        return report

    def _require_service(self) -> None:
        if self._service is not None and self._service.done():
            try:
                self._service.result()
            except Exception as error:
                raise ConnectorLost(f"the transfers of this instance have ended: {error!r}") from error

    def on_report(self, wake: Callable[[], None]) -> None:
        """`wake` is called from the transfer thread."""
        self._arrivals.box.wake = wake
        self._table.on_end = wake

    # Insight.

    def statistics(self) -> dict[str, float]:
        """Of the lookup buffer, and of loads."""
        errors = {"transfer_errors": float(self._loop.num_errors)}
        return self._buffer.statistics() | self._arrivals.statistics() | errors

    def check(self) -> None:
        """Raise `LeakError` when a hand-off, a load or a report is left."""
        self._buffer.check()
        if not (self._departures.is_empty() and self._arrivals.is_empty()):
            raise LeakError("the P2P connector still waits for the end of hand-offs")


def _device_wait(device: str) -> Callable[[], None] | None:
    """What waits for the kernels given to a device so far; None for host memory. Never run on a GPU."""
    if device == "cpu":
        return None
    import torch  # where KV is on a device, the engine beside has it

    return lambda: torch.cuda.current_stream(device).synchronize()
