"""Members as pods, and what a pod's status says of a member. Pure: a spec in, an object out, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from kvferry.fleet.backends.kubernetes.manifests.pod_templates import (
    HTTP_PORT,
    PART_LABEL,
    InstancePod,
    Pods,
    kubernetes_of,
    labels_of,
    pod_of,
    ranks_service,
)
from kvferry.fleet.backends.kubernetes.manifests.values import Values
from kvferry.fleet.control.backend import Member, MemberSpec, MemberState
from kvferry.fleet.processes.exit_reason import Ended, LogTail
from kvferry.fleet.spec.fleet_spec import DesiredFleet
from kvferry.http.server.listen import authority

Object = dict[str, Any]

MEMBER_LABEL, REVISION_LABEL, UNIT_ANNOTATION = "kvferry/member", "kvferry/revision", "kvferry/unit"
HOST_ANNOTATION, HOSTS_ANNOTATION = "kvferry/host", "kvferry/hosts"
_NEVER = ("InvalidImageName", "CreateContainerConfigError", "ErrImageNeverPull")
"""Why a container waits for what will not come."""
DELETED = "its pod was deleted by somebody else"
_ROUTINE = ("ContainerCreating", "PodInitializing")


def selector_of(fleet: DesiredFleet) -> str:
    """Selects the pods that a backend has made for a fleet; not those that `kvferry fleet render` describes."""
    return ",".join((*(f"{key}={value}" for key, value in labels_of(fleet).items()), MEMBER_LABEL))


def pod_name(fleet: DesiredFleet, member: str, number: int = 0) -> str:
    """The name of a member's pod: of its first, or of a further one."""
    return f"{fleet.name}-{member}" + (f"-host-{number}" if number else "")


