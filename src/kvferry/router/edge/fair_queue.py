"""The order in which requests are served when there are more than may run at once. Owns the places and the queues.

Tenants take turns by their weights: a tenant that sends a thousand requests makes the others wait for one of them, not
for all. Within a tenant, a lower `priority` comes first, then the order of arrival; a priority gains nothing on other
tenants. A tenant that has as many running requests as it may waits for one of its own to end, without delaying the
others.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import insort
from itertools import count
from operator import itemgetter

from kvferry.core.errors import LeakError, QueueFull
from kvferry.router.edge.tenants import MAX_TENANTS, Tenant

_Waiting = tuple[int, int, "asyncio.Future[None]"]
"""Priority, order of arrival, and what is set when it is its turn."""

_MAX_LEFT = 64


class _Line:
    """The waiting requests of one tenant, the next one first. `at`: how much the tenant has had, divided by its weight;
    `listed`: whether the tenant may be next."""

    __slots__ = ("at", "listed", "tenant", "waiting")

    def __init__(self, tenant: Tenant, at: float) -> None:
        self.tenant, self.at, self.listed = tenant, at, False
        self.waiting: list[_Waiting] = []

    @property
    def greed(self) -> float:
        """How many requests wait, divided by the tenant's weight."""
        return len(self.waiting) / self.tenant.limits.weight


