"""Weighted fair queue of requests beyond the number that may run at a time. Owns the slots and the queues.

Tenants take turns by their weights: if a tenant has a thousand waiting requests, others wait for one of them, not for
all. Within a tenant, a lower `priority` comes first, then the order of arrival; a priority gives no advantage over
other tenants. A tenant at its limit of running requests waits for one of its own to end, without delaying the others.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import insort
from itertools import count
from operator import itemgetter

from kvferry.core.errors import LeakError, QueueFull
from kvferry.router.edge.tenants import Tenant

_Waiting = tuple[int, int, "asyncio.Future[None]"]
"""Priority, order of arrival, and the future that is set when its turn comes."""

_SLACK = 64


class _TenantQueue:
    """The waiting requests of a tenant, the next one first. `virtual_time`: requests served, divided by the tenant's
    weight; `is_listed`: the queue is in the heap of ready queues."""

    __slots__ = ("is_listed", "tenant", "virtual_time", "waiting")

    def __init__(self, tenant: Tenant, at: float) -> None:
        self.tenant, self.virtual_time, self.is_listed = tenant, at, False
        self.waiting: list[_Waiting] = []

    @property
    def backlog(self) -> float:
        """Number of waiting requests, divided by the tenant's weight."""
        return len(self.waiting) / self.tenant.limits.weight


