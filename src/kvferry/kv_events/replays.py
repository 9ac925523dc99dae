"""Tells callers again what was published: each at its own pace, so that who does not read delays nobody.

Owns the replays under way, not the socket. Strangers may call: of each caller a few messages wait in ZeroMQ, the rest
waits here, as references to what is kept anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvferry.core.clock import Clock
from kvferry.kv_events.messages import END_OF_REPLAY
from kvferry.kv_events.sockets import zmq

MOST_UNSENT = 16
"""Messages of one caller that wait in ZeroMQ."""
MOST_CALLERS = 64
"""Replays at one time; who calls beyond that is not answered, and may ask again."""
STALL_S = 10.0
"""How long a caller may take none of its messages before it is given up."""


@dataclass
class _Replay:
    left: deque[tuple[bytes, bytes]]
    deadline: float


class Replays:
    """`socket` is a ROUTER that refuses a message for who is gone or full (`ROUTER_MANDATORY`). One thread's."""

    def __init__(self, socket: Any, clock: Clock) -> None:
        self._socket, self._clock = socket, clock
        self._under_way: dict[bytes, _Replay] = {}

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def begin(self, caller: bytes, kept: Iterable[tuple[int, bytes]]) -> None:
        """Tell it these, and that they were all. A caller that is being told already has to wait for the end."""
        if caller in self._under_way or len(self._under_way) >= MOST_CALLERS:
            return
        left = deque((number.to_bytes(8, "big"), payload) for number, payload in kept)
        left.append((END_OF_REPLAY, b""))
        self._under_way[caller] = _Replay(left, self._clock.monotonic() + STALL_S)

    def go_on(self) -> None:
        """Send what callers take now. Does not block."""
        now = self._clock.monotonic()
        for caller, replay in list(self._under_way.items()):
            if self._send(caller, replay.left):
                replay.deadline = now + STALL_S
            if not replay.left or now >= replay.deadline:
                del self._under_way[caller]

    def _send(self, caller: bytes, left: deque[tuple[bytes, bytes]]) -> bool:
        """Whether it took some. All is taken off of a caller that is gone."""
        num_before, library = len(left), zmq()
        try:
            while left:
                number, payload = left[0]
                self._socket.send_multipart((caller, b"", b"", number, payload), library.NOBLOCK, copy=False)
                left.popleft()
        except library.Again:
            pass
        except library.ZMQError:
            left.clear()
        return len(left) < num_before
