"""What is known of keys that are not there: for a while, and of so many at most."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from kvferry.core.clock import Clock

MAX_REMEMBERED = 4096
"""Of how many keys; beyond, the oldest are forgotten."""

V = TypeVar("V")


class Remembered(Generic[V]):
    """A value by key, for `seconds` from when it was last set."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self._values: OrderedDict[str, tuple[V, float]] = OrderedDict()  # the oldest first

    def get(self, key: str) -> V | None:
        """None: nothing is known of it, or no longer."""
        value, until = self._values.get(key, (None, float("inf")))
        return value if self._clock.monotonic() < until else None

    def set(self, key: str, value: V) -> None:
        """Know that."""
        self._values.pop(key, None)
        now = self._clock.monotonic()
        self._values[key] = (value, now + self._seconds)
        while len(self._values) > MAX_REMEMBERED or next(iter(self._values.values()))[1] <= now:
            self._values.popitem(last=False)

    def pop(self, key: str) -> V | None:
        """What was known of it, which is forgotten."""
        value = self.get(key)
        self._values.pop(key, None)
        return value
