"""The store with which two processes form a `torch.distributed` group, without a store server.

What one end sets goes to the other over the authenticated connection, within bounds. Torch makes the group on a thread,
which waits in `get`; `learn` and `fail` are called on the loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from kvferry.core.errors import KvferryError, ProtocolError

MAX_VALUES = 64
MAX_VALUE_BYTES = 8192


class Rendezvous(dist.Store):  # type: ignore[misc, name-defined]
    """`publish` is called, on any thread, with each value that is set here."""

    def __init__(self, publish: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._publish, self._timeout_s = publish, timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._failure: KvferryError | None = None

    def learn(self, key: str, value: bytes) -> None:
        """A value was set, here or by the peer. Raises `ProtocolError` beyond what a rendezvous needs."""
        with self._changed:
            if len(self._values) >= MAX_VALUES or len(value) > MAX_VALUE_BYTES:
                raise ProtocolError("the peer publishes more than a rendezvous needs")
            self._values[key] = value
            self._changed.notify_all()

    def fail(self, error: KvferryError) -> None:
        """Make every wait raise this error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    # Called by torch, on the thread that makes the group.

    def set(self, key: str, value: Any) -> None:
        """Set a value here and at the peer."""
        encoded = value.encode() if isinstance(value, str) else bytes(value)
        self.learn(key, encoded)
        self._publish(key, encoded)

    def get(self, key: str) -> bytes:
        """Wait for the value, and return it."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._failure is not None or all(key in self._values for key in keys), self._timeout_s
            )
            if self._failure is not None:
                raise RuntimeError(str(self._failure))  # through torch, which knows no other
            if not there:
                raise RuntimeError("the peer did not publish what the group needs in time")

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        with self._changed:
            return all(key in self._values for key in keys)
