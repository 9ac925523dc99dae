"""The right to act on a fleet, which one controller of all machines has at a time: a Lease of the cluster
(coordination.k8s.io/v1) with the fleet's name.

Who has it renews it every few seconds. It believes that it has it for less long than others wait before they take it,
counted from before the renewal was sent, by a clock that goes on while the machine sleeps: a process that was stopped
knows when it goes on that it is too late. Nobody compares clocks of two machines: others wait, by their own, from when
they saw the Lease change last. A change names the version that it was made for, so that one of two succeeds.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from kvferry.core.clock import SYSTEM_CLOCK, boot_time
from kvferry.fleet.backends.kubernetes.cluster import Cluster, ClusterError, Object

logger = logging.getLogger(__name__)

LEASE = ("coordination.k8s.io/v1", "Lease")
RENEWED_S, BELIEVED_S, TAKEN_S = 2.0, 10.0, 15.0
"""How often it is renewed, for how long who renewed it acts, and how long others wait for the next renewal."""
_LONGEST_S = 600.0
"""Nobody waits longer for a holder, whatever it says."""
_CONFLICT, _NOT_FOUND = 409, 404


class ClusterLease:
    """Owns what this process knows of the Lease. `name`: of the object; `labels`: those that it is made with. `clock`:
    seconds since the machine was started."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        name: str,
        labels: dict[str, str],
        clock: Callable[[], float] = boot_time,
    ) -> None:
        self._cluster, self.namespace, self.name, self._labels = cluster, namespace, name, labels
        self._clock = clock
        self.me = f"{socket.gethostname()[:200]}_{uuid.uuid4().hex[:12]}"
        self.holder = ""
        """Who had it when it was looked at last; empty: nobody."""
        self._seen = ("", 0.0)
        """Its version, and since when it has been that."""
        self._until = float("-inf")

    @property
    def is_held(self) -> bool:
        """Whether this process may act now."""
        return self._clock() < self._until

    async def try_to_take(self) -> bool:
        """Take it if nobody has it; False: somebody has. Raises `ClusterError`."""
        begun = self._clock()
        try:
            found = await self._cluster.read(*LEASE, self.name)
        except ClusterError as error:
            if error.status != _NOT_FOUND:
                raise
            return await self._change(begun, None, transitions=0)
        spec, version = found.get("spec") or {}, found["metadata"].get("resourceVersion", "")
        self.holder = spec.get("holderIdentity") or ""
        if self.holder not in ("", self.me) and not self._is_over(spec, version):
            return False
        return await self._change(begun, version, transitions=_number(spec.get("leaseTransitions")) + 1)

    def _is_over(self, spec: Object, version: str) -> bool:
        """Whether its holder has had the time to renew it, and did not."""
        now = self._clock()
        if self._seen[0] != version:
            self._seen = (version, now)
        lasts_s = min(max(_number(spec.get("leaseDurationSeconds")), TAKEN_S), _LONGEST_S)
        return now - self._seen[1] >= lasts_s

    async def keep(self) -> None:
        """Renew it, until somebody else has it or this process has been too late."""
        while self.is_held:
            await asyncio.sleep(RENEWED_S)
            try:
                await self.renew()
            except ClusterError as error:
                logger.warning("the lease of %s is not renewed: %s", self.name, error)
        logger.warning("another controller may look after %s now; this one does nothing any more", self.name)

    async def renew(self) -> None:
        """Once. Raises `ClusterError`."""
        begun = self._clock()
        if not self.is_held:
            return
        try:
            found = await self._cluster.read(*LEASE, self.name)
        except ClusterError as error:
            if error.status != _NOT_FOUND:
                raise
            await self._change(begun, None, transitions=0)  # somebody has deleted it
            return
        spec = found.get("spec") or {}
        self.holder = spec.get("holderIdentity") or ""
        if self.holder != self.me:
            self._until = float("-inf")
            return
        await self._change(begun, found["metadata"].get("resourceVersion", ""), transitions=None)

    async def give_up(self) -> None:
        """Let another controller act at once. Raises `ClusterError`."""
        if not self.is_held:
            return
        self._until = float("-inf")
        found = await self._cluster.read(*LEASE, self.name)
        if (found.get("spec") or {}).get("holderIdentity") == self.me:
            version = {"resourceVersion": found["metadata"].get("resourceVersion", "")}
            changes = {"metadata": version, "spec": {"holderIdentity": "", "leaseDurationSeconds": 1}}
            await self._cluster.patch(*LEASE, self.name, changes)

    async def _change(self, begun: float, version: str | None, *, transitions: int | None) -> bool:
        """Have this process hold it, if it still has this version; None: if it is not there. `transitions`: how often
        it has changed its holder; None: it has not."""
        now = datetime.fromtimestamp(SYSTEM_CLOCK.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: dict[str, Any] = {"holderIdentity": self.me, "leaseDurationSeconds": int(TAKEN_S), "renewTime": now}
        if transitions is not None:
            spec |= {"acquireTime": now, "leaseTransitions": transitions}
        try:
            if version is None:
                metadata = {"name": self.name, "namespace": self.namespace, "labels": self._labels}
                await self._cluster.create(
                    {"apiVersion": LEASE[0], "kind": LEASE[1], "metadata": metadata, "spec": spec}
                )
            else:
                changes = {"metadata": {"resourceVersion": version}, "spec": spec}
                await self._cluster.patch(*LEASE, self.name, changes)
        except ClusterError as error:
            if error.status not in (_CONFLICT, _NOT_FOUND):
                raise
            return False
        self.holder, self._until = self.me, begun + BELIEVED_S
        return True


def _number(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
