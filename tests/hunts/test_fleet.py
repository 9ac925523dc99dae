"""Fleets whose real controller runs in the simulation."""

from dataclasses import replace

import pytest
from msgspec import structs

from hunts import __main__ as command
from hunts.faults import OUTSIDE, Fault, Kind
from hunts.fleet_scenario import KINDS, Change, ChangeKind, FleetScenario, draw_fleet, run_fleet
from hunts.hunt import shrink
from hunts.scenario import draw
from kvferry.fleet.control import controller
from kvferry.fleet.control.backend import Member, MemberState
from kvferry.fleet.control.facts import Phase
from kvferry.fleet.control.loop import plan
from kvferry.fleet.control.observer import Observer
from kvferry.fleet.control.router_client import RouterInstanceView
from kvferry.fleet.spec.fleet_spec import DesiredFleet
from kvferry.sim.world import RequestSpec
from support.planted import Plant

SEEDS = (1, 2, *[seed for seed in range(3, 30) if draw_fleet(seed).scale is not None][:3])


def _scenario(*changes: Change, seed: int = 1) -> FleetScenario:
    plain = draw(seed, with_faults=False)
    instance = replace(plain.world.instance, kv_load_failure_policy="recompute")
    return FleetScenario(seed, replace(plain.world, instance=instance), (2, 2, 1), plain.requests, list(changes))


@pytest.mark.parametrize("seed", SEEDS)
def test_all_holds_whatever_happens_to_a_fleet(seed: int) -> None:
    report = run_fleet(draw_fleet(seed))
    assert not report.violations, "\n".join(f"{one.name}: {one.what}" for one in report.violations)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fleet_becomes_what_is_wanted(kind: ChangeKind) -> None:
    report = run_fleet(_scenario(Change(0.1, kind, 0.7, 0.2, 0.5)), keep_log=True)
    assert not report.violations
    happens = {
        "scale": "prefill-2 is started",
        "swap": "another fleet is applied",
        "roll": "decode-2 is started",
        "kill": "decode-0 ends",
        "controller": "controller1 ends",
        "stand": "controller1 stands still",
    }
    assert any(happens[kind] in event for event in report.last_events)


def test_a_roll_during_which_the_controller_dies_loses_no_request() -> None:
    scenario = _scenario(Change(0.1, "roll", 0.0, 0.0, 0.0), Change(0.9, "controller", 0.0, 0.0, 1.0))
    assert scenario.must_answer_all
    report = run_fleet(scenario)
    assert not report.violations
    assert set(report.outcomes) <= {"complete", "left"}


def test_a_controller_that_stands_still_loses_no_request_where_there_are_instances() -> None:
    scenario = _scenario(Change(0.1, "roll", 0.0, 0.0, 0.0), Change(0.9, "stand", 0.0, 0.0, 9.0))
    report = run_fleet(scenario)
    assert not report.violations
    assert set(report.outcomes) <= {"complete", "left"}


def test_requests_for_which_no_instance_is_started_end_with_a_reason() -> None:
    """`idle` has stopped all instances, and the controller stands still for 200 s: a request waits for three starts and
    a minute."""
    scale = {"ttft": "1s", "itl": "1s", "interval": "500ms", "cool_down": "1s", "hold": "2s", "idle": "2s"}
    scenario = replace(
        _scenario(Change(8.0, "stand", 0.0, 0.0, 22.75)),
        scale=scale | {"starts": "500ms"},
        requests=[RequestSpec(at_s, [1] * 20, 4, 1) for at_s in (0.0, 20.0, 30.0, 220.0)],
    )
    report = run_fleet(scenario)
    assert not report.violations  # one is an answer without all of its tokens and without a reason
    assert report.outcomes == {"complete": 2, "broken": 2}
    assert report.virtual_s > 200


def test_the_same_seed_gives_the_same_events() -> None:
    one, other = (run_fleet(draw_fleet(3)) for _ in range(2))
    assert (one.digest, one.num_events) == (other.digest, other.num_events)


def test_a_member_that_is_dead_and_taken_for_ready(plant: Plant) -> None:
    _take_the_dead_for_ready(plant)
    report = run_fleet(_scenario(Change(0.1, "kill", 0.7, 0.2, 0.5)))
    assert "instances come back" in {one.name for one in report.violations}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_fleet_outlives_what_happens_around_it(kind: Kind) -> None:
    scenario = replace(_scenario(Change(0.2, "swap", 0.0, 0.0, 0.0)), faults=[Fault(0.3, kind, 0.4, 0.9, 1.5)])
    report = run_fleet(scenario)
    assert not report.violations


def _take_the_dead_for_ready(plant: Plant) -> None:
    phase = Observer._phase

    def take_for_ready(self: Observer, member: Member, view: RouterInstanceView | None) -> Phase:
        return Phase.READY if member.state is MemberState.ENDED else phase(self, member, view)

    plant(Observer, "_phase", take_for_ready)


def test_a_role_that_has_more_members_than_it_may(plant: Plant) -> None:
    scale = {"ttft": "1s", "itl": "1s", "cool_down": "1m"}
    scenario = replace(_scenario(Change(0.1, "roll", 0.0, 0.0, 0.0)), scale=scale, max_instances=2)
    assert not run_fleet(scenario).violations
    plant(controller, "plan", lambda fleet, *rest: plan(_without_max(fleet), *rest))
    assert {one.name for one in run_fleet(scenario).violations} == {"a fleet stays within its bounds"}


def _without_max(fleet: DesiredFleet) -> DesiredFleet:
    return structs.replace(fleet, role={name: structs.replace(one, max=None) for name, one in fleet.role.items()})


def test_a_fleet_that_fails_is_shrunk(plant: Plant) -> None:
    _take_the_dead_for_ready(plant)
    whole = _scenario(Change(0.1, "kill", 0.7, 0.2, 0.5), Change(0.2, "controller", 0.0, 0.0, 0.5))
    found = shrink(replace(whole, requests=whole.requests[:2]), max_runs=10)
    assert found is not None
    assert (found.requests, found.faults) == ([], [0])
    assert found.command() == "python -m hunts 1 --fleet --requests none --faults 0 --log"


def test_a_part_of_a_fleet_s_scenario_runs_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["3", "--fleet", "--requests", "0", "--faults", "none"]) == 0
    assert "1 seeds, 0 failed" in capsys.readouterr().out