class FairQueue:
    """Lets at most `max_requests` run and at most `max_waiting` wait, none longer than `wait_s`. If too many wait, the
    tenant with the most waiting (for its weight) loses the last of them."""

    def __init__(self, max_requests: int, max_waiting: int = 0, wait_s: float = 0.0) -> None:
        self._max_requests, self._max_waiting, self._wait_s = max_requests, max_waiting, wait_s
        self.num_requests = self.num_waiting = 0
        """How many requests are under way, and how many wait."""
        self._running: dict[bytes, int] = {}
        """Requests under way, of tenants with a limit of their own."""
        self._lines: dict[bytes, _Line] = {}
        self._next: list[tuple[float, int, _Line]] = []
        """A heap of the lines whose turn it may be."""
        self._order = count()
        self._at = 0.0
        """The share that was served last; a tenant that begins to wait begins here, or where it has come to itself."""
        self._ahead: dict[bytes, float] = {}
        """The shares of tenants that do not wait just now and have had more than that."""
        self._max_ahead = _MAX_LEFT

    def begin(self, tenant: Tenant) -> bool:
        """Take a place, until `end`, if one is free and nobody waits for it."""
        if self.num_requests >= self._max_requests or self._next:
            return False
        if not tenant.limits.max_in_flight:
            self.num_requests += 1
            return True
        if not self._may_run(tenant):
            return False
        self._start(tenant)
        return True

    async def wait(self, tenant: Tenant, priority: int = 0) -> None:
        """Take a place, until `end`, when it is this request's turn. Raises `QueueFull` if that takes too long or too
        many wait."""
        turn = self._enqueue(tenant, priority)
        self._start_next()  # where places are free, but those listed for them have left
        try:
            async with asyncio.timeout(self._wait_s):
                await turn[2]
        except TimeoutError as error:
            self._leave(tenant, turn)
            raise QueueFull(f"the request waited {self._wait_s:g} s to be served; try again later") from error
        except asyncio.CancelledError:
            self._leave(tenant, turn)
            raise

    def end(self, tenant: Tenant) -> None:
        """Note that a request is done."""
        self.num_requests -= 1
        if tenant.limits.max_in_flight:
            left = self._running[tenant.key] - 1
            if left:
                self._running[tenant.key] = left
            else:
                del self._running[tenant.key]
            self._list(self._lines.get(tenant.key))
        if self._next:
            self._start_next()
        if not self.num_requests:  # nobody has taken anything from anybody: all begin alike
            self._ahead.clear()

    def _may_run(self, tenant: Tenant) -> bool:
        most = tenant.limits.max_in_flight
        return not most or self._running.get(tenant.key, 0) < most

    def _start(self, tenant: Tenant) -> None:
        self.num_requests += 1
        if tenant.limits.max_in_flight:
            self._running[tenant.key] = self._running.get(tenant.key, 0) + 1

    # Waiting.

    def _enqueue(self, tenant: Tenant, priority: int) -> _Waiting:
        line = self._lines.get(tenant.key)
        if line is None:
            at = max(self._at, self._ahead.pop(tenant.key, 0.0))
            line = self._lines[tenant.key] = _Line(tenant, at)
        turn: _Waiting = priority, next(self._order), asyncio.get_running_loop().create_future()
        insort(line.waiting, turn)
        self.num_waiting += 1
        if self.num_waiting > self._max_waiting:
            self._refuse_one(line, turn)
        self._list(line)
        return turn

    def _refuse_one(self, own: _Line, turn: _Waiting) -> None:
        """Refuse one, as too many wait. Raises `QueueFull` if the newcomer has to go."""
        num_others = self.num_waiting - 1
        full = QueueFull(f"{self.num_requests} requests are running and {num_others} are waiting; try again later")
        greediest = max(self._lines.values(), key=lambda line: (line.greed, line is own))
        last = greediest.waiting[-1]
        self._take_out(greediest, last)
        if last is turn:
            raise full
        if not last[2].done():  # it was leaving already, and makes room as well
            last[2].set_exception(full)

    def _list(self, line: _Line | None) -> None:
        """Enter this tenant among those that may be next."""
        if line is None or not line.waiting or line.listed or not self._may_run(line.tenant):
            return
        line.listed = True
        heapq.heappush(self._next, (line.at, next(self._order), line))
        if len(self._next) > 2 * len(self._lines) + _MAX_LEFT:  # of those who left before it was their turn
            self._next = [one for one in self._next if one[2].waiting]
            heapq.heapify(self._next)

    def _start_next(self) -> None:
        while self._next and self.num_requests < self._max_requests:
            at, _, line = heapq.heappop(self._next)
            line.listed = False
            if not line.waiting or not self._may_run(line.tenant):
                continue
            self._at, turn = max(self._at, at), line.waiting[0]
            if not turn[2].done():
                line.at = at + 1 / line.tenant.limits.weight
                self._start(line.tenant)
                turn[2].set_result(None)
            self._take_out(line, turn)
            self._list(line)

    def _take_out(self, line: _Line, turn: _Waiting) -> None:
        line.waiting.remove(turn)
        self.num_waiting -= 1
        if not line.waiting:
            del self._lines[line.tenant.key]
            self._remember(line)

    def _remember(self, line: _Line) -> None:
        """The queue of a tenant with one client is empty after each turn, which must not put its next request before
        others'. If there are many such tenants, those that have had the most are remembered."""
        if line.at <= self._at:
            return
        self._ahead[line.tenant.key] = line.at
        if len(self._ahead) > self._max_ahead:
            ahead = ((key, at) for key, at in self._ahead.items() if at > self._at)
            self._ahead = dict(heapq.nlargest(MAX_TENANTS, ahead, key=itemgetter(1)))
            self._max_ahead = 2 * len(self._ahead) + _MAX_LEFT

    def _leave(self, tenant: Tenant, turn: _Waiting) -> None:
        """A request that leaves at the very moment its turn comes passes the turn on."""
        line = self._lines.get(tenant.key)
        if line is not None and turn in line.waiting:
            self._take_out(line, turn)
        elif turn[2].done() and not turn[2].cancelled() and turn[2].exception() is None:
            self.end(tenant)

    def check(self) -> None:
        """Raise `LeakError` when a place is still taken though no request is under way."""
        if self.num_requests or self.num_waiting or self._lines or self._running:
            raise LeakError(f"{self.num_requests} places and {self.num_waiting} turns were never given back")
