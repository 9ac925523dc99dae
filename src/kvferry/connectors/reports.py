"""What a worker side reports whose transfers end on other threads.

Loads that do not end by their deadline, because a call into a driver, a library or a disk does not return, are reported
as failed: the engine continues without them, and keeps their blocks aside until they end.
"""

from __future__ import annotations

from collections import deque

from kvferry.connectors.api import Failed, Loaded, Released, TransferEvent, TransferReport, Wake
from kvferry.core.clock import Clock
from kvferry.core.errors import TransferTimeout

SPARE_S = 2.0
"""A load whose calls return ends by itself within this time after its deadline."""


class Reports:
    """`add` may be called on any thread, all else on the engine's. `timeout_s` limits each load."""

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self.wake: Wake = lambda: None
        """Called when there is something new: set it in `WorkerSide.on_report`."""
        self._events: deque[TransferEvent] = deque()
        self._limit_s, self._clock = timeout_s + SPARE_S, clock
        self._begun: dict[str, float] = {}
        self._parked: set[str] = set()

    def add(self, *events: TransferEvent) -> None:
        """Report these events."""
        self._events.extend(events)
        self.wake()

    def begin(self, request_id: str) -> None:
        """Note that a load has begun."""
        self._begun[request_id] = self._clock.monotonic()

    def forget(self, request_id: str) -> None:
        """The load was cancelled: the only event that its request still waits for is `Released`."""
        self._begun.pop(request_id, None)
        self._parked.discard(request_id)

    def take(self) -> TransferReport:
        """What happened since the last call, with each overdue load as `Failed`. When such a load ends later, it is
        reported only that its blocks are `Released`."""
        taken: TransferReport = []
        for event in [self._events.popleft() for _ in range(len(self._events))]:
            has_ended = isinstance(event, Loaded | Failed | Released)
            if event.request_id not in self._parked:
                taken.append(event)
                if has_ended:
                    self._begun.pop(event.request_id, None)
            elif has_ended:
                self._parked.remove(event.request_id)
                taken.append(Released(_aside(event.request_id)))
        last = self._clock.monotonic() - self._limit_s
        for request_id in [name for name, since in self._begun.items() if since < last]:
            del self._begun[request_id]
            self._parked.add(request_id)
            error = TransferTimeout("a call that moves this request's KV does not return")
            taken.append(Failed(request_id, error, _aside(request_id)))
        return taken

    def __len__(self) -> int:
        return len(self._events)


def _aside(request_id: str) -> str:
    return f"{request_id} (blocks kept aside)"
