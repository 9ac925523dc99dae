"""Which instances a request may still try. Owns who has failed it, and how often each role was tried."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.router.instance import Instance
from kvferry.router.metrics import Metrics
from kvferry.router.pools import Pool, Pools
from kvferry.router.protocols.choose import can_pair


class Candidates:
    """Of one request. Each role may be tried once, and `retries` times more."""

    def __init__(self, pools: Pools, metrics: Metrics, retries: int) -> None:
        self._pools, self._metrics, self._retries = pools, metrics, retries
        self._tries = {"prefill": 0, "decode": 0}
        self._failed: set[Instance] = set()

    def prefills(self) -> Iterator[Instance]:
        """Prefill instances to try, one after the other."""
        return self._next_ones(self._pools.prefill, set())

    def decodes(self, prefill: Instance | None = None) -> Iterator[Instance]:
        """Decode instances to try, likewise; only those that can read the KV of `prefill`."""
        pool = self._pools.decode
        strangers = {one for one in pool.instances if prefill and not can_pair(prefill.facts, one.facts)}
        return self._next_ones(pool, strangers)

    def has_other_decode(self) -> bool:
        """Whether there is a decode instance that has not failed this request."""
        return any(instance not in self._failed for instance in self._pools.decode.instances)

    def failed(self, instance: Instance) -> None:
        """It is not tried again for this request."""
        self._failed.add(instance)

    def forgive_decodes(self) -> None:
        """Decode instances failed because prefill did: they may be tried again."""
        self._failed -= set(self._pools.decode.instances)
        self._tries["decode"] = 0

    def _next_ones(self, pool: Pool, strangers: set[Instance]) -> Iterator[Instance]:
        pick = pool.pick_alive if pool.role == "prefill" else pool.pick
        while self._tries[pool.role] <= self._retries:
            instance = pick(self._failed | strangers)
            if instance is None:
                return
            if self._tries[pool.role]:
                self._metrics.retried(pool.role)
            self._tries[pool.role] += 1
            yield instance
