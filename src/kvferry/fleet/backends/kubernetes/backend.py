"""Members are pods of a cluster: one for an instance or a router, made from what `kvferry fleet render` writes.

Kubernetes places them, starts their container once and keeps their status; everything else is decided by the
controller. What is known of members is the pods themselves, with labels for the fleet, the role and the revision, and
is followed by a watch. A pod that somebody else deletes counts as ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import ceil
from typing import TYPE_CHECKING

from kvferry.core.errors import ConfigError
from kvferry.fleet.backends.kubernetes.errors import ClusterError
from kvferry.fleet.backends.kubernetes.manifests.controller_objects import controller_name, require_plain_pods
from kvferry.fleet.backends.kubernetes.manifests.pod_templates import PART_LABEL, kubernetes_of, labels_of, pod_of
from kvferry.fleet.backends.kubernetes.manifests.render import budgets, check, support
from kvferry.fleet.backends.kubernetes.manifests.values import Values
from kvferry.fleet.backends.kubernetes.pod import (
    REVISION_LABEL,
    Object,
    host_of,
    owner_reference,
    pod_name,
    pods_for,
    selector_of,
)
from kvferry.fleet.backends.kubernetes.pod_cache import PodCache
from kvferry.fleet.control.backend import BackendContext, FleetBackend, Member, MemberSpec, MemberState, NotStarted
from kvferry.fleet.control.fleet_lease import FleetLease
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole

if TYPE_CHECKING:
    from kvferry.fleet.backends.kubernetes.cluster import Cluster

logger = logging.getLogger(__name__)

_POD = ("v1", "Pod")
_CONFLICT, _NOT_FOUND = 409, 404
_MIN_GRACE_S = 1
"""Least grace: 0 would have Kubernetes forget the pod while it may still run."""
_CONFIRMED_S = 15.0
"""How much longer than its grace a pod may take until its node says that it is gone; then it is forgotten: a node that
was lost would never say so."""
_WAITS_S = (0.2, 10.0)
"""Waits before the API server is asked again for what it did not do: the first, which doubles, and the longest."""
_TOGETHER_S = 0.1
"""How long changes of pods are gathered before the budgets beside them follow."""
_AT_ONCE = 32
"""Pods that the API server is asked for at a time."""


class KubernetesBackend(FleetBackend):
    """Owns what the watch has told, and the two tasks that keep the pods followed and what is around them as it is to
    be."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._fleet: DesiredFleet | None = None
        self._cluster: Cluster | None = None
        self._known = PodCache(context.watcher, self._have_changed)
        self._making: dict[str, asyncio.Task[None]] = {}
        """Members whose pods the API server could not make yet."""
        self._starting: dict[str, asyncio.Event] = {}
        """Members that the API server is being asked for for the first time; each is set when it has answered."""
        self._at_once = asyncio.Semaphore(_AT_ONCE)
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
        """The number of routers in `[backend.kubernetes]`."""
        return kubernetes_of(self._wanted).routers

    def use(self, fleet: DesiredFleet) -> None:
        """Use this fleet from now on. Raises `ConfigError`."""
        check(fleet)
        told = kubernetes_of(fleet)
        require_plain_pods(fleet)
        before = self._fleet
        if self._cluster is not None and before is not None and kubernetes_of(before).namespace != told.namespace:
            raise ConfigError(
                "backend.kubernetes.namespace cannot be changed: delete the fleet first, then apply the spec"
            )
        self._fleet = fleet
        self._known.use(fleet)
        self._applied.clear()
        self._is_to_apply.set()

    @property
    def _wanted(self) -> DesiredFleet:
        assert self._fleet is not None, "`use` comes first"
        return self._fleet

    # Its life.

    async def lease(self) -> FleetLease:
        """A Lease of the cluster, with connections of its own, which wait for nothing else."""
        from kvferry.fleet.backends.kubernetes.cluster import Cluster
        from kvferry.fleet.backends.kubernetes.lease import ClusterLease

        told, name = kubernetes_of(self._wanted), controller_name(self._wanted)
        self._lease_api = await Cluster.connect(told.namespace, told.context)
        return ClusterLease(self._lease_api, told.namespace, name, labels_of(self._wanted))

    async def open(self) -> None:
        """Find the pods of an earlier controller, and make what they need beside them. Raises `ConfigError` if the
        cluster refuses it, or does not answer."""
        from kvferry.fleet.backends.kubernetes.cluster import Cluster

        told = kubernetes_of(self._wanted)
        self._cluster = cluster = await Cluster.connect(told.namespace, told.context, lambda: self.is_leader)
        try:
            if self.context.owner:
                owner = await cluster.read("v1", "ConfigMap", self.context.owner)
                self._owner = owner_reference(owner)
            self._known.listing()
            pods, version = await cluster.list_all(*_POD, selector_of(self._wanted))
            self._known.listed(pods)
            self._known.adopt()
            await self._apply()
        except ClusterError as error:
            raise ConfigError(f"backend.kubernetes: {error}") from error
        self._tasks += [
            asyncio.create_task(cluster.follow(*_POD, selector_of(self._wanted), self._known, version)),
            asyncio.create_task(self._keep_applied()),
        ]

    async def close(self) -> None:
        """Leave the pods, unless they are not to outlive this process."""
        if not self.context.outlives:
            await asyncio.gather(*(self.stop(one.name, 0.0) for one in self.members()))
        tasks = [*self._tasks, *self._making.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._cluster is not None:
            await self._cluster.close()
        await self.give_up()
        if self._lease_api is not None:
            await self._lease_api.close()

    async def clear(self) -> None:
        """Delete what `open` has made beside the pods."""
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
                    logger.warning("%s %s could not be deleted, and is left: %s", kind, name, error)
        await super().clear()

    # Members.

    def members(self) -> Sequence[Member]:
        """The members, as the watch has told."""
        return self._known.members()

    async def start(self, member: MemberSpec) -> None:
        """Create the pods. While the API server cannot, they are asked for again: a member has the same names then,
        so that there are never two of it. Raises `NotStarted` if they are refused."""
        name, known = member.name, self._known
        if known.has(name):
            raise NotStarted(f"{name} is there already")
        wanted = Member(name, member.role, member.revision, MemberState.STARTING, member.unit)
        known.being_made[name] = (wanted, "")
        self._starting[name] = asked = asyncio.Event()
        try:
            left = await self._create(wanted, pods_for(self._wanted, member, self._owner))
        except ClusterError as error:
            await self._stop_what_is_there(name, 0.0)
            raise NotStarted(f"no pod is made: {error}") from error
        except BaseException:
            known.give_up(name)
            raise
        else:
            if left:
                self._making[name] = asyncio.create_task(self._create_later(wanted, left))
            self._have_changed()
        finally:
            del self._starting[name]
            asked.set()

    async def _create(self, member: Member, pods: list[Object]) -> list[Object]:
        """Create pods; returns those that could not be made now. Raises `ClusterError` for one that is refused."""
        for number, pod in enumerate(pods):
            try:
                async with self._at_once:
                    self._known.learn(await self._create_one(pod))
            except ClusterError as error:
                if not error.is_passing:
                    raise
                self._known.being_made[member.name] = (member, f"its pod is not made yet: {error}")
                return pods[number:]
        self._known.being_made.pop(member.name, None)
        return []

    async def _create_one(self, pod: Object) -> Object:
        """The pod, which may be there already: an answer that did not arrive may have said so."""
        try:
            return await self._api.create(pod)
        except ClusterError as error:
            if error.status != _CONFLICT:
                raise
        metadata = pod["metadata"]
        there = await self._find(metadata["name"])
        if there is None:
            raise ClusterError(f"the pod {metadata['name']} was there a moment ago, and is gone")
        is_this = (
            self._known.is_ours(there)
            and there["metadata"]["labels"].get(REVISION_LABEL) == metadata["labels"][REVISION_LABEL]
            and not self._known.gone(there).is_set()
        )
        if not is_this:
            raise ClusterError(f"a pod {metadata['name']} is there already, and is not of this start", _CONFLICT)
        return there

    async def _create_later(self, member: Member, left: list[Object]) -> None:
        """Create these pods once the API server can, until the member is to end."""
        wait_s, longest = _WAITS_S
        try:
            while left and self.is_leader:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, longest)
                left = await self._create(member, left)
                self._have_changed()
        except ClusterError as error:
            self._known.cannot_be_made(member.name, f"no pod is made: {error}")
        finally:
            del self._making[member.name]

    async def _find(self, pod: str) -> Object | None:
        """The pod of this name, if there is one. Raises `ClusterError`."""
        try:
            return await self._api.read(*_POD, pod)
        except ClusterError as error:
            if error.status != _NOT_FOUND:
                raise
            return None

    async def stop(self, name: str, grace_s: float) -> None:
        """Delete the pods, and wait until their nodes say that they are gone."""
        if (starting := self._starting.get(name)) is not None:
            await starting.wait()  # what has been asked for may come after it was deleted
        if self._known.has(name):
            await self._stop_what_is_there(name, grace_s)

    async def _stop_what_is_there(self, name: str, grace_s: float) -> None:
        """Delete its pods. The first one answers requests for as long as the others are there: they go after it."""
        known = self._known
        known.leaving.add(name)
        self._is_to_apply.set()
        if (making := self._making.get(name)) is not None:
            making.cancel()
            await asyncio.wait([making])
        if name in known.being_made:
            await self._find_what_was_made(name)
        for pods in _by_turn(known.pods(name).values()):
            is_first = host_of(pods[0])[0] == 0
            await asyncio.gather(*(self._end(name, pod, grace_s if is_first else 0.0) for pod in pods))
        known.give_up(name)

    async def _find_what_was_made(self, name: str) -> None:
        """Look for pods of a member that was still being made: an answer that did not arrive may have said so."""
        wanted, _ = self._known.being_made[name]
        hosts = 1 if wanted.role == "router" else pod_of(self._wanted, wanted.role).hosts
        for pod in {pod_name(self._wanted, name, number) for number in range(hosts)} - self._known.pods(name).keys():
            with suppress(ClusterError):  # the watch will tell
                if (found := await self._find(pod)) is not None:
                    self._known.changed_to(found, deleted=False)

    async def _end(self, member: str, pod: Object, grace_s: float) -> None:
        gone = self._known.gone(pod)
        await self._delete(pod, max(_MIN_GRACE_S, ceil(grace_s)), gone, grace_s + _CONFIRMED_S)
        if not gone.is_set() and self.is_leader:
            logger.warning("a pod of %s is forgotten: its node does not say that it has ended", member)
            await self._delete(pod, 0, gone, _CONFIRMED_S)

    async def _delete(self, pod: Object, grace_s: int, gone: asyncio.Event, within_s: float) -> None:
        """Delete a pod, and wait until it is gone; the API server may be away for a while."""
        (wait_s, longest), name, uid = _WAITS_S, pod["metadata"]["name"], pod["metadata"].get("uid", "")
        is_asked = False
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not gone.is_set() and self.is_leader:
                    try:
                        is_there = await (
                            self._api.has(*_POD, name, uid) if is_asked else self._api.delete(*_POD, name, grace_s, uid)
                        )
                        is_asked = True
                        if not is_there:
                            self._known.forget(pod)
                    except ClusterError as error:
                        logger.warning("the pod %s is not deleted yet: %s", name, error)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await gone.wait()  # which the watch tells
                    wait_s = min(2 * wait_s, longest)

    async def assign(self, name: str, role: MemberRole) -> None:
        """Label the pods with their role. If that fails, it is asked for again when the controller looks again."""
        for pod in [*self._known.pods(name).values()]:
            metadata = pod["metadata"]
            changes = {"metadata": {"uid": metadata.get("uid"), "labels": {PART_LABEL: role}}}
            try:
                self._known.learn(await self._api.patch(*_POD, metadata["name"], changes))
            except ClusterError as error:
                logger.warning("the pod %s is not labelled as %s: %s", metadata["name"], role, error)
        self._have_changed()

    def _have_changed(self) -> None:
        """Note that there are other pods, or they are in another state; their budgets may have to follow."""
        self.changed.set()
        self._is_to_apply.set()

    # What is around the pods.

    def _support(self) -> list[Object]:
        fleet, values = self._wanted, Values()
        others = [] if self.context.owner else support(fleet, values, self.context.token)
        return [*others, *budgets(fleet, values, self._known.counts())]

    async def _apply(self) -> None:
        """Apply what differs from what was applied last. With an owner, it is there already, and is only changed."""
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
        """Apply whenever something else is wanted, again and again until it succeeds."""
        wait_s, longest = _WAITS_S
        while True:
            await self._is_to_apply.wait()
            await asyncio.sleep(_TOGETHER_S)
            try:
                await self._apply()
                wait_s, longest = _WAITS_S
            except ClusterError as error:
                self._is_to_apply.set()
                logger.warning("the objects that the pods need beside them are not up to date yet: %s", error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, longest)

    @property
    def _api(self) -> Cluster:
        assert self._cluster is not None, "`open` comes first"
        return self._cluster


def _by_turn(pods: Iterable[Object]) -> list[list[Object]]:
    """The pods that are ended at the same time, in this order."""
    first, others = list[Object](), list[Object]()
    for pod in pods:
        (others if host_of(pod)[0] else first).append(pod)
    return [one for one in (first, others) if one]
