"""The rendezvous store of an instance's ranks, for `torch.distributed`.

It is a table in rank 0, which the other ranks read and write through their pipes. So it needs no port and no file that
others could reach, and a wait for a lost rank ends with its loss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.engine.executor.messages import TableAnswer, TableRequest


class StoreTable:
    """The keys and values that the ranks have written. Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def answer(self, request: TableRequest) -> TableAnswer:
        """Execute a request."""
        with self._lock:
            has_all = all(key in self._values for key in request.keys)
            first = request.keys[0] if request.keys else ""
            match request.what:
                case "set":
                    self._values[first] = request.value
                case "add":
                    self._values[first] = str(int(self._values.get(first, b"0")) + request.number).encode()
                case "delete":
                    self._values.pop(first, None)
            return TableAnswer(has_all, self._values.get(first, b""))


class RendezvousStore(dist.Store):  # type: ignore[name-defined]
    """One rank's view of the table; `request` sends a request to it, and raises if a rank is lost."""

    poll_s = 0.01
    """Seconds between two look-ups of a key that another rank has not written yet."""

    def __init__(self, ask: Callable[[TableRequest], TableAnswer]) -> None:
        super().__init__()
        self._request = ask

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._request(TableRequest("set", (key,), value.encode() if isinstance(value, str) else value))

    def get(self, key: str) -> bytes:
        """Wait for a value. Raises `DistStoreError` if there is none in time."""
        self.wait([key])
        return self._request(TableRequest("look", (key,))).value

    def add(self, key: str, number: int) -> int:
        """Add to a value, which is 0 at first; returns the sum."""
        return int(self._request(TableRequest("add", (key,), number=number)).value)

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys exist."""
        return self._request(TableRequest("look", tuple(keys))).has_all

    def delete_key(self, key: str) -> bool:
        """Delete a key. Returns True if it existed."""
        return self._request(TableRequest("delete", (key,))).has_all

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist. Raises `DistStoreError` after the timeout."""
        deadline = SYSTEM_CLOCK.monotonic() + (self.timeout if timeout is None else timeout).total_seconds()
        while not self.check(keys):
            if SYSTEM_CLOCK.monotonic() > deadline:
                raise dist.DistStoreError(f"the ranks did not find each other: no rank has written {', '.join(keys)}")
            threading.Event().wait(self.poll_s)
