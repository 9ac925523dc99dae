"""kvferry's controller in a cluster: the counts that `[scale]` decides become the replicas of the fleet's workloads.

Kubernetes starts, rolls and ends the pods, which register at the routers themselves. Of several controllers, the one
that holds the Lease leads; its successor continues with the plan that the routers have received last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from kvferry.fleet.backends.kubernetes.cluster import Cluster, ClusterError
from kvferry.fleet.backends.kubernetes.manifests.controller_objects import workload_of
from kvferry.fleet.control.leadership import Leadership, LeadershipUnknown
from kvferry.fleet.control.recommender import Recommender
from kvferry.fleet.spec.fleet_spec import DesiredFleet

logger = logging.getLogger(__name__)


class ReplicaController:
    """Owns the replicas of one fleet's workloads. `make_recommender`: called each time when it becomes the leader.
    `poll_interval_s`: seconds between two decisions, and between two attempts to become the leader."""

    def __init__(
        self,
        fleet: DesiredFleet,
        make_recommender: Callable[[], Recommender],
        cluster: Cluster,
        leadership: Leadership,
        *,
        poll_interval_s: float = 1.0,
    ) -> None:
        self._fleet, self._make_recommender = fleet, make_recommender
        self._cluster, self._leadership, self._poll_interval_s = cluster, leadership, poll_interval_s

    async def run(self) -> None:
        """Scale until cancelled. Raises `ConfigError` if the API server does not allow a request, and for a router with
        another token."""
        while True:
            if await self._is_acquired():
                await self._lead()
            await asyncio.sleep(self._poll_interval_s)

    async def _is_acquired(self) -> bool:
        try:
            return await self._leadership.try_acquire()
        except LeadershipUnknown as error:
            logger.warning("it is not known if another controller acts: %s", error)
            return False

    async def _lead(self) -> None:
        logger.info("this controller scales the fleet")
        recommender = self._make_recommender()
        replicas: dict[str, int] = {}  # set last, by role
        renewing = asyncio.create_task(self._leadership.heartbeat())
        try:
            while self._leadership.is_held:
                plan = await recommender.look()
                if plan is not None and not plan.recommends:
                    await self._scale(plan.desired, replicas)
                await asyncio.sleep(self._poll_interval_s)
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])
            await self._leadership.release()

    async def _scale(self, desired: Mapping[str, int], replicas: dict[str, int]) -> None:
        """Set the replicas that differ from `replicas`, and update `replicas`."""
        for role in self._fleet.role:
            count = desired.get(role)
            if count is None or replicas.get(role) == count or not self._leadership.is_held:
                continue
            version, kind, name = workload_of(self._fleet, role)
            try:
                await self._cluster.scale(version, kind, name, count)
            except ClusterError as error:
                logger.warning("%s %s is not scaled to %d yet: %s", kind, name, count, error)
            else:
                replicas[role] = count
                logger.info("%s %s is scaled to %d", kind, name, count)
