"""How much may be under way at once. Owns the counts; what is beyond them is refused, never queued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.core.errors import LeakError, QueueFull


class Slot:
    """One admitted request's share."""

    def __init__(self, admission: Admission) -> None:
        self._admission, self.num_bytes = admission, 0

    def grow(self, num_bytes: int) -> None:
        """The request holds `num_bytes` more. Raises `QueueFull` when that is too much in all."""
        if self._admission.num_bytes + num_bytes > self._admission.max_bytes:
            raise QueueFull("the router holds as many request bodies as it may; try again later")
        self.num_bytes += num_bytes
        self._admission.num_bytes += num_bytes


class Admission:
    """Bounds the number of requests and the bytes of their bodies."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests, self.max_bytes = max_requests, max_bytes
        self.num_requests = self.num_bytes = 0

    @contextmanager
    def enter(self) -> Iterator[Slot]:
        """A slot for as long as the request is under way. Raises `QueueFull`."""
        if self.num_requests >= self.max_requests:
            raise QueueFull(f"{self.max_requests} requests are under way, as many as the router takes; try again later")
        slot = Slot(self)
        self.num_requests += 1
        try:
            yield slot
        finally:
            self.num_requests -= 1
            self.num_bytes -= slot.num_bytes

    def check(self) -> None:
        """Raise `LeakError` when a slot is still taken though no request is under way."""
        if self.num_requests or self.num_bytes:
            raise LeakError(f"{self.num_requests} slots and {self.num_bytes} bytes were never given back")