def owner_reference(owner: Object) -> Object:
    """How a pod refers to the object that it belongs to, and is deleted with."""
    metadata = owner["metadata"]
    return {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": metadata["name"], "uid": metadata["uid"]}


def pods_for(fleet: DesiredFleet, member: MemberSpec, owner: Object | None = None) -> list[Object]:
    """The pods of a member, that of its first rank first. What runs in them is what `kvferry fleet render` writes;
    whether they are started again is for the controller to say, and so is who is told of them. `owner`: refers to what
    they belong to."""
    if member.role == "router":
        return [_pod(fleet, member, Pods(fleet, Values()).router(unit=None), 0, 1, owner)]
    hosts = pod_of(fleet, member.role).hosts
    return [_pod(fleet, member, _template(fleet, member, number), number, hosts, owner) for number in range(hosts)]


def _template(fleet: DesiredFleet, member: MemberSpec, number: int) -> Object:
    assert member.role != "router"
    can_be = fleet.role[member.role].can_be if member.role in fleet.role else ()
    return Pods(fleet, Values()).instance(
        member.role,
        (),
        unit=_number(member.unit),
        group="",
        host=InstancePod(str(number), f"{member.name}.{ranks_service(fleet)}"),
        started_as="both" if can_be else None,
    )


def _pod(
    fleet: DesiredFleet, member: MemberSpec, template: Object, number: int, hosts: int, owner: Object | None
) -> Object:
    spec = {**template["spec"], "restartPolicy": "Never"}
    if hosts > 1 and not number:
        spec |= {"hostname": member.name, "subdomain": ranks_service(fleet)}
    (container,) = spec["containers"]
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"  # so that its status has its last words
    labels = {**template["metadata"]["labels"], MEMBER_LABEL: member.name, REVISION_LABEL: member.revision}
    metadata = {
        "name": pod_name(fleet, member.name, number),
        "namespace": kubernetes_of(fleet).namespace,
        "labels": labels,
        "annotations": {UNIT_ANNOTATION: member.unit, HOST_ANNOTATION: str(number), HOSTS_ANNOTATION: str(hosts)},
        **({} if owner is None else {"ownerReferences": [owner]}),
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def host_of(pod: Object) -> tuple[int, int]:
    """Which of its member's pods it is, and how many there are to be."""
    told = pod["metadata"].get("annotations") or {}
    number, hosts = told.get(HOST_ANNOTATION, "0"), told.get(HOSTS_ANNOTATION, "1")
    return (int(number), int(hosts)) if number.isdecimal() and hosts.isdecimal() else (0, 1)


def member_of_pods(pods: Sequence[Object], service_url: str, *, has_served: bool = False) -> Member | None:
    """The member that these pods are: it serves when its first one does, and has ended when any of them has. None for
    pods that are none. `service_url`, `has_served`: as for `member_of`."""
    member = None
    for number, pod in sorted(((host_of(pod)[0], pod) for pod in pods), key=itemgetter(0)):
        one = member_of(pod, service_url, has_served=has_served)
        if member is None or one is None or member.state is MemberState.ENDED:
            member = member or one
            continue
        reason = f"its pod {number}: {one.reason}" if one.reason else ""
        if one.state is MemberState.ENDED:
            return replace(one, reason=reason)
        if one.is_leaving and not member.is_leaving:
            member = replace(member, is_leaving=True, reason=reason)
        if member.state is MemberState.STARTING and not member.reason:
            member = replace(member, reason=reason)
    return member


def member_of(pod: Object, service_url: str, *, has_served: bool = False) -> Member | None:
    """The member that a pod is, as its status says; None for a pod that is none. `service_url`: where clients reach
    the routers. `has_served`: it did before, which its status does not say once it has ended."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels = metadata.get("labels") or {}
    name, role = labels.get(MEMBER_LABEL, ""), labels.get(PART_LABEL)
    if not name or role is None:
        return None
    statuses = status.get("containerStatuses") or [{}]
    container: Object = statuses[0]
    state, url = MemberState.STARTING, ""
    reason, wrong = _waits(status, container), False
    last: tuple[str, ...] = ()
    terminated = (container.get("state") or {}).get("terminated")
    if terminated is not None or status.get("phase") in ("Failed", "Succeeded"):
        state = MemberState.ENDED
        ended, last = _end(status, terminated or {}, has_served=has_served)
        reason, wrong = ended.reason, ended.is_misconfigured
    elif _waiting(container).get("reason") in _NEVER:
        state, wrong = MemberState.ENDED, True
    elif container.get("started") and status.get("podIP"):
        state, url, reason = MemberState.SERVING, f"http://{authority(status['podIP'], HTTP_PORT)}", ""
    is_leaving = "deletionTimestamp" in metadata and (has_served or state is MemberState.SERVING)
    is_router = role == "router"
    return Member(
        name=name,
        role=role,
        revision=labels.get(REVISION_LABEL, ""),
        state=state,
        unit=(metadata.get("annotations") or {}).get(UNIT_ANNOTATION, ""),
        url=service_url if is_router and url else url,
        health_url=url if is_router else "",
        reason=reason or (DELETED if is_leaving else ""),
        is_misconfigured=wrong,
        is_leaving=is_leaving,
        last_lines=last,
    )


def _number(unit: str) -> int | None:
    return int(unit.rpartition("-")[2]) if unit else None


def _waiting(container: Object) -> Object:
    return (container.get("state") or {}).get("waiting") or {}


def _waits(status: Object, container: Object) -> str:
    """What a pod that does not serve waits for, if that is not the usual."""
    waiting = _waiting(container)
    if waiting.get("reason") and waiting["reason"] not in _ROUTINE:
        return ": ".join(filter(None, (waiting["reason"], waiting.get("message"))))
    for one in status.get("conditions") or ():
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return ": ".join(filter(None, (one.get("reason"), one.get("message"))))
    return ""


def _end(status: Object, terminated: Object, *, has_served: bool) -> tuple[Ended, tuple[str, ...]]:
    """How it has ended, and its last lines."""
    words = LogTail()
    for line in (terminated.get("message") or "").splitlines():
        words.add(line, has_served=has_served)
    code, cause = terminated.get("exitCode"), terminated.get("reason")
    if code is None:
        ended = Ended(": ".join(filter(None, (status.get("reason") or "ended", status.get("message")))))
    else:
        how = f"ended with exit code {code}" if cause in (None, "Error", "Completed") else f"ended ({cause}, {code})"
        ended = words.explain(code, how, has_served=has_served)
    return ended, tuple(words.lines)
