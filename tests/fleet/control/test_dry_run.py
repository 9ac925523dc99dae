"""The steps of a change before it is made."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.errors import ConfigError
from kvferry.fleet.control.dry_run import dry_run_steps, explain_blocked_roll
from kvferry.fleet.control.facts import Drain, ObservedInstance, Phase, Start, StopMember
from kvferry.fleet.spec.fleet_spec import DesiredFleet, fleet_from


def fleet(count: int, **roll: Any) -> DesiredFleet:
    return fleet_from({"name": "f", "model": "m", "mode": "pooling", "role": {"both": {"count": count}}, "roll": roll})


def member(number: int, desired: DesiredFleet, phase: Phase = Phase.READY, revision: str = "") -> ObservedInstance:
    return ObservedInstance(f"both-{number}", "both", revision or desired.revision, phase, 0.0)


def test_nothing_is_to_be_done_in_the_desired_state() -> None:
    desired = fleet(2)
    assert dry_run_steps(desired, [member(0, desired), member(1, desired, Phase.STARTING)]) == []


def test_missing_members_are_started_and_others_leave() -> None:
    desired = fleet(2)
    starts = dry_run_steps(desired, [])
    assert [type(step) for step in starts] == [Start, Start]
    steps = dry_run_steps(desired, [member(number, desired) for number in range(3)])
    assert len(steps) == 1
    assert isinstance(steps[0], Drain | StopMember)


def test_a_failed_member_counts_as_gone() -> None:
    desired = fleet(1)
    assert [type(step) for step in dry_run_steps(desired, [member(0, desired, Phase.FAILED)])] == [Start]


def test_a_roll_replaces_all_even_while_it_is_paused() -> None:
    desired = fleet(2, pause=True)
    steps = dry_run_steps(desired, [member(number, desired, revision="old") for number in range(2)])
    assert sum(isinstance(step, Start) for step in steps) == 2
    assert sum(isinstance(step, Drain | StopMember) for step in steps) == 2


def test_what_can_never_be_replaced_is_named() -> None:
    text = explain_blocked_roll(fleet(2), ["a", "b", "c", "d"])
    assert text.startswith("a, b, c and others could never be replaced")
    assert "roll.surge = " in text
    with pytest.raises(ConfigError, match="could never be replaced"):
        raise ConfigError(explain_blocked_roll(fleet(2), ["a"]))
