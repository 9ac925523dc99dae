"""The store with which two processes form a `torch.distributed` group, without a store server.

What one end sets goes to the other over the authenticated connection, and is bounded. The group is made on a thread
that waits in `get`; the connection's side lives on the loop.
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
    """`publish` is told, from any thread, of each value set here; `learn` is told of the peer's."""

    def __init__(self, publish: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._publish, self._timeout_s = publish, timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._failure: KvferryError | None = None

    def learn(self, key: str, value: bytes) -> None:
        """The peer has set a value. Raises `ProtocolError` when it is more than a rendezvous needs."""
        with self._changed:
            if len(self._values) >= MAX_VALUES or len(value) > MAX_VALUE_BYTES:
                raise ProtocolError("a peer that publishes more than a rendezvous needs")
            self._values[key] = value
            self._changed.notify_all()

    def fail(self, error: KvferryError) -> None:
        """Whoever waits, waits in vain."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    # Called by torch, on the thread that makes the group.

    def set(self, key: str, value: Any) -> None:
        """Keep a value, and tell the peer."""
        encoded = value.encode() if isinstance(value, str) else bytes(value)
        self.learn(key, encoded)
        self._publish(key, encoded)

    def get(self, key: str) -> bytes:
        """The value; waits for it."""
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
