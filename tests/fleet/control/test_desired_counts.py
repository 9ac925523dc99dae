"""A controller whose fleet follows what is asked for, with members and routers in memory."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fleet.control.test_controller import DECODE, PREFILL, Controlled, pooling, ticks
from fleet.scaling.exact import observed, poisson
from kvferry.core.clock import SystemClock
from kvferry.core.errors import ConfigError
from kvferry.core.messages.traffic import TrafficReport
from kvferry.fleet.control.controller import Detached
from kvferry.fleet.control.desired_counts import rules_of
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.scaling.predictor import Topology
from kvferry.fleet.scaling.traffic import PhaseTimes
from kvferry.fleet.spec.fleet_spec import DesiredFleet, fleet_from

SCALE = {
    "ttft": "1500ms",
    "itl": "45ms",
    "attainment": 0.95,
    "interval": "300ms",
    "warm": "0s",
    "cool_down": "1s",
}


def scaled(prefill: int = 1, decode: int = 1, *, can_be: bool = False, least: int = 1, **more: Any) -> DesiredFleet:
    role: dict[str, Any] = {
        "prefill": {"count": prefill, "min": least, "max": 6, "can_be": ["decode"] if can_be else []},
        "decode": {"count": decode, "min": least, "max": 6, "can_be": ["prefill"] if can_be else []},
    }
    return pooling(role=role, scale={**SCALE, **more})


class Traffic:
    """Requests of a fleet on which prefill takes 20 ms and 0.1 ms a token, and steps 20 ms and 0.5 ms a sequence; for a
    hundred seconds already, and as long as it is asked."""

    def __init__(self, rate: float, late_share: float = 0.0) -> None:
        """`late_share`: of the requests that have waited three seconds for their first token."""
        self.rate, self.waiting, self.began_at = rate, 0, time.time() - 100.0
        self.stopped_at: float | None = None
        times = PhaseTimes(0.02, 1e-4, 0.02, 5e-4)
        asked = poisson(1, rate, int(100 * rate), prompt=2000, output=150)
        self._requests = observed(times, Topology(6, 6), asked, self.began_at)
        random = Random(1)
        for one in self._requests:
            if random.random() < late_share:
                assert one.prefill_s is not None
                one.first_s, one.hand_off_s = 3.0, 3.0 - one.prefill_s

    def __call__(self) -> TrafficReport:
        now = time.time()
        number = int(self.rate * ((self.stopped_at or now) - self.began_at))
        return TrafficReport(now, number + self.waiting, self.waiting, self._requests)


def decided(made: Controlled) -> list[str]:
    return [one.name for one in made.ledger.history() if one.what == "scale"]


async def followed(made: Controlled) -> None:
    """Wait until what was decided is so."""
    await made.until(lambda: decided(made))
    await made.until(lambda: len(made.backend.serving) > 3 and (made.backend.assigned or made.history("start")[3:]))
    await made.settled()


async def test_more_is_asked_for_and_more_is_started_and_all_say_so(tmp_path: Path) -> None:
    made = Controlled(tmp_path, scaled())
    made.front.reported = Traffic(8.0)
    async with made.running():
        await followed(made)
        status, plan = made.ledger.status(), made.front.told
    assert status is not None
    assert plan is not None
    desired = {role: status.roles[role].desired for role in ("prefill", "decode")}
    assert desired["prefill"] > 1
    assert plan.desired == desired
    assert len(made.backend.serving) == sum(desired.values()) + 1
    assert plan.attained is not None
    assert plan.attained >= plan.goal == 0.95
    assert plan.decisions[0].what == "start"
    assert "requests/s" in plan.decisions[0].reason
    assert status.decided
    assert made.ledger.desired_state().fleet.role["prefill"].count == 1, "what the user wants is not changed"


async def test_a_role_changes_before_anything_is_started(tmp_path: Path) -> None:
    made = Controlled(tmp_path, scaled(1, 3, can_be=True))
    made.front.reported = Traffic(6.0, late_share=0.5)
    async with made.running():
        await made.until(lambda: made.backend.assigned)
        await made.settled()
    assert decided(made)[0] == "role"
    assert [role for _, role in made.backend.assigned] == ["prefill"]
    assert len(made.history("start")) == 5, "the instances at the beginning, and the router"


def test_routers_with_a_threshold_of_their_own_are_not_counted_on() -> None:
    """A controller cannot change it, and would wait for ever for what it brings."""
    fleet = scaled()
    assert fleet.scale is not None
    rules = rules_of(fleet, fleet.scale)
    assert rules.overflows
    fixed = pooling(
        role={"prefill": {"max": 2}, "decode": {"max": 2}},
        router={"args": ["--disaggregate-from=0"]},
        scale=SCALE,
    )
    assert fixed.scale is not None
    rules = rules_of(fixed, fixed.scale)
    assert not rules.overflows
    only_said = scaled(recommend=True)
    assert only_said.scale is not None
    assert not rules_of(only_said, only_said.scale).overflows, "its routers are not told the targets"


async def test_what_is_released_drains_until_its_tickets_are_over(tmp_path: Path) -> None:
    """kthena #1589: P and D that scale down had requests and tickets that others waited for."""
    made = Controlled(tmp_path, scaled(3, 3))
    made.front.busy = {"prefill-2", "decode-2", "prefill-1", "decode-1", PREFILL, DECODE}
    made.front.reported = Traffic(0.5)
    async with made.running():
        await made.until(lambda: made.front.draining)
        await ticks(made.backend)
        leaving = set(made.front.draining)
        assert not made.backend.stops, "all of them are still busy"
        assert leaving <= set(made.backend.here)
        assert decided(made) == ["release"], "nothing more is released while these drain"
        made.front.busy.clear()
        await made.until(lambda: len(made.backend.stops) == len(leaving))
        await made.settled()
    assert {name for name, _ in made.backend.stops} == leaving
    assert {one.role for one in made.backend.here.values()} == {"prefill", "decode", "router"}


