"""The store in which the ranks of an instance find each other, as `torch.distributed` asks for it.

It is a table of rank 0, which the other ranks read and write through their pipes. So it needs no port and no file that
others could reach, and whoever waits for a rank that is lost learns of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.engine.executor.messages import TableAnswer, TableRequest

_LOOK_S = 0.01
"""How often a rank looks for what another one is to write."""


class StoreTable:
    """What the ranks have written. Any thread may ask."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def answer(self, request: TableRequest) -> TableAnswer:
        """Carry out a request."""
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


class MeetingStore(dist.Store):  # type: ignore[name-defined]
    """One rank's view of the table; `ask` brings a request there, and raises if a rank is lost."""

    def __init__(self, ask: Callable[[TableRequest], TableAnswer]) -> None:
        super().__init__()
        self._ask = ask

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._ask(TableRequest("set", (key,), value.encode() if isinstance(value, str) else value))

    def get(self, key: str) -> bytes:
        """Wait for a value. Raises `DistStoreError` if there is none in time."""
        self.wait([key])
        return self._ask(TableRequest("look", (key,))).value

    def add(self, key: str, number: int) -> int:
        """Add to a value, which is 0 at first; returns the sum."""
        return int(self._ask(TableRequest("add", (key,), number=number)).value)

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys are there."""
        return self._ask(TableRequest("look", tuple(keys))).has_all

    def delete_key(self, key: str) -> bool:
        """True if it was there."""
        return self._ask(TableRequest("delete", (key,))).has_all

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there. Raises `DistStoreError` if they are not in time."""
        deadline = SYSTEM_CLOCK.monotonic() + (self.timeout if timeout is None else timeout).total_seconds()
        while not self.check(keys):
            if SYSTEM_CLOCK.monotonic() > deadline:
                raise dist.DistStoreError(f"the ranks did not find each other: nobody has written {', '.join(keys)}")
            threading.Event().wait(_LOOK_S)
