"""Output to one client, with backpressure when the client reads slowly."""

from __future__ import annotations

import asyncio
from typing import Protocol

_HIGH_WATER, _LOW_WATER = 64 * 1024, 16 * 1024


class Producer(Protocol):
    """A source that can be paused for a slow client: a call to an instance."""

    def pause_reading(self) -> None:
        """Stop producing."""

    def resume_reading(self) -> None:
        """Continue."""


class ClientWriter:
    """Owns the output to the client. The connection forwards its transport's `pause_writing` and `resume_writing`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        transport.set_write_buffer_limits(high=_HIGH_WATER, low=_LOW_WATER)
        self.transport = transport
        self._resumed: asyncio.Event | None = None
        """While the client is slow: set when it has caught up, or has left."""
        self._lost = False
        self._producer: Producer | None = None
        self._stalled_since, self._stalled_bytes = 0.0, 0

    def write(self, data: bytes) -> None:
        """Send, or buffer until it can be sent."""
        if data and not self._lost:
            self.transport.write(data)

    @property
    def num_unsent(self) -> int:
        """Number of bytes that are not in the socket yet."""
        return self.transport.get_write_buffer_size()

    @property
    def is_writable(self) -> bool:
        """True if the client keeps up, or has left."""
        return self._resumed is None

    @property
    def slow(self) -> bool:
        """True if `drain` would wait."""
        return self._resumed is not None or self.transport.is_closing()

    async def drain(self) -> None:
        """Wait until the client has read most of what was sent."""
        if self._lost or self.transport.is_closing():
            # A closed transport accepts everything and is never full, so a mere writer would not notice the end.
            await asyncio.sleep(0)
        if self._resumed is not None:
            await self._resumed.wait()

    def set_producer(self, producer: Producer | None) -> None:
        """Set the source that is paused while the client is slow."""
        self._producer = producer
        if producer is not None and self._resumed is not None:
            producer.pause_reading()

    # For the connection.

    def pause(self, now: float) -> None:
        """Record that the client reads more slowly than the server writes."""
        self._resumed = asyncio.Event()
        self._stalled_since, self._stalled_bytes = now, self.num_unsent
        if self._producer is not None:
            self._producer.pause_reading()

    def resume(self) -> None:
        """Record that the client has caught up."""
        self._wake_up()
        if self._producer is not None:
            self._producer.resume_reading()

    def lose(self) -> None:
        """Record that the client has left."""
        self._lost, self._producer = True, None
        self._wake_up()

    def _wake_up(self) -> None:
        if self._resumed is not None:
            self._resumed.set()
            self._resumed = None

    def stalled_s(self, now: float) -> float:
        """Seconds for which the client has read nothing although output is pending."""
        if self._resumed is None:
            return 0.0
        if (buffered := self.num_unsent) < self._stalled_bytes:
            self._stalled_since, self._stalled_bytes = now, buffered
        return now - self._stalled_since