async def test_the_next_controller_goes_on_with_what_was_decided(tmp_path: Path) -> None:
    made = Controlled(tmp_path, scaled())
    made.front.reported = Traffic(8.0)
    async with made.running():
        await followed(made)
    serving = made.backend.serving
    made.front.reported = lambda: None  # no router answers yet
    async with made.running():
        await ticks(made.backend, 10)
        assert made.backend.serving == serving
        assert not made.backend.stops


async def test_a_controller_elsewhere_goes_on_with_what_the_routers_were_told(tmp_path: Path) -> None:
    made = Controlled(tmp_path, scaled())
    made.front.reported = Traffic(8.0)
    async with made.running():
        await followed(made)
    serving, desired = made.backend.serving, made.front.told
    made.front.reported = lambda: None
    made.ledger = Ledger(tmp_path / "elsewhere")
    made.ledger.apply(scaled())
    async with made.running():
        await ticks(made.backend, 10)
        assert made.backend.serving == serving
        assert not made.backend.stops
    assert desired is not None
    assert made.front.told is not None
    assert made.front.told.desired == desired.desired
    assert made.front.told.decisions == desired.decisions != ()


async def test_a_spec_that_is_applied_again_does_not_take_back_what_was_started(tmp_path: Path) -> None:
    made = Controlled(tmp_path, scaled())
    made.front.reported = Traffic(8.0)
    async with made.running():
        await followed(made)
        serving = made.backend.serving
        made.ledger.apply(scaled())
        await made.settled()
        assert made.backend.serving == serving
        made.ledger.apply(pooling(1, 1))  # without [scale], the counts are the user's again
        await made.settled()
        assert made.backend.serving == [DECODE, PREFILL, "router-0"]
        assert made.ledger.scaled_counts() is None, "nor does a later [scale] begin with what an earlier one decided"


