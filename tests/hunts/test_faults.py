"""Each kind of fault happens, and what it breaks comes back."""

from dataclasses import replace

import pytest

from hunts.faults import GENTLE, KINDS, Fault, Kind
from hunts.scenario import Report, Scenario, draw, run

HAPPENS: dict[Kind, str] = {
    "crash": "decode0 ends",
    "power": "decode0 ends",
    "stall": "decode0 stands still",
    "crash router": "router1 ends",
    "stall router": "router1 stands still",
    "cut": "are partitioned",
    "reset": "a connection of",
    "lose": "is forgotten",
    "late": "s late",
    "clock": "the clock of decode0 jumps",
    "stop": "decode0 has stopped",
    "drain": "router1 sends decode0 nothing new",
    "roll": "decode0 is to stop",
    "role": "router1 has decode0 as prefill",
}


def _scenario(*faults: Fault) -> Scenario:
    """Two routers, two instances of each role; the faults meet the first that decodes, and the second router."""
    scenario = draw(9, with_faults=False)
    instance = replace(scenario.world.instance, takes_any_role=True, kv_load_failure_policy="recompute")
    world = replace(scenario.world, num_prefill=2, num_decode=2, num_routers=2, instance=instance)
    return replace(scenario, world=world, faults=list(faults))


def _run(kind: Kind, seconds: float = 0.6) -> Report:
    return run(_scenario(Fault(0.05, kind, 0.6, 0.8, seconds)), keep_log=True)


@pytest.mark.parametrize("kind", KINDS)
def test_it_happens_and_is_over(kind: Kind) -> None:
    report = _run(kind)
    assert not report.violations
    assert any(HAPPENS[kind] in event for event in report.last_events)


@pytest.mark.parametrize("kind", GENTLE)
def test_operators_and_clocks_lose_no_request(kind: Kind) -> None:
    scenario = _scenario(Fault(0.05, kind, 0.6, 0.8, 0.3))
    assert scenario.must_answer_all
    assert set(run(scenario).outcomes) <= {"complete", "left"}


def test_clients_of_a_router_that_ends_are_told_nothing_and_others_are_answered() -> None:
    report = _run("crash router", 0.4)
    assert report.outcomes["broken"] > 0
    assert report.outcomes["complete"] > 0
