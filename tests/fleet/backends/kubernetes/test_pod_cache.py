"""What is known of pods does not depend on the order in which it is told, nor on how often."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.backends.kubernetes.test_backend import fleet
from fleet.recording import RecordingDisplay
from kvferry.fleet.backends.kubernetes.pod import pods_for
from kvferry.fleet.backends.kubernetes.pod_cache import PodCache
from kvferry.fleet.control.backend import Member, MemberSpec, MemberState

RUNS = {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [{"started": True, "state": {"running": {}}}]}
ENDED = {"phase": "Failed", "reason": "Evicted"}
WIDE = {"pod": {"decode": {"hosts": 2}}}


def known(**kubernetes: Any) -> PodCache:
    found = PodCache(RecordingDisplay(), lambda: None)
    found.use(fleet(**kubernetes))
    return found


def told(version: int, uid: str = "a", status: dict[str, Any] | None = None, **labels: str) -> dict[str, Any]:
    (pod,) = pods_for(fleet(), MemberSpec("decode-0", "decode", "r"))
    metadata = {**pod["metadata"], "uid": uid, "resourceVersion": str(version)}
    return {**pod, "metadata": {**metadata, "labels": {**metadata["labels"], **labels}}, "status": status or {}}


def only(pods: PodCache) -> Member:
    (member,) = pods.members()
    return member


def test_what_is_told_late_does_not_undo_what_came_after() -> None:
    pods = known()
    for one in (told(1), told(3, status=ENDED), told(2, status=RUNS), told(1), told(3, status=ENDED)):
        pods.changed_to(one, deleted=False)
    assert (only(pods).state, only(pods).reason) == (MemberState.ENDED, "Evicted")


def test_one_that_is_gone_stays_gone() -> None:
    pods = known()
    pods.leaving.add("decode-0")
    gone = pods.gone(told(1))
    pods.learn(told(1))
    assert not gone.is_set()
    pods.changed_to(told(5), deleted=True)
    assert gone.is_set()
    assert pods.gone(told(1)).is_set()
    pods.changed_to(told(4, status=RUNS), deleted=False)
    assert pods.members() == []


def test_the_end_of_one_is_not_that_of_the_next_of_its_name() -> None:
    pods = known()
    pods.learn(told(1, "a"))
    pods.learn(told(7, "b", RUNS))
    for late in (told(5, "a"), told(6, "a", ENDED)):
        pods.changed_to(late, deleted=False)
        pods.changed_to(late, deleted=True)
    assert only(pods).state is MemberState.SERVING


def test_a_list_that_was_asked_for_before_a_pod_was_made_need_not_have_it() -> None:
    pods = known()
    pods.listing()
    pods.learn(told(9))
    pods.listed([])
    assert only(pods).state is MemberState.STARTING
    pods.listing()
    pods.listed([])
    assert only(pods).reason == "its pod was deleted by somebody else"


def test_a_pod_that_somebody_else_deletes_is_leaving_if_it_has_served() -> None:
    pods = known()
    for uid, status, leaves in (("a", {}, False), ("b", RUNS, True)):
        pods.learn(told(1, uid, status))
        going = told(2, uid, status)
        going["metadata"]["deletionTimestamp"] = "2026-11-26T00:00:00Z"
        pods.learn(going)
        assert only(pods).is_leaving == leaves
        pods.changed_to(going, deleted=True)
        assert (only(pods).state, only(pods).is_leaving) == (MemberState.ENDED, leaves)
        pods.give_up("decode-0")
    pods.learn(told(3, "c", RUNS))
    pods.changed_to(told(4, "c", RUNS), deleted=True)  # by force, which nobody has announced
    assert only(pods).is_leaving


@pytest.mark.parametrize(
    "wrong",
    [
        {"kvferry/member": "decode-1"},
        {"app.kubernetes.io/instance": "chit"},
        {"app.kubernetes.io/component": "controller"},
    ],
)
def test_pods_with_labels_that_do_not_go_with_their_name_are_ignored(
    wrong: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    pods = known()
    for deleted in (False, False, True):
        pods.changed_to(told(1, **wrong), deleted=deleted)
    assert pods.members() == []
    assert caplog.text.count("it is left alone") == int("app.kubernetes.io/instance" not in wrong)


def test_an_instance_without_one_of_its_pods_has_ended() -> None:
    wide = fleet(**WIDE, tensor_parallel_size=2)
    pods = PodCache(RecordingDisplay(), lambda: None)
    pods.use(wide)
    both = pods_for(wide, MemberSpec("decode-0", "decode", "r"))
    for number, one in enumerate(both):
        one["metadata"] |= {"uid": str(number), "resourceVersion": str(number)}
        one["status"] = RUNS
    pods.learn(both[0])  # all that an earlier controller could make
    assert only(pods).reason == "not all of its pods are there"
    pods.learn(both[1])
    assert only(pods).state is MemberState.SERVING
    pods.forget(both[1])
    assert (only(pods).state, only(pods).reason) == (MemberState.ENDED, "its pod was deleted by somebody else")
    assert [*pods.pods("decode-0")] == ["chat-decode-0"], "which is still to be deleted"