async def test_recommendations_are_only_said(tmp_path: Path) -> None:
    made = Controlled(tmp_path, scaled(recommend=True))
    made.front.reported = Traffic(8.0)
    async with made.running():
        await made.until(lambda: any(one.what == "recommend" for one in made.ledger.history()))
        await ticks(made.backend, 10)
        plan = made.front.told
        assert made.backend.serving == [DECODE, PREFILL, "router-0"]
    assert plan is not None
    assert plan.recommends
    assert plan.desired["prefill"] > 1
    assert len([one for one in made.ledger.history() if one.what == "recommend"]) == 1


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
async def test_a_clock_that_is_set_makes_no_fleet_idle_and_releases_nothing(tmp_path: Path, step_s: float) -> None:
    clock = SystemClock()
    made = Controlled(tmp_path, scaled(least=0, idle="60s", cool_down="30s"), clock)
    made.front.reported = asked = Traffic(8.0)
    async with made.running():
        await followed(made)
        serving, before = made.backend.serving, decided(made)
        asked.stopped_at = time.time()
        clock.wall = lambda: time.time() + step_s
        await ticks(made.backend, 20)
        assert (made.backend.serving, decided(made)) == (serving, before)


async def test_both_roles_go_to_zero_together_and_come_back_for_who_waits(tmp_path: Path) -> None:
    """grove #676: one role at zero serves nobody."""
    made = Controlled(tmp_path, scaled(2, 1, least=0, idle="1s"))
    made.front.reported = asked = Traffic(0.5)
    asked.stopped_at = time.time()
    async with made.running():
        await made.until(lambda: "zero" in decided(made))
        await made.until(lambda: made.backend.serving == ["router-0"])
        plan = made.front.told
        assert plan is not None
        assert plan.desired == {"prefill": 0, "decode": 0}
        assert plan.starts_s > 0, "requests are to wait"
        asked.waiting = 1
        await made.until(lambda: made.backend.serving == [DECODE, PREFILL, "router-0"])
    assert decided(made)[-1] == "wake"


async def test_reports_that_make_no_sense_do_not_end_the_controller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Controlled(tmp_path, scaled())
    made.front.reported = lambda: TrafficReport(time.time(), "many", 0, [])  # type: ignore[arg-type]
    async with made.running():
        await made.until(lambda: "nothing could be decided" in caplog.text)
        made.front.reported = Traffic(8.0)
        await followed(made)


async def test_routers_that_do_not_answer_change_nothing(tmp_path: Path) -> None:
    made = Controlled(tmp_path, scaled(2, 2))
    async with made.running() as task:
        await made.settled()
        await ticks(made.backend, 10)
        assert not decided(made)
        assert not task.done()
    assert isinstance(await asyncio.shield(task), Detached)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scale": {"ttft": "1s"}}, "scale.itl is required"),
        ({"scale": {"ttft": "1s", "itl": "50ms", "coldown": "1s"}}, "cool_down"),
        ({"scale": {"ttft": "1s", "itl": "50ms"}}, "role.decode needs max"),
        ({"scale": {"ttft": "1s", "itl": "0ms", "budget": 4}}, "more than 0"),
        ({"scale": {"ttft": "1s", "itl": "50ms", "budget": 4, "attainment": 1.0}}, "scale.attainment"),
        (
            {"scale": {"ttft": "1s", "itl": "5ms", "budget": 4, "fewest_per_decode": 3, "most_per_decode": 2}},
            "more than",
        ),
        ({"scale": {"ttft": "1s", "itl": "5ms", "budget": 4, "idle": "5m"}}, "keeps min = 1"),
        ({"scale": {"ttft": "1s", "itl": "5ms", "budget": 0}}, "no number of instances is allowed"),
        ({"scale": {"ttft": "1s", "itl": "5ms", "budget": 1}}, "no number of instances is allowed"),
        ({"scale": {"ttft": "1s", "itl": "5ms", "budget": 9, "fewest_per_decode": 4}}, "no number of instances is"),
        ({"scale": {"ttft": "1s", "itl": "5ms", "budget": 4}, "router": {"count": 0}}, "router.count = 0"),
        (
            {"scale": {"ttft": "1s", "itl": "5ms", "budget": 4}, "role": {"decode": {}, "both": {}, "prefill": {}}},
            "the roles are",
        ),
    ],
)
def test_a_wrong_table_is_said_in_one_line(change: dict[str, Any], says: str) -> None:
    told = {
        "name": "f",
        "model": "m",
        "mode": "pooling",
        "role": {"prefill": {"max": 3}, "decode": {"min": 1}},
        **change,
    }
    with pytest.raises(ConfigError, match=says) as caught:
        fleet_from(told)
    assert "\n" not in str(caught.value)
