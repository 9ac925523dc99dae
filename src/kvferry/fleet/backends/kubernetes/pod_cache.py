"""What is known of a fleet's pods: what the API server has told, in whatever order and however often it did.

A pod is known by its name and uid. One that is gone stays gone, whatever is told of it later; of two accounts of one,
that of the newer version holds. Pods that are not the fleet's are ignored.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvferry.fleet.backends.kubernetes.manifests.pod_templates import HTTP_PORT, PART_LABEL, kubernetes_of, labels_of
from kvferry.fleet.backends.kubernetes.pod import DELETED, MEMBER_LABEL, Object, host_of, member_of_pods, pod_name
from kvferry.fleet.control.backend import Member, MemberState, Watcher
from kvferry.fleet.spec.fleet_spec import DesiredFleet

logger = logging.getLogger(__name__)

_ROLES = ("prefill", "decode", "both", "router")
_MAX_GONE = 2**16
"""Uids that are remembered of pods that are gone; what is told late is told within seconds."""
_MAX_STRANGERS = 1000
"""Pods of others that are named in the log."""
_INCOMPLETE = "not all of its pods are there"


class PodCache:
    """Owns what is known. `changed`: called whenever `members` would answer something else. `being_made`: of members,
    some of whose pods are not there yet, why that is; the backend writes it."""

    def __init__(self, watcher: Watcher, changed: Callable[[], None]) -> None:
        self._watcher, self._changed = watcher, changed
        self._fleet: DesiredFleet | None = None
        self._pods: dict[str, dict[str, Object]] = {}
        """The pods of each member, by the pods' names."""
        self.being_made: dict[str, tuple[Member, str]] = {}
        self.leaving: set[str] = set()
        """Members that are to end: that their pods go is no failure."""
        self._served: set[str] = set()
        """Members that serve, or did."""
        self._lost: dict[str, Member] = {}
        """Members of which a pod was deleted by somebody else."""
        self._gone: set[str] = set()
        self._gone_first: deque[str] = deque()
        self._waiting: dict[str, asyncio.Event] = {}
        """What waits for pods to be gone, by the pods' uids."""
        self._learnt: set[str] = set()
        """Names of pods that were told of since a list was asked for, which may not have them."""
        self._strangers: set[str] = set()

    def use(self, fleet: DesiredFleet) -> None:
        """Set the fleet whose pods they are."""
        self._fleet = fleet

    # What is known.

    def members(self) -> list[Member]:
        """All members of which a pod is there, or was and nobody has stopped them, or is to be made."""
        found = (self._member(name) for name in dict.fromkeys((*self._pods, *self.being_made, *self._lost)))
        return [one for one in found if one is not None]

    def has(self, member: str) -> bool:
        """Whether this is one of `members`."""
        return member in self._pods or member in self._lost or member in self.being_made

    def pods(self, member: str) -> Mapping[str, Object]:
        """The pods of a member that are there, by their names."""
        return self._pods.get(member, {})

    def counts(self) -> Counter[str]:
        """How many pods of each role are there whose members are to stay."""
        staying = (pods for member, pods in self._pods.items() if member not in self.leaving)
        return Counter(str(pod["metadata"]["labels"][PART_LABEL]) for pods in staying for pod in pods.values())

    def gone(self, pod: Object) -> asyncio.Event:
        """Set once this pod is gone."""
        uid, event = _names(pod)[2], asyncio.Event()
        if uid in self._gone:
            event.set()
            return event
        return self._waiting.setdefault(uid, event)

    def _member(self, name: str) -> Member | None:
        if name in self._lost:
            return self._lost[name]
        pods = list(self.pods(name).values())
        member = member_of_pods(pods, self._service_url, has_served=name in self._served)
        if name in self.being_made:
            wanted, why = self.being_made[name]
            member = member or wanted
            return replace(member, reason=member.reason or why) if member.state is MemberState.STARTING else member
        if member is not None and member.state is not MemberState.ENDED and len(pods) < host_of(pods[0])[1]:
            return replace(member, state=MemberState.ENDED, url="", health_url="", reason=_INCOMPLETE)
        return member

    @property
    def _wanted(self) -> DesiredFleet:
        assert self._fleet is not None, "`use` comes first"
        return self._fleet

    @property
    def _service_url(self) -> str:
        return f"http://{self._wanted.name}.{kubernetes_of(self._wanted).namespace}:{HTTP_PORT}"

    # What is told (`Follower`).

    def listing(self) -> None:
        """Note that a list is asked for."""
        self._learnt.clear()

    def listed(self, objects: Sequence[Object]) -> None:
        """Note that these pods were there, and no others."""
        found = [pod for pod in objects if self.is_ours(pod)]
        there = {pod["metadata"]["name"] for pod in found} | self._learnt
        for pod in [pod for pods in self._pods.values() for pod in pods.values()]:
            if pod["metadata"]["name"] not in there:
                self.forget(pod)
        for pod in found:
            self.learn(pod)

    def changed_to(self, pod: Object, *, deleted: bool) -> None:
        """Note that a pod is new or different, or is not there any more."""
        if not self.is_ours(pod):
            return
        if deleted:
            self.forget(pod)
        else:
            self.learn(pod)

    def learn(self, pod: Object) -> None:
        """Note that a pod is there, and is so."""
        member, name, uid = _names(pod)
        known = self.pods(member).get(name)
        if uid in self._gone or (known is not None and _is_older(pod, known)):
            return
        if known is not None and _names(known)[2] != uid:
            self._remember_gone(_names(known)[2])
        before = self._member(member)
        self._pods.setdefault(member, {})[name] = pod
        self._learnt.add(name)
        after = self._member(member)
        if after is not None and after.state is MemberState.SERVING:
            if member not in self._served:
                self._served.add(member)
                self._watcher.ready(member, after.url)
        elif after is not None and after.reason and (before is None or after.reason != before.reason):
            self._watcher.line(member, after.reason)
        self._changed()

    def forget(self, pod: Object) -> None:
        """Note that this pod is gone; another one of its name is not."""
        member, name, uid = _names(pod)
        self._remember_gone(uid)
        known = self.pods(member).get(name)
        if known is None or _names(known)[2] != uid:
            return
        last = self._member(member)
        del self._pods[member][name]
        self._learnt.discard(name)
        if not self._pods[member]:
            del self._pods[member]
        if last is not None and member not in self.leaving and member not in self._lost:
            if last.state is not MemberState.ENDED:
                last = replace(last, state=MemberState.ENDED, is_leaving=member in self._served, reason=DELETED)
            self._lost[member] = replace(last, url="", health_url="")
        if member not in self._pods:
            self._served.discard(member)
            self.leaving.discard(member)
        self._changed()

    def cannot_be_made(self, member: str, why: str) -> None:
        """Note that the API server has refused it."""
        wanted, _ = self.being_made.pop(member)
        self._lost[member] = replace(wanted, state=MemberState.ENDED, reason=why)
        self._changed()

    def give_up(self, member: str) -> None:
        """Note that it was stopped, and is a member no more once its pods are gone."""
        self._lost.pop(member, None)
        self.being_made.pop(member, None)
        if member not in self._pods:
            self.leaving.discard(member)
        self._changed()

    def adopt(self) -> None:
        """End the members that an earlier controller wanted to end."""
        for member, pods in self._pods.items():
            if any("deletionTimestamp" in pod["metadata"] for pod in pods.values()):
                self.leaving.add(member)

    def _remember_gone(self, uid: str) -> None:
        if (waiting := self._waiting.pop(uid, None)) is not None:
            waiting.set()
        if uid in self._gone:
            return
        self._gone.add(uid)
        self._gone_first.append(uid)
        if len(self._gone_first) > _MAX_GONE:
            self._gone.discard(self._gone_first.popleft())

    def is_ours(self, pod: Object) -> bool:
        """Whether a backend has made it for this fleet: it has the labels that were asked for, and the name that goes
        with them."""
        labels = pod["metadata"].get("labels") or {}
        if any(labels.get(key) != value for key, value in labels_of(self._wanted).items()):
            return False
        member, name = labels.get(MEMBER_LABEL), pod["metadata"].get("name", "")
        if member is None:
            return False
        if labels.get(PART_LABEL) in _ROLES and name == pod_name(self._wanted, member, host_of(pod)[0]):
            return True
        if name not in self._strangers and len(self._strangers) < _MAX_STRANGERS:
            self._strangers.add(name)
            logger.warning("the pod %s has labels of this fleet's, and is none of its pods; it is left alone", name)
        return False


def _names(pod: Object) -> tuple[str, str, str]:
    """The name of its member, its own name, and its uid."""
    metadata = pod["metadata"]
    return metadata["labels"][MEMBER_LABEL], metadata["name"], metadata.get("uid", "")


def _is_older(pod: Object, known: Object) -> bool:
    """Whether this is an earlier version than that one. Versions of objects of one kind grow, as Kubernetes promises
    since 1.35."""
    versions = [str(one["metadata"].get("resourceVersion", "")) for one in (pod, known)]
    return all(map(str.isdecimal, versions)) and int(versions[0]) < int(versions[1])
