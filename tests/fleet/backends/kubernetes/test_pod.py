"""Members as pods, and what a pod's status says of a member."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.fleet.backends.kubernetes.manifests.render import support
from kvferry.fleet.backends.kubernetes.manifests.values import Values
from kvferry.fleet.backends.kubernetes.pod import member_of, member_of_pods, pods_for, selector_of
from kvferry.fleet.control.backend import Member, MemberSpec, MemberState
from kvferry.fleet.spec.fleet_spec import DesiredFleet, fleet_from

kubernetes_validate = pytest.importorskip("kubernetes_validate")

POOLING = {"mode": "pooling", "role": {"prefill": {"can_be": ["decode"]}, "decode": {"args": ["--max-num-seqs=4"]}}}
UNITS = {"mode": "replica", "unit": {"members": {"prefill": 1, "decode": 2}}}
IMAGE = "registry.example/kvferry:1"


def fleet(told: dict[str, Any], engine: str = "kvferry", **more: dict[str, Any]) -> DesiredFleet:
    pods = {"prefill": {"limits": {"nvidia.com/gpu": "1", "rdma/hca": "1"}}, **more}
    backend = {"kind": "kubernetes", "kubernetes": {"image": IMAGE, "namespace": "llm", "pod": pods}}
    return fleet_from({"name": "chat", "model": "m", "engine": {"kind": engine}, "backend": backend, **told})


@pytest.mark.parametrize("engine", ["kvferry", "vllm"])
@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
@pytest.mark.parametrize("unit", ["", "unit-3"])
def test_each_pod_is_valid_and_says_whose_it_is(engine: str, role: Any, unit: str) -> None:
    member = MemberSpec(f"{role}-0", role, "abc", "" if role == "router" else unit)
    wanted = fleet(UNITS if unit else POOLING, engine)
    (pod,) = pods_for(wanted, member)
    kubernetes_validate.validate(pod, "1.37", strict=True)
    assert (pod["metadata"]["name"], pod["metadata"]["namespace"]) == (f"chat-{role}-0", "llm")
    assert pod["spec"]["restartPolicy"] == "Never"
    assert seen(pod, {}) == Member(member.name, role, "abc", MemberState.STARTING, unit=member.unit)
    labels = pod["metadata"]["labels"]
    for one in selector_of(wanted).split(","):
        name, _, value = one.partition("=")
        assert labels[name] == value or not value
    assert ("affinity" in pod["spec"]) == bool(member.unit)
    (container,) = pod["spec"]["containers"]
    assert container["image"] == IMAGE
    assert "lifecycle" not in container or role == "router"  # who leaves is drained by the controller
    assert not [one for one in container["env"] if one["name"] == "KVFERRY_REGISTER"]


def pod_for(role: str) -> dict[str, Any]:
    (pod,) = pods_for(fleet(POOLING), MemberSpec(f"{role}-0", role, "r"))  # type: ignore[arg-type]
    return pod


def test_an_instance_that_can_change_its_role_is_started_for_both() -> None:
    told = [pod_for(role)["spec"]["containers"][0] for role in ("prefill", "decode")]
    assert [one["command"][1] for one in told] == ["decode", "decode"]
    assert [[arg for arg in one["args"] if "kv_both" in arg] != [] for one in told] == [True, False]
    assert pod_for("prefill")["metadata"]["labels"]["app.kubernetes.io/component"] == "prefill"


def seen(pod: dict[str, Any], status: dict[str, Any], *, has_served: bool = False) -> Member:
    found = member_of({**pod, "status": status}, "http://chat.llm:8000", has_served=has_served)
    assert found is not None
    return found


def container(state: dict[str, Any], *, started: bool = False) -> list[dict[str, Any]]:
    return [{"name": "kvferry", "started": started, "state": state}]


def ended(code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "message": message, "reason": reason}}
    return {"phase": "Failed", "containerStatuses": container(state)}


TRACEBACK = """Traceback (most recent call last):
  File "/srv/kvferry/engine/model.py", line 3, in load
    raise ValueError("no such layer")
