"""Where the threads of a worker side put what happened, until the engine's thread takes it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.connectors.api import StoreEvents, TransferEvent, TransferReport
from kvferry.core.block_hash import BlockHash


class ReportBox:
    """One report in the making. `wake` is called, from whichever thread, when there is something new."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._report: TransferReport = []

    def add(self, *events: TransferEvent) -> None:
        """This happened."""
        with self._lock:
            self._report += events
        self.wake()

    def take(self) -> TransferReport:
        """What happened since the last call."""
        with self._lock:
            report, self._report = self._report, []
            return report

    def __bool__(self) -> bool:
        with self._lock:
            return bool(self._report)


class StoreEventBox:
    """What became of blocks that were to be stored. Nothing is kept until it is opened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: StoreEvents | None = None

    def open(self) -> None:
        """Somebody will take what comes."""
        self._events = StoreEvents()

    def stored(self, block_hash: BlockHash) -> None:
        """It is in the store."""
        with self._lock:
            if self._events is not None:
                self._events.stored.append(block_hash)

    def dropped(self, block_hash: BlockHash) -> None:
        """It is not."""
        with self._lock:
            if self._events is not None:
                self._events.dropped.append(block_hash)

    def take(self) -> StoreEvents:
        """What came since the last call."""
        with self._lock:
            events, self._events = self._events or StoreEvents(), StoreEvents()
            return events
