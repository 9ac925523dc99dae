"""The reports of a worker side whose transfers end on other threads.

A load that does not end by its deadline, because a call to a driver, a library or a disk does not return, is reported
as failed. The engine continues without it, and holds its blocks until it ends.
"""

from __future__ import annotations

from collections import deque

from kvferry.connectors.api import Failed, Loaded, Released, TransferEvent, TransferReport, Wake
from kvferry.core.clock import Clock
from kvferry.core.errors import TransferTimeout


class Reports:
    """`add` may be called on any thread, the other methods on the engine's thread. `timeout_s`: maximum seconds of each
    load."""

    grace_s = 2.0
    """A load whose calls return ends by itself within these seconds after its deadline."""

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self.wake: Wake = lambda: None
        """Called when there are new events. Set it in `WorkerSide.on_report`."""
        self._events: deque[TransferEvent] = deque()
        self._limit_s, self._clock = timeout_s + self.grace_s, clock
        self._started_at: dict[str, float] = {}
        self._overdue: set[str] = set()

    def add(self, *events: TransferEvent) -> None:
        """Report these events."""
        self._events.extend(events)
        self.wake()

    def begin(self, request_id: str) -> None:
        """Record that a load has begun."""
        self._started_at[request_id] = self._clock.monotonic()

    def forget(self, request_id: str) -> None:
        """Record that the load was cancelled. `Released` is then the only event for which its request still waits."""
        self._started_at.pop(request_id, None)
        self._overdue.discard(request_id)

    def take(self) -> TransferReport:
        """Return the events since the last call, with each overdue load as `Failed`. When such a load ends later, only
        `Released` is reported for its blocks."""
        report: TransferReport = []
        for event in [self._events.popleft() for _ in range(len(self._events))]:
            has_ended = isinstance(event, Loaded | Failed | Released)
            if event.request_id not in self._overdue:
                report.append(event)
                if has_ended:
                    self._started_at.pop(event.request_id, None)
            elif has_ended:
                self._overdue.remove(event.request_id)
                report.append(Released(_held_name(event.request_id)))
        cutoff = self._clock.monotonic() - self._limit_s
        for request_id in [name for name, started in self._started_at.items() if started < cutoff]:
            del self._started_at[request_id]
            self._overdue.add(request_id)
            error = TransferTimeout("a call that moves this request's KV does not return")
            report.append(Failed(request_id, error, _held_name(request_id)))
        return report

    def __len__(self) -> int:
        return len(self._events)


def _held_name(request_id: str) -> str:
    return f"{request_id} (blocks kept aside)"
