"""Starts of members after failures: when the next one may be, and when none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.fleet.control.backoff import SETTLED_S, record_failure, start_backoff
from kvferry.fleet.control.facts import Failure, ObservedInstance, Phase
from kvferry.fleet.spec.fleet_spec import DesiredFleet, fleet_from


def fleet(**failure: object) -> DesiredFleet:
    return fleet_from(
        {"name": "f", "model": "m", "mode": "pooling", "role": {"both": {"count": 1}}, "failure": failure}
    )


def failures(desired: DesiredFleet, *times: float) -> list[Failure]:
    return [Failure(role="decode", revision=desired.revision, at=at, reason=f"at {at:g}") for at in times]


def test_without_failures_there_is_no_wait() -> None:
    assert start_backoff(fleet(), "decode", [], [], 0.0) is None


def test_the_wait_doubles_up_to_its_longest() -> None:
    desired = fleet(backoff=("1s", "5s"), crash_loop=100)
    for number, wait_s in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (90, 5.0)):
        row = failures(desired, *[10.0] * number)
        backoff = start_backoff(desired, "decode", [], row, 10.0 + wait_s - 0.25)
        assert backoff is not None
        assert not backoff.is_permanent
        assert "next start in 0.2 s: at 10" in backoff.reason
        assert start_backoff(desired, "decode", [], row, 10.0 + wait_s) is None


def test_a_crash_loop_is_not_started_again() -> None:
    desired = fleet(crash_loop=3)
    assert start_backoff(desired, "decode", [], failures(desired, 1, 2), 1e6) is None
    backoff = start_backoff(desired, "decode", [], failures(desired, 1, 2, 3), 1e6)
    assert backoff is not None
    assert backoff.is_permanent
    assert backoff.reason == "failed 3 times in a row, and is not started again: at 3"


def test_failures_of_another_role_or_revision_do_not_count() -> None:
    desired = fleet(crash_loop=1)
    row = failures(desired, 1.0)
    assert start_backoff(desired, "prefill", [], row, 1.0) is None
    other = [Failure(role="decode", revision="another", at=1.0, reason="x")]
    assert start_backoff(desired, "decode", [], other, 1.0) is None


def test_only_the_last_failures_are_kept() -> None:
    desired, row = fleet(), list[Failure]()
    other = Failure(role="prefill", revision=desired.revision, at=0.0, reason="x")
    record_failure(row, other, 2)
    for failure in failures(desired, 1, 2, 3):
        record_failure(row, failure, 2)
    assert [failure.at for failure in row] == [0.0, 2, 3]


@pytest.mark.parametrize("served_s", [SETTLED_S - 1, SETTLED_S])
def test_a_member_that_has_served_long_enough_ends_the_row(served_s: float) -> None:
    desired = fleet(crash_loop=1)
    member = ObservedInstance("decode-1", "decode", desired.revision, Phase.READY, since=100.0)
    backoff = start_backoff(desired, "decode", [member], failures(desired, 50.0), 100.0 + served_s)
    assert (backoff is None) == (served_s >= SETTLED_S)
    elsewhere = replace(member, role="prefill")
    assert start_backoff(desired, "decode", [elsewhere], failures(desired, 50.0), 1000.0) is not None
