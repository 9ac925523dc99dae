"""The right to act on a fleet as a Lease of the cluster (coordination.k8s.io/v1) with the fleet's name.

Others wait, by their own clocks, from when they saw the Lease change last. A change names the version that it was made
for, so that one of two succeeds.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from kvferry.core.clock import SYSTEM_CLOCK, boot_time
from kvferry.core.errors import ConfigError
from kvferry.fleet.backends.kubernetes.cluster import Cluster, Object
from kvferry.fleet.backends.kubernetes.errors import ClusterError
from kvferry.fleet.control.fleet_lease import TAKEN_S, FleetLease, LeaseUnknown

logger = logging.getLogger(__name__)

LEASE = ("coordination.k8s.io/v1", "Lease")
_MAX_S = 600.0
"""The longest wait for a holder, whatever it says."""
_CONFLICT, _NOT_FOUND, _NOT_ALLOWED = 409, 404, (401, 403)


class ClusterLease(FleetLease):
    """Owns what this process knows of the Lease. `name`: of the object; `labels`: those that it is made with."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        name: str,
        labels: dict[str, str],
        clock: Callable[[], float] = boot_time,
    ) -> None:
        super().__init__(clock)
        self._cluster, self.namespace, self.name, self._labels = cluster, namespace, name, labels
        self.me = f"{socket.gethostname()[:200]}_{uuid.uuid4().hex[:12]}"
        self._seen = ("", 0.0)
        """The Lease's version, and since when it has had it."""

    async def try_to_take(self) -> bool:
        """Take it if nobody has it; False: somebody has."""
        begun = self._clock()
        with _asking():
            if (found := await self._read()) is None:
                return await self._change(begun, None, transitions=0)
            spec, version = found.get("spec") or {}, found["metadata"].get("resourceVersion", "")
            self.holder = spec.get("holderIdentity") or ""
            if self.holder not in ("", self.me) and not self._is_over(spec, version):
                return False
            return await self._change(begun, version, transitions=_number(spec.get("leaseTransitions")) + 1)

    async def _read(self) -> Object | None:
        """The object; None: it is not there."""
        try:
            return await self._cluster.read(*LEASE, self.name)
        except ClusterError as error:
            if error.status != _NOT_FOUND:
                raise
            return None

    def _is_over(self, spec: Object, version: str) -> bool:
        """Whether its holder has had the time to renew it, and did not."""
        now = self._clock()
        if self._seen[0] != version:
            self._seen = (version, now)
        lasts_s = min(max(_number(spec.get("leaseDurationSeconds")), TAKEN_S), _MAX_S)
        return now - self._seen[1] >= lasts_s

    async def renew(self) -> None:
        """Renew it once."""
        begun = self._clock()
        if not self.is_held:
            return
        with _asking():
            if (found := await self._read()) is None:  # somebody has deleted it
                await self._change(begun, None, transitions=0)
                return
            self.holder = (found.get("spec") or {}).get("holderIdentity") or ""
            if self.holder != self.me:
                self._is_lost()
                return
            await self._change(begun, found["metadata"].get("resourceVersion", ""), transitions=None)

    async def give_up(self) -> None:
        """Let another controller act at once; if that cannot be said, it has to wait."""
        if not self.is_held:
            return
        self._is_lost()
        try:
            found = await self._read()
            if found is not None and (found.get("spec") or {}).get("holderIdentity") == self.me:
                version = {"resourceVersion": found["metadata"].get("resourceVersion", "")}
                changes = {"metadata": version, "spec": {"holderIdentity": "", "leaseDurationSeconds": 1}}
                await self._cluster.patch(*LEASE, self.name, changes)
        except ClusterError as error:
            logger.debug("the next controller has to wait: %s", error)

    async def remove(self) -> None:
        """Delete the object."""
        if not self.is_held:
            return
        self._is_lost()
        try:
            await self._cluster.delete(*LEASE, self.name)
        except ClusterError as error:
            logger.warning("Lease %s could not be deleted, and is left: %s", self.name, error)

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
        self.holder = self.me
        self._is_renewed(begun)
        return True


@contextmanager
def _asking() -> Iterator[None]:
    """What an API server refuses, and what it does not answer."""
    try:
        yield
    except ClusterError as error:
        raise (ConfigError if error.status in _NOT_ALLOWED else LeaseUnknown)(f"backend.kubernetes: {error}") from error


def _number(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
