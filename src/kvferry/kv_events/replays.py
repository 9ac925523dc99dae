"""Replays events to followers, to each at its own pace, so that one that does not read delays no other.

Owns the replays under way, not the socket. Anybody can connect: a few messages for each follower wait in ZeroMQ, the
rest waits here, as references to what is kept anyway."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvferry.core.clock import Clock
from kvferry.kv_events.messages import END_OF_REPLAY
from kvferry.kv_events.sockets import zmq

MAX_UNSENT = 16
"""Messages for one follower that wait in ZeroMQ."""
MAX_REPLAYS = 64
"""Replays at one time; further requests are not answered, and may be repeated."""
STALL_S = 10.0
"""Seconds that a follower may leave its messages unread before its replay is given up."""


@dataclass
class _Replay:
    left: deque[tuple[bytes, bytes]]
    deadline: float


class Replays:
    """`socket` is a ROUTER that refuses a message to a follower that is gone or full (`ROUTER_MANDATORY`). Belongs to
    one thread."""

    def __init__(self, socket: Any, clock: Clock) -> None:
        self._socket, self._clock = socket, clock
        self._under_way: dict[bytes, _Replay] = {}

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def begin(self, follower: bytes, kept: Iterable[tuple[int, bytes]]) -> None:
        """Begin to send a follower these messages and the mark of the end. One whose replay is under way has to wait
        for its end."""
        if follower in self._under_way or len(self._under_way) >= MAX_REPLAYS:
            return
        left = deque((number.to_bytes(8, "big"), payload) for number, payload in kept)
        left.append((END_OF_REPLAY, b""))
        self._under_way[follower] = _Replay(left, self._clock.monotonic() + STALL_S)

    def go_on(self) -> None:
        """Send what followers can take now. Does not block."""
        now = self._clock.monotonic()
        for follower, replay in list(self._under_way.items()):
            if self._send(follower, replay.left):
                replay.deadline = now + STALL_S
            if not replay.left or now >= replay.deadline:
                del self._under_way[follower]

    def _send(self, follower: bytes, left: deque[tuple[bytes, bytes]]) -> bool:
        """Whether the follower took some messages. Those for a follower that is gone are dropped."""
        num_before, library = len(left), zmq()
        try:
            while left:
                number, payload = left[0]
                self._socket.send_multipart((follower, b"", b"", number, payload), library.NOBLOCK, copy=False)
                left.popleft()
        except library.Again:
            pass
        except library.ZMQError:
            left.clear()
        return len(left) < num_before
