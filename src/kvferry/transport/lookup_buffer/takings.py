"""What a buffer's consumer half counts: takes under way, and what came of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.core.errors import LeakError
from kvferry.transport.lookup_buffer.base import Taken


class Takings:
    """See the module. `counts` may be added to under other names."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._num_waiting = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While a take is under way."""
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    def add(self, taken: Taken) -> None:
        """One that came."""
        self.counts["taken"] += 1
        self.counts[f"taken_bytes_{taken.fabric}"] += taken.num_bytes
        self._seconds += taken.seconds

    def statistics(self) -> dict[str, float]:
        """Counters by name, and the seconds that reading took."""
        return {name: float(count) for name, count in self.counts.items()} | {"taken_seconds": self._seconds}

    def check(self) -> None:
        """Raise `LeakError` when a take is under way."""
        if self._num_waiting:
            raise LeakError(f"{self._num_waiting} hand-offs are still being fetched")
