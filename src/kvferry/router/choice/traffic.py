"""The requests of a router: their number, and the durations of the last ones' phases. Owns a bounded ring."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

import msgspec

from kvferry.core.messages.traffic import MAX_OBSERVED, RequestObservation, TrafficReport


class Traffic:
    """The last requests of one router. `num_waiting`: requests that wait for an instance to start."""

    def __init__(self) -> None:
        self._ring: deque[RequestObservation] = deque(maxlen=MAX_OBSERVED)
        self.note: Callable[[RequestObservation], None] = self._ring.append
        """Add a request that was placed; the rest of its observation is filled in later."""
        self._num_arrived = 0
        self.num_waiting = 0

    def arrive(self) -> None:
        """Count a request for a completion, whatever its outcome."""
        self._num_arrived += 1

    def encode(self, now: float, seconds: float, max_requests: int = MAX_OBSERVED) -> bytes:
        """A `TrafficReport` as JSON, with the last `max_requests` requests of those that came in the last `seconds`."""
        newest = islice(reversed(self._ring), max_requests)
        requests = [request for request in newest if request.arrived >= now - seconds][::-1]
        return msgspec.json.encode(TrafficReport(now, self._num_arrived, self.num_waiting, requests))
