"""The requests that a router has seen: how many came, and how long the phases of the last ones took. Owns a ring."""

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
        """Called with a request that is placed; the rest is filled in later."""
        self._num_arrived = 0
        self.num_waiting = 0

    def arrive(self) -> None:
        """Count a client that asks for a completion; whether it gets one is not known yet."""
        self._num_arrived += 1

    def encode(self, now: float, seconds: float, most: int = MAX_OBSERVED) -> bytes:
        """A `TrafficReport` as JSON, with the last `most` requests of those that came in the last `seconds`."""
        newest = islice(reversed(self._ring), most)
        requests = [one for one in newest if one.arrived >= now - seconds][::-1]
        return msgspec.json.encode(TrafficReport(now, self._num_arrived, self.num_waiting, requests))
