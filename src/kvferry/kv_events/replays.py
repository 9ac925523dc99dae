"""Replays events to followers, to each at its own pace, so that a slow follower delays no other.

Owns the active replays, not the socket. Any client can connect: a few messages for each follower wait in ZeroMQ, and
the others here, as references to the publisher's history."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvferry.core.clock import Clock
from kvferry.kv_events.messages import END_OF_REPLAY
from kvferry.kv_events.sockets import zmq

MAX_UNSENT = 16
"""Max messages for one follower that wait in ZeroMQ."""


@dataclass
class _Replay:
    pending: deque[tuple[bytes, bytes]]
    deadline: float


class Replays:
    """`socket` is a ROUTER that refuses a message to a follower that is gone or full (`ROUTER_MANDATORY`). Belongs to
    one thread."""

    stall_s = 10.0
    """Seconds that a follower may leave its messages unread before its replay is dropped."""
    max_replays = 64
    """Max replays at one time; further requests are not answered, and may be repeated."""

    def __init__(self, socket: Any, clock: Clock) -> None:
        self._socket, self._clock = socket, clock
        self._active: dict[bytes, _Replay] = {}

    def __bool__(self) -> bool:
        return bool(self._active)

    def begin(self, follower: bytes, messages: Iterable[tuple[int, bytes]]) -> None:
        """Begin to send a follower these messages and the end mark. Ignored while the follower's previous replay is
        active."""
        if follower in self._active or len(self._active) >= self.max_replays:
            return
        pending = deque((number.to_bytes(8, "big"), payload) for number, payload in messages)
        pending.append((END_OF_REPLAY, b""))
        self._active[follower] = _Replay(pending, self._clock.monotonic() + self.stall_s)

    def send_pending(self) -> None:
        """Send what followers can take now. Does not block."""
        now = self._clock.monotonic()
        for follower, replay in list(self._active.items()):
            if self._send(follower, replay.pending):
                replay.deadline = now + self.stall_s
            if not replay.pending or now >= replay.deadline:
                del self._active[follower]

    def _send(self, follower: bytes, pending: deque[tuple[bytes, bytes]]) -> bool:
        """True if the follower took some messages. Messages for a follower that is gone are dropped."""
        num_before, library = len(pending), zmq()
        try:
            while pending:
                number, payload = pending[0]
                self._socket.send_multipart((follower, b"", b"", number, payload), library.NOBLOCK, copy=False)
                pending.popleft()
        except library.Again:
            pass
        except library.ZMQError:
            pending.clear()
        return len(pending) < num_before
