"""The worker side of `MultiConnector`, which combines several connectors, its children.

Owns the loads and holds of each child. They are needed when a child is lost: once it is closed, its loads are reported
as failed, its held blocks become free, and the others continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from kvferry.connectors.api import (
    ByLayers,
    ConnectorContext,
    Failed,
    HasStatistics,
    Loaded,
    Released,
    ServesPeers,
    StepPlan,
    TransferReport,
    WorkerSide,
    check_side,
)
from kvferry.connectors.caching import StoreEvents, StoresBlocks
from kvferry.connectors.multi.plan import MultiPlan
from kvferry.connectors.multi.settings import child_gauges, child_statistics, handing_off, read_children
from kvferry.connectors.registry import ConnectorSpec
from kvferry.core.errors import ChildLost, ConfigError, ConnectorLost, LeakError
from kvferry.core.runtime.closing import close_all
from kvferry.core.runtime.threads import Thread
from kvferry.transport.memory import BlockMemory

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class MultiWorkerSide(WorkerSide[MultiPlan], ServesPeers[MultiPlan], ByLayers, StoresBlocks, HasStatistics):
    """Gives each child its part of the plan. A child that raises is closed, and the others continue."""

    close_s = 60.0
    """Maximum seconds for which `close` waits for a lost child that is still being closed."""

    plan_type = MultiPlan
    gauges = child_gauges(ConnectorSpec.worker_class)

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        children = read_children(context)
        self.children = [spec.build_worker_side(child_context) for spec, child_context in children]
        if context.layout.tp_size > 1 and any(child.plan_type is None for child in self.children):
            raise ConfigError("one of the connectors of MultiConnector works on one rank only")
        self._hands_off = handing_off([child_context.config for _, child_context in children])
        self.lost: set[int] = set()
        """The indices of the children that raised and are no longer called."""
        self._closing: dict[int, Thread] = {}
        """The threads that close lost children, kept until the closed child no longer touches blocks."""
        self._closed: set[int] = set()
        """Lost children that have been closed. The threads that close them add them."""
        self._wake: Callable[[], None] = lambda: None
        self._loads: dict[str, int] = {}
        self._holds: dict[str, set[int]] = {}
        self._early_releases: dict[str, set[int]] = {}
        """Children that released a request's blocks before the plan named the children that keep them."""
        self._reports: TransferReport = []

    # Life.

    def register(self, memory: BlockMemory) -> None:
        """Register the memory with all children. If one raises, all are closed again."""
        for index, child in enumerate(self.children):
            try:
                child.register(memory)
            except BaseException:
                close_all(*(registered.close for registered in self.children[: index + 1]))
                raise

    def close(self) -> None:
        """Close all children, even if one raises."""
        for index in range(len(self.children)):
            if index in self._closing:
                self._closing[index].join(self.close_s)
            else:
                self._close(index)

    def _close(self, index: int) -> None:
        try:
            self.children[index].close()
        except Exception:
            logger.exception("connector %d of MultiConnector could not be closed", index)

    # Steps.

    def withdraw(self, plan: MultiPlan | None) -> None:
        for index, part in self._parts(plan):
            self._try(index, partial(_withdraw, part), None)

    def start(self, plan: MultiPlan | None) -> None:
        if plan is None:
            return
        self._loads |= plan.loads
        for request_id, holders in plan.holds.items():
            remaining = set(holders) - self._early_releases.pop(request_id, set()) - (self.lost - self._closing.keys())
            self._hold(request_id, remaining)
        for request_id, index in plan.loads.items():
            if index in self.lost:
                self._fail_load(request_id, index)
        for index, part in self._parts(plan):
            self._try(index, partial(_start, part), None)

    def _parts(self, plan: MultiPlan | None) -> list[tuple[int, Any]]:
        """Each child's part of a plan. A part that comes from another process is converted to its class again."""
        parts = []
        for index, (child, part) in enumerate(zip(self.children, plan.plans if plan is not None else (), strict=False)):
            if child.plan_type is not None and part is not None and not isinstance(part, child.plan_type):
                part = msgspec.convert(part, child.plan_type)
            if part is not None:
                parts.append((index, part))
        return parts

    def wait_layer(self, layer: int) -> None:
        self._call_all(lambda child: child.wait_layer(layer) if isinstance(child, ByLayers) else None)

    def save_layer(self, layer: int) -> None:
        self._call_all(lambda child: child.save_layer(layer) if isinstance(child, ByLayers) else None)

    def flush(self) -> None:
        self._call_all(lambda child: child.flush())

    def discard(self) -> None:
        self._call_all(lambda child: child.discard())

    def poll(self) -> TransferReport:
        """The events of all children. Blocks are released when no child keeps them any more. Raises `ConnectorLost`
        when the child that hands off is lost: the instance is then useless, and its fleet starts another one."""
        if self._hands_off in self.lost:
            raise ConnectorLost("the connector of MultiConnector that hands off is lost")
        for index in [index for index in self._closing if index in self._closed]:
            self._on_closed(index)
        for index in range(len(self.children)):
            no_events: TransferReport = []
            for event in self._try(index, lambda child: child.poll(), no_events):
                self._on_event(index, event)
        report, self._reports = self._reports, []
        return report

    def _on_event(self, index: int, event: Any) -> None:
        if isinstance(event, Released):
            self._on_released(index, event.request_id)
            return
        if isinstance(event, Loaded | Failed):
            self._loads.pop(event.request_id, None)
        if isinstance(event, Failed) and event.held_under:
            self._holds[event.held_under] = {index}
        self._reports.append(event)

    def _on_released(self, index: int, request_id: str) -> None:
        if request_id in self._holds:
            self._hold(request_id, self._holds.pop(request_id) - {index})
        else:
            self._early_releases.setdefault(request_id, set()).add(index)

    def _hold(self, request_id: str, holders: set[int]) -> None:
        if holders:
            self._holds[request_id] = holders
        else:
            self._loads.pop(request_id, None)
            self._reports.append(Released(request_id))

    def address(self) -> dict[str, Any] | None:
        child = None if self._hands_off is None else self.children[self._hands_off]
        return child.address() if isinstance(child, ServesPeers) else None

    def on_report(self, wake: Callable[[], None]) -> None:
        """`wake` is called when a child has something to report, and when a lost child is closed."""
        self._wake = wake
        for child in self.children:
            child.on_report(wake)

    # Statistics and checks.

    def watch_store(self) -> None:
        for child in self.children:
            if isinstance(child, StoresBlocks):
                child.watch_store()

    def store_events(self) -> StoreEvents:
        events = StoreEvents()
        for child_events in (child.store_events() for child in self.children if isinstance(child, StoresBlocks)):
            events.stored += child_events.stored
            events.dropped += child_events.dropped
            events.changes += child_events.changes
        return events

    def statistics(self) -> dict[str, float]:
        """The statistics of each child, with its index before the names."""
        return child_statistics(self.children)

    def check(self) -> None:
        """Raise `LeakError` if a child has a resource in use, or if loads or holds of a child are left."""
        for index, child in enumerate(self.children):
            if index not in self.lost:
                check_side(child)
        if self._closing:
            raise LeakError(f"connectors {sorted(self._closing)} of several are lost and not closed yet")
        if self._holds or self._reports or self._early_releases:
            raise LeakError(f"several connectors still keep {[*self._holds, *self._early_releases][:8]}")

    # Lost children.

    def _call_all(self, call: Callable[[WorkerSide[StepPlan]], None]) -> None:
        for index in range(len(self.children)):
            self._try(index, call, None)

    def _try(self, index: int, call: Callable[[WorkerSide[StepPlan]], Result], default: Result) -> Result:
        """Call a child. Returns `default` if the child is lost. A child that raises is lost from then on."""
        if index in self.lost:
            return default
        try:
            return call(self.children[index])
        except Exception as error:
            if isinstance(error, ConnectorLost) and index == self._hands_off:
                raise
            logger.exception("connector %d of MultiConnector is lost; the others continue without it", index)
            self._mark_lost(index)
            return default

    def _mark_lost(self, index: int) -> None:
        """Close a child on a separate thread, so that the others can continue."""
        self.lost.add(index)
        self._closing[index] = Thread(self._close_lost, index, name=f"kvferry-close-{index}")
        self._closing[index].start()

    def _close_lost(self, index: int) -> None:
        self._close(index)
        self._closed.add(index)
        self._wake()

    def _on_closed(self, index: int) -> None:
        """Report the loads of a closed child as failed, and release the blocks that it held: it no longer uses any
        blocks."""
        self._closing.pop(index).join()
        for request_id in [name for name, loader in self._loads.items() if loader == index]:
            self._fail_load(request_id, index)
        for request_id in [name for name, holders in self._holds.items() if index in holders]:
            self._hold(request_id, self._holds.pop(request_id) - {index})

    def _fail_load(self, request_id: str, index: int) -> None:
        del self._loads[request_id]
        self._reports.append(Failed(request_id, ChildLost(f"connector {index} of MultiConnector is lost")))


def _withdraw(part: Any, child: WorkerSide[StepPlan]) -> None:
    if isinstance(child, ServesPeers):
        child.withdraw(part)


def _start(part: Any, child: WorkerSide[StepPlan]) -> None:
    child.start(part)
