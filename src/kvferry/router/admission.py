"""How much may be under way at once. Owns the counts, and the line of those who wait; both are bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvferry.core.errors import LeakError, QueueFull


class Slot:
    """One admitted request's share."""

    def __init__(self, admission: Admission) -> None:
        self._admission, self.num_bytes = admission, 0

    def grow(self, num_bytes: int) -> None:
        """The request holds `num_bytes` more. Raises `QueueFull` when that is too much in all."""
        if self._admission.num_bytes + num_bytes > self._admission.max_bytes:
            raise QueueFull("the router holds as many request bodies as it may; try again later")
        self.num_bytes += num_bytes
        self._admission.num_bytes += num_bytes


class Admission:
    """Bounds the number of requests, of those that wait for their turn, how long these wait, and the bytes of bodies.

    Bytes are counted as they come (`hold`); a request takes its turn once its body is here (`turn`), so that clients
    who never send the rest of theirs take nobody's turn. First come, first served.
    """

    def __init__(self, max_requests: int, max_bytes: int, max_waiting: int = 0, wait_s: float = 0.0) -> None:
        self.max_requests, self.max_bytes = max_requests, max_bytes
        self.max_waiting, self.wait_s = max_waiting, wait_s
        self.num_requests = self.num_bytes = 0
        self._line: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._line)

    @contextmanager
    def hold(self) -> Iterator[Slot]:
        """What a request's body takes, from its first byte until the request is answered."""
        slot = Slot(self)
        try:
            yield slot
        finally:
            self.num_bytes -= slot.num_bytes

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A place among the requests under way, after a wait where there is none free. Raises `QueueFull`."""
        await self._take_turn()
        try:
            yield
        finally:
            self._pass_turn()

    async def _take_turn(self) -> None:
        if self.num_requests < self.max_requests and not self._line:
            self.num_requests += 1
            return
        if len(self._line) >= self.max_waiting:
            raise QueueFull(f"{self.num_requests} requests are under way and {len(self._line)} wait; try again later")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            async with asyncio.timeout(self.wait_s):
                await turn
        except TimeoutError as error:
            self._leave(turn)
            raise QueueFull(f"the request waited {self.wait_s:g} s for its turn; try again later") from error
        except asyncio.CancelledError:
            self._leave(turn)
            raise

    def _leave(self, turn: asyncio.Future[None]) -> None:
        """Whose turn it became in the very moment that it left, passes it on."""
        if turn in self._line:
            self._line.remove(turn)
        elif turn.done() and not turn.cancelled():
            self._pass_turn()

    def _pass_turn(self) -> None:
        """Someone is done: the next in line takes over its place."""
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.num_requests -= 1

    def check(self) -> None:
        """Raise `LeakError` when a slot is still taken though no request is under way."""
        if self.num_requests or self.num_bytes or self._line:
            raise LeakError(
                f"{self.num_requests} slots, {self.num_bytes} bytes and {len(self._line)} turns were never given back"
            )