class FairQueue:
    """Lets at most `max_requests` requests run, and at most `max_waiting` wait, each for at most `wait_s` seconds. If
    too many wait, the last request of the tenant with the largest backlog is refused. At most about twice
    `max_remembered` tenants without waiting requests are remembered."""

    def __init__(
        self, max_requests: int, max_waiting: int = 0, wait_s: float = 0.0, max_remembered: int = 20_000
    ) -> None:
        self._max_requests, self._max_waiting, self._wait_s = max_requests, max_waiting, wait_s
        self._max_remembered = max_remembered
        self.num_requests = self.num_waiting = 0
        """Number of running requests, and of waiting ones."""
        self._running: dict[bytes, int] = {}
        """Number of running requests of each tenant that has its own limit."""
        self._queues: dict[bytes, _TenantQueue] = {}
        self._ready: list[tuple[float, int, _TenantQueue]] = []
        """A heap of the queues whose turn may be next, by virtual time."""
        self._order = count()
        self._virtual_time = 0.0
        """The virtual time that was served last, at which a newly waiting tenant starts unless its own is later."""
        self._served_ahead: dict[bytes, float] = {}
        """Later virtual times of tenants that are not waiting now."""
        self._max_served_ahead = _SLACK

    def begin(self, tenant: Tenant) -> bool:
        """Take a slot, until `end`, if one is free and no request waits for it."""
        if self.num_requests >= self._max_requests or self._ready:
            return False
        if not tenant.limits.max_in_flight:
            self.num_requests += 1
            return True
        if not self._may_run(tenant):
            return False
        self._start(tenant)
        return True

    async def wait(self, tenant: Tenant, priority: int = 0) -> None:
        """Wait for this request's turn, and take a slot until `end`. Raises `QueueFull` if that takes too long, or too
        many requests wait."""
        turn = self._enqueue(tenant, priority)
        self._start_next()  # slots may be free although the listed queues are empty
        try:
            async with asyncio.timeout(self._wait_s):
                await turn[2]
        except TimeoutError as error:
            self._withdraw(tenant, turn)
            raise QueueFull(f"the request waited {self._wait_s:g} s to be served; try again later") from error
        except asyncio.CancelledError:
            self._withdraw(tenant, turn)
            raise

    def end(self, tenant: Tenant) -> None:
        """Release the slot of a finished request."""
        self.num_requests -= 1
        if tenant.limits.max_in_flight:
            left = self._running[tenant.key] - 1
            if left:
                self._running[tenant.key] = left
            else:
                del self._running[tenant.key]
            self._add_ready(self._queues.get(tenant.key))
        if self._ready:
            self._start_next()
        if not self.num_requests:  # without contention, all tenants start equal
            self._served_ahead.clear()

    def _may_run(self, tenant: Tenant) -> bool:
        max_in_flight = tenant.limits.max_in_flight
        return not max_in_flight or self._running.get(tenant.key, 0) < max_in_flight

    def _start(self, tenant: Tenant) -> None:
        self.num_requests += 1
        if tenant.limits.max_in_flight:
            self._running[tenant.key] = self._running.get(tenant.key, 0) + 1

    # Waiting.

    def _enqueue(self, tenant: Tenant, priority: int) -> _Waiting:
        line = self._queues.get(tenant.key)
        if line is None:
            at = max(self._virtual_time, self._served_ahead.pop(tenant.key, 0.0))
            line = self._queues[tenant.key] = _TenantQueue(tenant, at)
        turn: _Waiting = priority, next(self._order), asyncio.get_running_loop().create_future()
        insort(line.waiting, turn)
        self.num_waiting += 1
        if self.num_waiting > self._max_waiting:
            self._evict_last(line, turn)
        self._add_ready(line)
        return turn

    def _evict_last(self, newcomer: _TenantQueue, turn: _Waiting) -> None:
        """Refuse the last request of the largest backlog. Raises `QueueFull` if that is the new request."""
        num_others = self.num_waiting - 1
        full = QueueFull(f"{self.num_requests} requests are running and {num_others} are waiting; try again later")
        longest = max(self._queues.values(), key=lambda line: (line.backlog, line is newcomer))
        last = longest.waiting[-1]
        self._remove(longest, last)
        if last is turn:
            raise full
        if not last[2].done():  # it is being withdrawn, which makes room too
            last[2].set_exception(full)

    def _add_ready(self, line: _TenantQueue | None) -> None:
        """Add this tenant's queue to the ready queues."""
        if line is None or not line.waiting or line.is_listed or not self._may_run(line.tenant):
            return
        line.is_listed = True
        heapq.heappush(self._ready, (line.virtual_time, next(self._order), line))
        if len(self._ready) > 2 * len(self._queues) + _SLACK:  # entries of requests that withdrew before their turn
            self._ready = [entry for entry in self._ready if entry[2].waiting]
            heapq.heapify(self._ready)

    def _start_next(self) -> None:
        while self._ready and self.num_requests < self._max_requests:
            at, _, line = heapq.heappop(self._ready)
            line.is_listed = False
            if not line.waiting or not self._may_run(line.tenant):
                continue
            self._virtual_time, turn = max(self._virtual_time, at), line.waiting[0]
            if not turn[2].done():
                line.virtual_time = at + 1 / line.tenant.limits.weight
                self._start(line.tenant)
                turn[2].set_result(None)
            self._remove(line, turn)
            self._add_ready(line)

    def _remove(self, line: _TenantQueue, turn: _Waiting) -> None:
        line.waiting.remove(turn)
        self.num_waiting -= 1
        if not line.waiting:
            del self._queues[line.tenant.key]
            self._remember(line)

    def _remember(self, line: _TenantQueue) -> None:
        """Keep the virtual time of a tenant whose queue is empty, so that its next request is not preferred. If there
        are many such tenants, the largest virtual times are kept."""
        if line.virtual_time <= self._virtual_time:
            return
        self._served_ahead[line.tenant.key] = line.virtual_time
        if len(self._served_ahead) > self._max_served_ahead:
            ahead = ((key, at) for key, at in self._served_ahead.items() if at > self._virtual_time)
            self._served_ahead = dict(heapq.nlargest(self._max_remembered, ahead, key=itemgetter(1)))
            self._max_served_ahead = 2 * len(self._served_ahead) + _SLACK

    def _withdraw(self, tenant: Tenant, turn: _Waiting) -> None:
        """Withdraw a request. If it already has its turn, the next request gets it."""
        line = self._queues.get(tenant.key)
        if line is not None and turn in line.waiting:
            self._remove(line, turn)
        elif turn[2].done() and not turn[2].cancelled() and turn[2].exception() is None:
            self.end(tenant)

    def check(self) -> None:
        """Raise `LeakError` if a slot is still taken although no request is running."""
        if self.num_requests or self.num_waiting or self._queues or self._running:
            raise LeakError(f"{self.num_requests} places and {self.num_waiting} turns were never given back")
