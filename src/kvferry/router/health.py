"""Which instances are alive. Looks at them all, again and again; legs that cannot connect tell sooner."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from kvferry.core.errors import TransferError, TransferTimeout
from kvferry.router.config import ProtocolName
from kvferry.router.facts import ask_about
from kvferry.router.instance import Instance, Unasked
from kvferry.router.pools import Pools
from kvferry.router.upstream import Upstream

logger = logging.getLogger(__name__)

_LATE_BEFORE_DEAD = 3
"""How often in a row an instance may answer too late: one that computes hard is busy, not dead."""


class Health:
    """Writes `Instance.alive`. Who is alive and not known is asked about itself, so that no request has to wait
    for that."""

    def __init__(
        self,
        pools: Pools,
        upstream: Upstream,
        interval_s: float,
        *,
        protocol: ProtocolName = "auto",
        timeout_s: float = 5.0,
    ) -> None:
        self._pools, self._upstream, self._protocol = pools, upstream, protocol
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._late: Counter[Instance] = Counter()

    async def first_look(self) -> None:
        """Look at all instances before requests come; does not wait long for those that do not answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await self.look(self._pools)

    async def watch(self) -> None:
        """Look at all instances again and again; ends by cancellation."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.look(self._pools)

    async def look(self, instances: Iterable[Instance]) -> None:
        """Ask each of them now."""
        async with asyncio.TaskGroup() as group:
            for instance in instances:
                group.create_task(self._look_at(instance))

    async def _look_at(self, instance: Instance) -> None:
        alive = await self._is_alive(instance)
        if alive != instance.alive:
            logger.warning("%s is %s", instance, "back" if alive else "not alive")
        if not alive:
            instance.failed(reachable=False)
            return
        instance.alive = True
        if isinstance(instance.facts, Unasked):
            instance.facts = await ask_about(instance, self._upstream, self._protocol)

    async def _is_alive(self, instance: Instance) -> bool:
        try:
            status, _ = await self._upstream.ask(instance, "GET", "/health", self._timeout_s)
        except TransferTimeout:
            self._late[instance] += 1
            return instance.alive and self._late[instance] < _LATE_BEFORE_DEAD
        except TransferError:
            return False
        self._late[instance] = 0
        return status == 200