ValueError: no such layer
"""


@pytest.mark.parametrize(
    ("status", "has_served", "state", "reason"),
    [
        ({}, False, "starting", ""),
        (
            {"phase": "Pending", "containerStatuses": container({"waiting": {"reason": "ContainerCreating"}})},
            False,
            "starting",
            "",
        ),
        (
            {
                "phase": "Pending",
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
                ],
            },
            False,
            "starting",
            "Unschedulable: 0/3 nodes",
        ),
        (
            {
                "phase": "Pending",
                "containerStatuses": container({"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}),
            },
            False,
            "starting",
            "ImagePullBackOff: no such image",
        ),
        (
            {"phase": "Pending", "containerStatuses": container({"waiting": {"reason": "InvalidImageName"}})},
            False,
            "ended",
            "InvalidImageName",
        ),
        (
            {"phase": "Running", "containerStatuses": container({"running": {}}), "podIP": "10.0.0.1"},
            False,
            "starting",
            "",
        ),
        ({"phase": "Running", "containerStatuses": container({"running": {}}, started=True)}, False, "starting", ""),
        (ended(7), False, "ended", "ended with exit code 7 while starting"),
        (ended(7), True, "ended", "ended with exit code 7"),
        (
            ended(1, TRACEBACK),
            False,
            "ended",
            "ended with exit code 1 while starting: ValueError: no such layer",
        ),
        (ended(137, reason="OOMKilled"), True, "ended", "ended (OOMKilled, 137)"),
        (ended(2, "kvferry: error: no such model\n"), False, "ended", "no such model"),
        (ended(2, "usage"), False, "ended", "ended with exit code 2 while starting"),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, True, "ended", "Evicted: low on memory"),
        ({"phase": "Succeeded"}, True, "ended", "ended"),
    ],
)
def test_what_a_status_says(status: dict[str, Any], has_served: bool, state: str, reason: str) -> None:
    pod = pod_for("decode")
    found = seen(pod, status, has_served=has_served)
    assert (found.state.value, found.reason, found.url) == (state, reason, "")
    assert found.is_misconfigured == (reason in ("InvalidImageName", "no such model"))


@pytest.mark.parametrize(
    ("address", "url"), [("10.0.0.1", "http://10.0.0.1:8000"), ("fd00::1", "http://[fd00::1]:8000")]
)
def test_where_a_member_is_reached(address: str, url: str) -> None:
    """Clients reach routers by their Service; the controller asks each of them."""
    status = {"phase": "Running", "podIP": address, "containerStatuses": container({"running": {}}, started=True)}
    instance = seen(pod_for("decode"), status)
    assert (instance.state, instance.url, instance.health_url) == (MemberState.SERVING, url, "")
    router = seen(pod_for("router"), status)
    assert (router.state, router.url, router.health_url) == (MemberState.SERVING, "http://chat.llm:8000", url)


def test_the_pods_of_one_instance_find_its_first() -> None:
    wide = {"mode": "pooling", "role": {"prefill": {}, "decode": {"tensor_parallel_size": 4}}}
    wanted = fleet(wide, "vllm", decode={"hosts": 2})
    first, second = pods_for(wanted, MemberSpec("decode-0", "decode", "r"))
    for one in (first, second):
        kubernetes_validate.validate(one, "1.37", strict=True)
    assert [one["metadata"]["name"] for one in (first, second)] == ["chat-decode-0", "chat-decode-0-host-1"]
    assert {"--nnodes=2", "--node-rank=0", "--master-addr=decode-0.chat-ranks"} <= {*arguments(first)}
    assert {"--headless", "--node-rank=1", "--master-addr=decode-0.chat-ranks"} <= {*arguments(second)}
    assert (first["spec"]["hostname"], first["spec"]["subdomain"]) == ("decode-0", "chat-ranks")
    assert "hostname" not in second["spec"]
    services = [one["metadata"]["name"] for one in support(wanted, Values()) if one["kind"] == "Service"]
    assert services == ["chat", "chat-ranks"]


def arguments(pod: dict[str, Any]) -> list[str]:
    (one,) = pod["spec"]["containers"]
    return [*one["command"], *one.get("args", [])]


RUNS = {"phase": "Running", "containerStatuses": container({"running": {}}, started=True), "podIP": "10.0.0.1"}
LOADS = {"phase": "Running", "containerStatuses": container({"running": {}}), "podIP": "10.0.0.1"}
NO_ROOM = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3"}]}


@pytest.mark.parametrize(
    ("first", "second", "state", "reason"),
    [
        (RUNS, RUNS, "serving", ""),
        (LOADS, RUNS, "starting", ""),
        (LOADS, NO_ROOM, "starting", "its pod 1: Unschedulable: 0/3"),
        (NO_ROOM, NO_ROOM, "starting", "Unschedulable: 0/3"),
        (RUNS, ended(7), "ended", "its pod 1: ended with exit code 7"),
        (ended(8), ended(7), "ended", "ended with exit code 8"),
        (RUNS, {"phase": "Failed", "reason": "Evicted"}, "ended", "its pod 1: Evicted"),
    ],
)
def test_an_instance_is_all_of_its_pods(first: dict[str, Any], second: dict[str, Any], state: str, reason: str) -> None:
    wide = {"mode": "pooling", "role": {"prefill": {}, "decode": {"tensor_parallel_size": 4}}}
    pods = pods_for(fleet(wide, "vllm", decode={"hosts": 2}), MemberSpec("decode-0", "decode", "r"))
    told = [{**pod, "status": status} for pod, status in zip(pods, (first, second), strict=True)]
    for order in (told, told[::-1]):
        found = member_of_pods(order, "http://chat.llm:8000", has_served=True)
        assert found is not None
        assert (found.state.value, found.reason, bool(found.url)) == (state, reason, state == "serving")


def test_other_pods_are_no_members() -> None:
    assert member_of({"metadata": {"name": "chat-decode-xyz"}}, "") is None
