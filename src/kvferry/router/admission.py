"""How much may be under way at once. Owns the counts, and the lines of those who wait; all are bounded."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvferry.core.errors import LeakError, QueueFull


class Slot:
    """One admitted request's share."""

    def __init__(self, admission: Admission, client: str) -> None:
        self._admission, self._client = admission, client
        self.num_bytes = self._num_unfinished = 0

    def grow(self, num_bytes: int) -> None:
        """The request holds `num_bytes` more, of a body that is not whole yet. Raises `QueueFull` when that is too much
        in all, or for its client."""
        admission = self._admission
        if admission.num_bytes + num_bytes > admission.max_bytes:
            raise QueueFull("the router holds as many request bodies as it may; try again later")
        if admission.unfinished[self._client] + num_bytes > admission.max_unfinished_bytes:
            raise QueueFull("this client has begun to send more than may wait for the rest; try again later")
        self.num_bytes += num_bytes
        self._num_unfinished += num_bytes
        admission.num_bytes += num_bytes
        admission.unfinished[self._client] += num_bytes

    def whole(self) -> None:
        """The body is here, or will never be."""
        unfinished = self._admission.unfinished
        unfinished[self._client] -= self._num_unfinished
        self._num_unfinished = 0
        if not unfinished[self._client]:
            del unfinished[self._client]


class Admission:
    """Bounds the number of requests, of those that wait for their turn, how long these wait, and the bytes of bodies.

    Bytes are counted as they come (`hold`); a request takes its turn once its body is here (`turn`), so that clients
    who never send the rest of theirs take nobody's turn. One client address has no more than a part of the bytes in
    bodies that are not whole: half of them, or `least_unfinished_bytes` (the longest body).

    Tenants have turns in rotation, and within each it is first come, first served: who sends a thousand requests makes
    others wait for one of them, not for all. When too many wait, whoever has the most waiting loses the latest of them.
    """

    def __init__(
        self,
        max_requests: int,
        max_bytes: int,
        max_waiting: int = 0,
        wait_s: float = 0.0,
        *,
        least_unfinished_bytes: int = 0,
    ) -> None:
        self.max_requests, self.max_bytes = max_requests, max_bytes
        self.max_waiting, self.wait_s = max_waiting, wait_s
        self.max_unfinished_bytes = max(max_bytes // 2, least_unfinished_bytes)
        self.num_requests = self.num_bytes = 0
        self.unfinished: Counter[str] = Counter()
        """Bytes of bodies that are not whole, by client address."""
        self._lines: dict[bytes, deque[asyncio.Future[None]]] = {}
        self.num_waiting = 0
        """How many wait for their turn."""

    @contextmanager
    def hold(self, client: str = "") -> Iterator[Slot]:
        """What a request's body takes, from its first byte until the request is answered."""
        slot = Slot(self, client)
        try:
            yield slot
        finally:
            slot.whole()
            self.num_bytes -= slot.num_bytes

    @asynccontextmanager
    async def turn(self, tenant: bytes = b"") -> AsyncIterator[None]:
        """A place among the requests under way, after a wait where there is none free. Raises `QueueFull`."""
        await self._take_turn(tenant)
        try:
            yield
        finally:
            self._pass_turn()

    async def _take_turn(self, tenant: bytes) -> None:
        if self.num_requests < self.max_requests and not self.num_waiting:
            self.num_requests += 1
            return
        if self.num_waiting >= self.max_waiting:
            self._make_room(tenant)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(turn)
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self.wait_s):
                await turn
        except TimeoutError as error:
            self._leave(tenant, turn)
            raise QueueFull(f"the request waited {self.wait_s:g} s for its turn; try again later") from error
        except asyncio.CancelledError:
            self._leave(tenant, turn)
            raise

    def _make_room(self, tenant: bytes) -> None:
        """Too many wait. Raises `QueueFull` unless another tenant has more of them than this one will have."""
        full = QueueFull(f"{self.num_requests} requests are under way and {self.num_waiting} wait; try again later")
        most = max(self._lines, key=lambda one: len(self._lines[one]), default=tenant)
        if len(self._lines.get(most, ())) <= len(self._lines.get(tenant, ())) + 1:
            raise full
        latest = self._lines[most][-1]
        self._take_out(most, latest)
        latest.set_exception(full)

    def _take_out(self, tenant: bytes, turn: asyncio.Future[None]) -> None:
        line = self._lines[tenant]
        line.remove(turn)
        self.num_waiting -= 1
        if not line:
            del self._lines[tenant]

    def _leave(self, tenant: bytes, turn: asyncio.Future[None]) -> None:
        """Whose turn it became in the very moment that it left, passes it on."""
        if turn in self._lines.get(tenant, ()):
            self._take_out(tenant, turn)
        elif turn.done() and not turn.cancelled() and turn.exception() is None:
            self._pass_turn()

    def _pass_turn(self) -> None:
        """Someone is done: the next tenant's first takes over its place."""
        if not self._lines:
            self.num_requests -= 1
            return
        tenant = next(iter(self._lines))
        turn = self._lines[tenant][0]
        self._take_out(tenant, turn)
        if tenant in self._lines:
            self._lines[tenant] = self._lines.pop(tenant)  # it is the last in the rotation now
        if turn.done():
            self._pass_turn()
        else:
            turn.set_result(None)

    def check(self) -> None:
        """Raise `LeakError` when a slot is still taken though no request is under way."""
        if self.num_requests or self.num_bytes or self.unfinished or self._lines or self.num_waiting:
            raise LeakError(
                f"{self.num_requests} slots, {self.num_bytes} bytes and {self.num_waiting} turns were never given back"
            )
