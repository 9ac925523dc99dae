"""Members are pods of a cluster: one for an instance or a router, made from what `kvferry fleet render` writes.

Kubernetes places them, starts their container once and keeps their status; everything else is decided by the
controller. What is known of members is the pods themselves, with labels for the fleet, the role and the revision, and
is followed by a watch. A pod that somebody else deletes counts as ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from kvferry.core.errors import ConfigError
from kvferry.fleet.backends.kubernetes.pod import (
    MEMBER_LABEL,
    Object,
    member_of,
    owner_reference,
    pod_for,
    pod_name,
    selector_of,
)
from kvferry.fleet.control.backend import BackendContext, FleetBackend, Member, MemberSpec, MemberState, NotStarted
from kvferry.fleet.control.fleet_lease import FleetLease
from kvferry.fleet.control.spec import MemberRole, WantedFleet
from kvferry.fleet.kubernetes.controller import require_plain_pods
from kvferry.fleet.kubernetes.pods import HTTP_PORT, PART_LABEL, kubernetes_of, labels_of
from kvferry.fleet.kubernetes.render import budgets, check, support
from kvferry.fleet.kubernetes.values import Values

if TYPE_CHECKING:
    from kvferry.fleet.backends.kubernetes.cluster import Cluster

logger = logging.getLogger(__name__)

_POD = ("v1", "Pod")
_NOTHING: Object = {"metadata": {}}
_LEAST_GRACE_S = 1
"""0 would have Kubernetes forget the pod while it may still run."""
_CONFIRMED_S = 15.0
"""How much longer than its grace a pod may take until its node says that it is gone; then it is forgotten: a node that
was lost would never say so."""
_WAITS_S = (0.2, 10.0)
"""Before the API server is asked again for what it did not do: the first wait, which doubles, and the longest."""
_TOGETHER_S = 0.1
"""For how long changes of pods are gathered before what is beside them follows."""


class KubernetesBackend(FleetBackend):
    """Owns what the watch has told, and the two tasks that keep the pods followed and what is around them as it is to
    be."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._fleet: WantedFleet | None = None
        self._cluster: Cluster | None = None
        self._pods: dict[str, Object] = {}
        """By the name of the member."""
        self._served: set[str] = set()
        """Those that serve, or did."""
        self._lost: dict[str, Member] = {}
        """Those whose pods somebody else has deleted."""
        self._leaving: dict[str, asyncio.Event] = {}
        """Those that are to end; set when they are gone."""
        self._owner: Object | None = None
        """What the pods belong to, as they refer to it."""
        self._is_to_apply = asyncio.Event()
        self._applied: dict[tuple[str, str], Object] = {}
        """What is beside the pods, as it was applied last, by kind and name."""
        self._lease_api: Cluster | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._applying = asyncio.Lock()

    # What is wanted.

    @property
    def num_routers(self) -> int:
        """As the table says."""
        return kubernetes_of(self._wanted).routers

    def use(self, fleet: WantedFleet) -> None:
        """Raises `ConfigError`."""
        check(fleet)
        told = kubernetes_of(fleet)
        require_plain_pods(fleet)
        before = self._fleet
        if self._cluster is not None and before is not None and kubernetes_of(before).namespace != told.namespace:
            raise ConfigError(
                "backend.kubernetes.namespace cannot be changed: delete the fleet, and apply the spec then"
            )
        self._fleet = fleet
        self._applied.clear()
        self._is_to_apply.set()

    @property
    def _wanted(self) -> WantedFleet:
        assert self._fleet is not None, "`use` comes first"
        return self._fleet

    # Its life.

    async def lease(self) -> FleetLease:
        """A Lease of the cluster, with connections of its own, which wait for nothing else."""
        from kvferry.fleet.backends.kubernetes.cluster import Cluster
        from kvferry.fleet.backends.kubernetes.lease import ClusterLease

        told, name = kubernetes_of(self._wanted), f"{self._wanted.name}-controller"
        self._lease_api = await Cluster.connect(told.namespace, told.context)
        return ClusterLease(self._lease_api, told.namespace, name, labels_of(self._wanted))

    async def open(self) -> None:
        """Find the pods of an earlier controller, and make what they need beside them. Raises `ConfigError` if the
        cluster refuses it, or does not answer."""
        from kvferry.fleet.backends.kubernetes.cluster import Cluster, ClusterError

        told = kubernetes_of(self._wanted)
        self._cluster = cluster = await Cluster.connect(told.namespace, told.context, lambda: self.may_act)
        try:
            if self.context.owner:
                owner = await cluster.read("v1", "ConfigMap", self.context.owner)
                self._owner = owner_reference(owner)
            pods, version = await cluster.list_all(*_POD, selector_of(self._wanted))
            for pod in pods:
                if (
                    _is_ours(pod, self._wanted) and "deletionTimestamp" in pod["metadata"]
                ):  # an earlier controller wanted that
                    self._leaving[pod["metadata"]["labels"][MEMBER_LABEL]] = asyncio.Event()
            self.listed(pods)
            await self._apply()
        except ClusterError as error:
            raise ConfigError(f"backend.kubernetes: {error}") from error
        self._tasks += [
            asyncio.create_task(cluster.follow(*_POD, selector_of(self._wanted), self, version)),
            asyncio.create_task(self._keep_applied()),
        ]

    async def close(self) -> None:
        """Pods stay, unless they are not to outlive this process."""
        if not self.context.outlives:
            await asyncio.gather(*(self.stop(name, 0.0) for name in [*self._pods, *self._lost]))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._cluster is not None:
            await self._cluster.close()
        await self.give_up()
        if self._lease_api is not None:
            await self._lease_api.close()

    async def clear(self) -> None:
        """Delete what `open` has made beside the pods."""
        from kvferry.fleet.backends.kubernetes.cluster import ClusterError

        if self.context.owner:  # nothing was made; whoever deletes the owner deletes that too
            return
        made = [(one["apiVersion"], one["kind"], one["metadata"]["name"]) for one in self._support()]
        async with self._applying:  # what is being made now would be left
            for task in self._tasks:  # what is deleted now would be made again
                task.cancel()
            for version, kind, name in made:
                try:
                    await self._api.delete(version, kind, name)
                except ClusterError as error:
                    logger.warning("%s %s is left: %s", kind, name, error)
        await super().clear()

    # Members.

    def members(self) -> Sequence[Member]:
        """As the watch has told."""
        seen = (self._member(pod) for pod in self._pods.values())
        return [*(one for one in seen if one is not None), *self._lost.values()]

    def _member(self, pod: Object) -> Member | None:
        has_served = pod["metadata"]["labels"][MEMBER_LABEL] in self._served
        return member_of(pod, self._service_url, has_served=has_served)

    async def start(self, member: MemberSpec) -> None:
        """Create a pod. Raises `NotStarted`."""
        from kvferry.fleet.backends.kubernetes.cluster import ClusterError

        name = member.name
        if name in self._pods or name in self._lost:
            raise NotStarted(f"{name} is there already")
        try:
            pod = await self._api.create(pod_for(self._wanted, member, self._owner))
        except ClusterError as error:
            raise NotStarted(f"no pod is made: {error}") from error
        self._leaving.pop(name, None)
        self._pods.setdefault(name, pod)  # the watch may have told more of it by now
        self._has_changed()

    async def stop(self, name: str, grace_s: float) -> None:
        """Delete a pod, and wait until its node says that it is gone."""
        if self._lost.pop(name, None) is not None:
            self._has_changed()
        if name not in self._pods:
            return
        gone = self._leaving.setdefault(name, asyncio.Event())
        self._is_to_apply.set()
        await self._delete(name, max(_LEAST_GRACE_S, ceil(grace_s)), gone, grace_s + _CONFIRMED_S)
        if not gone.is_set() and self.may_act:
            logger.warning("the pod of %s is forgotten: its node does not say that it has ended", name)
            await self._delete(name, 0, gone, _CONFIRMED_S)

    async def _delete(self, name: str, grace_s: int, gone: asyncio.Event, within_s: float) -> None:
        """Have it deleted, and wait until it is gone; the API server may be away for a while."""
        from kvferry.fleet.backends.kubernetes.cluster import ClusterError

        pod, (wait_s, longest) = pod_name(self._wanted, name), _WAITS_S
        uid = self._pods[name]["metadata"].get("uid", "") if name in self._pods else ""
        is_asked = False
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not gone.is_set() and self.may_act:
                    try:
                        is_there = await (
                            self._api.has(*_POD, pod, uid) if is_asked else self._api.delete(*_POD, pod, grace_s, uid)
                        )
                        is_asked = True
                        if not is_there and (self._pods.get(name) or _NOTHING)["metadata"].get("uid", uid) == uid:
                            self._forget(name)
                    except ClusterError as error:
                        logger.warning("the pod of %s is not deleted yet: %s", name, error)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await gone.wait()  # which the watch tells
                    wait_s = min(2 * wait_s, longest)

    async def assign(self, name: str, role: MemberRole) -> None:
        """Label a pod with its role. If that fails, it is asked for again when the controller looks again."""
        from kvferry.fleet.backends.kubernetes.cluster import ClusterError

        if name not in self._pods:
            return
        try:
            labels = {"metadata": {"labels": {PART_LABEL: role}}}
            self._pods[name] = await self._api.patch(*_POD, pod_name(self._wanted, name), labels)
        except ClusterError as error:
            logger.warning("the pod of %s is not labelled as %s: %s", name, role, error)
        self._has_changed()

    def _has_changed(self) -> None:
        """There are other pods, or they are in another state; their budgets may have to follow."""
        self.changed.set()
        self._is_to_apply.set()

    # What the watch tells (`Follower`).

    def listed(self, objects: Sequence[Object]) -> None:
        """These pods are there, and no others."""
        found = {pod["metadata"]["labels"][MEMBER_LABEL]: pod for pod in objects if _is_ours(pod, self._wanted)}
        for name in self._pods.keys() - found.keys():
            self._forget(name)
        for pod in found.values():
            self._learn(pod)

    def changed_to(self, pod: Object, *, deleted: bool) -> None:
        """A pod is new or different, or is not there any more."""
        if not _is_ours(pod, self._wanted):
            return
        if deleted:
            self._forget(pod["metadata"]["labels"][MEMBER_LABEL])
        else:
            self._learn(pod)

    def _learn(self, pod: Object) -> None:
        name = pod["metadata"]["labels"][MEMBER_LABEL]
        before = self._member(self._pods[name]) if name in self._pods else None
        self._pods[name] = pod
        self._lost.pop(name, None)
        after = self._member(pod)
        if after is not None and after.state is MemberState.SERVING:
            if name not in self._served:
                self._served.add(name)
                self.context.watcher.ready(name, after.url)
        elif after is not None and after.reason and (before is None or after.reason != before.reason):
            self.context.watcher.line(name, after.reason)
        self._has_changed()

    def _forget(self, name: str) -> None:
        """Its pod is gone."""
        pod = self._pods.pop(name, None)
        if (leaving := self._leaving.pop(name, None)) is not None:
            leaving.set()
        elif pod is not None and (member := self._member(pod)) is not None:
            reason = member.reason if member.state is MemberState.ENDED else "its pod was deleted by somebody else"
            self._lost[name] = replace(member, state=MemberState.ENDED, url="", health_url="", reason=reason)
        self._served.discard(name)
        self._has_changed()

    # What is around the pods.

    @property
    def _service_url(self) -> str:
        return f"http://{self._wanted.name}.{kubernetes_of(self._wanted).namespace}:{HTTP_PORT}"

    def _support(self) -> list[Object]:
        fleet, values = self._wanted, Values()
        staying = (pod for name, pod in self._pods.items() if name not in self._leaving)
        counts = Counter(str(pod["metadata"]["labels"].get(PART_LABEL)) for pod in staying)
        others = [] if self.context.owner else support(fleet, values, self.context.token)
        return [*others, *budgets(fleet, values, counts)]

    async def _apply(self) -> None:
        """What is different from what was applied last. With an owner, it is there already, and is only changed."""
        async with self._applying:
            self._is_to_apply.clear()
            for one in self._support():
                kind, name = one["kind"], one["metadata"]["name"]
                if self._applied.get((kind, name)) == one:
                    continue
                if self.context.owner:
                    await self._api.patch(one["apiVersion"], kind, name, {"spec": one["spec"]})
                else:
                    await self._api.apply(one)
                self._applied[kind, name] = one

    async def _keep_applied(self) -> None:
        """Whenever something else is wanted; again and again until it succeeds."""
        from kvferry.fleet.backends.kubernetes.cluster import ClusterError

        wait_s, longest = _WAITS_S
        while True:
            await self._is_to_apply.wait()
            await asyncio.sleep(_TOGETHER_S)
            try:
                await self._apply()
                wait_s, longest = _WAITS_S
            except ClusterError as error:
                self._is_to_apply.set()
                logger.warning("what the pods need beside them is not up to date: %s", error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, longest)

    @property
    def _api(self) -> Cluster:
        assert self._cluster is not None, "`open` comes first"
        return self._cluster


def _is_ours(pod: Object, fleet: WantedFleet) -> bool:
    """Whether it has the labels that were asked for."""
    labels = pod["metadata"].get("labels") or {}
    return MEMBER_LABEL in labels and all(labels.get(key) == value for key, value in labels_of(fleet).items())
