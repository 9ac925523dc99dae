"""Leadership by a Lease of the cluster (coordination.k8s.io/v1), which the manifests contain.

Other controllers wait until the Lease has not changed for its duration, by their own clocks. A change names the version
of the Lease to which it applies, so that only one of two changes succeeds.
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
from kvferry.fleet.backends.kubernetes.cluster import Cluster, ClusterError, Object
from kvferry.fleet.control.leadership import TAKEN_S, LeadershipUnknown, TimedLeadership

logger = logging.getLogger(__name__)

LEASE = ("coordination.k8s.io/v1", "Lease")
_CONFLICT, _NOT_ALLOWED = 409, (401, 403)


class KubernetesLeadership(TimedLeadership):
    """Owns the last version of the Lease that this process has seen. `name`: name of the Lease."""

    max_s = 600.0
    """Maximum seconds to wait for a holder, even if the Lease has a longer duration."""

    def __init__(self, cluster: Cluster, name: str, clock: Callable[[], float] = boot_time) -> None:
        super().__init__(clock)
        self._cluster, self.name = cluster, name
        self.me = f"{socket.gethostname()[:200]}_{uuid.uuid4().hex[:12]}"
        self._seen = ("", 0.0)
        """The Lease's version, and the time at which this process saw it first."""

    async def try_acquire(self) -> bool:
        """Acquire the Lease if it is free. False: another controller has it."""
        begun = self._clock()
        with _refusals():
            spec, version = await self._read()
            self.holder = spec.get("holderIdentity") or ""
            if self.holder not in ("", self.me) and not self._has_expired(spec, version):
                return False
            return await self._change(begun, version, transitions=_number(spec.get("leaseTransitions")) + 1)

    async def _read(self) -> tuple[Object, str]:
        """The Lease's spec and version. Raises `ClusterError`."""
        lease = await self._cluster.read(*LEASE, self.name)
        return lease.get("spec") or {}, lease["metadata"].get("resourceVersion", "")

    def _has_expired(self, spec: Object, version: str) -> bool:
        """True if its holder has not renewed it in time."""
        now = self._clock()
        if self._seen[0] != version:
            self._seen = (version, now)
        duration_s = min(max(_number(spec.get("leaseDurationSeconds")), TAKEN_S), self.max_s)
        return now - self._seen[1] >= duration_s

    async def renew(self) -> None:
        """Renew it once."""
        begun = self._clock()
        if not self.is_held:
            return
        with _refusals():
            spec, version = await self._read()
            self.holder = spec.get("holderIdentity") or ""
            if self.holder != self.me:
                self._lost()
                return
            await self._change(begun, version, transitions=None)

    async def release(self) -> None:
        """Release the Lease, so that another controller may lead at once. If the API server does not answer, the other
        controller has to wait."""
        was_held = self.is_held
        await self._stop()
        if not was_held:
            return
        try:
            spec, version = await self._read()
            if spec.get("holderIdentity") == self.me:
                released = {"holderIdentity": "", "leaseDurationSeconds": 1}
                changes = {"metadata": {"resourceVersion": version}, "spec": released}
                await self._cluster.patch(*LEASE, self.name, changes)
        except ClusterError as error:
            logger.debug("the next controller has to wait: %s", error)

    async def remove(self) -> None:
        """Does not remove the Lease, which is removed with the manifests."""
        await self.release()

    async def _change(self, begun: float, version: str, *, transitions: int | None) -> bool:
        """Take the Lease, if it still has this version. `transitions`: number of times that its holder has changed;
        None: never."""
        now = datetime.fromtimestamp(SYSTEM_CLOCK.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: dict[str, Any] = {"holderIdentity": self.me, "leaseDurationSeconds": int(TAKEN_S), "renewTime": now}
        if transitions is not None:
            spec |= {"acquireTime": now, "leaseTransitions": transitions}
        try:
            changes = {"metadata": {"resourceVersion": version}, "spec": spec}
            await self._cluster.patch(*LEASE, self.name, changes)
        except ClusterError as error:
            if error.status != _CONFLICT:
                raise
            return False
        self.holder = self.me
        self._renewed(begun)
        return True


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise `ConfigError` if the API server does not allow the request, and `LeadershipUnknown` if it does not
    answer."""
    try:
        yield
    except ClusterError as error:
        raise (ConfigError if error.status in _NOT_ALLOWED else LeadershipUnknown)(
            f"backend.kubernetes: {error}"
        ) from error


def _number(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
