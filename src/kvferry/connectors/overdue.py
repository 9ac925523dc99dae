"""Loads that do not end in their time, because a call into a driver, a library or a disk does not return: the engine
goes on without them, and keeps their blocks aside until they end."""

from __future__ import annotations

from kvferry.connectors.api import Failed, Loaded, Released, TransferReport
from kvferry.core.clock import Clock
from kvferry.core.errors import TransferTimeout

SPARE_S = 2.0
"""A load that returns ends by itself so soon after its deadline."""


class OverdueLoads:
    """Of one worker side; used on the engine's thread alone, which waits for no other. `timeout_s`: of each load."""

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self._limit_s, self._clock = timeout_s + SPARE_S, clock
        self._begun: dict[str, float] = {}
        self._parked: set[str] = set()

    def begin(self, request_id: str) -> None:
        """A load begins."""
        self._begun[request_id] = self._clock.monotonic()

    def forget(self, request_id: str) -> None:
        """The load was given up: nobody waits for it but for its `Released`."""
        self._begun.pop(request_id, None)
        self._parked.discard(request_id)

    def judged(self, report: TransferReport) -> TransferReport:
        """The report, with the loads as failed that are overdue; of these, later, only that their blocks are free."""
        judged: TransferReport = []
        for event in report:
            has_ended = isinstance(event, Loaded | Failed | Released)
            if event.request_id not in self._parked:
                judged.append(event)
                if has_ended:
                    self._begun.pop(event.request_id, None)
            elif has_ended:
                self._parked.remove(event.request_id)
                judged.append(Released(_aside(event.request_id)))
        last = self._clock.monotonic() - self._limit_s
        for request_id in [name for name, since in self._begun.items() if since < last]:
            del self._begun[request_id]
            self._parked.add(request_id)
            error = TransferTimeout("a call that moves this request's KV does not return")
            judged.append(Failed(request_id, error, _aside(request_id)))
        return judged

    @property
    def num_parked(self) -> int:
        """Loads that have not ended long after their time."""
        return len(self._parked)


def _aside(request_id: str) -> str:
    return f"{request_id} (blocks kept aside)"
