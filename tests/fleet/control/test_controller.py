"""The controller with members in memory: what is wanted becomes so, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleet.control.memory import MemoryBackend, MemoryFront
from fleet.recording import RecordingDisplay
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import ConfigError
from kvferry.fleet.control.backend import MemberSpec
from kvferry.fleet.control.controller import Controller, Detached, End, FleetFailed, ShutdownRequested
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.control.router_client import RouterInstanceView
from kvferry.fleet.spec.fleet_spec import DesiredFleet, fleet_from
from support.waiting import eventually

HANGS_S = 60.0
FAST = {"backoff": ["10ms", "50ms"], "hang": "0s"}
ROUTER, PREFILL, DECODE = "router-0", "prefill-0", "decode-0"


def pooling(prefill: int = 1, decode: int = 1, *, routers: int = 1, stamp: str = "", **more: Any) -> DesiredFleet:
    told: dict[str, Any] = {
        "name": "f",
        "model": "m",
        "mode": "pooling",
        "role": {"prefill": {"count": prefill}, "decode": {"count": decode}},
        "router": {"count": routers},
        "stamp": stamp,
        **more,
        "failure": {**FAST, **more.get("failure", {})},
    }
    return fleet_from(told)


def replica(units: int, *, stamp: str = "") -> DesiredFleet:
    unit = {"members": {"prefill": 1, "decode": 1}, "count": units}
    told = {"name": "f", "model": "m", "mode": "replica", "unit": unit, "failure": FAST, "stamp": stamp}
    return fleet_from({**told, "router": {"count": 1}})


class Controlled:
    """A fleet in memory, and one controller at a time."""

    def __init__(self, folder: Path, fleet: DesiredFleet, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.ledger, self.backend, self.front = Ledger(folder / "f"), MemoryBackend(), MemoryFront()
        self.display = RecordingDisplay()
        self.ledger.apply(fleet)

    def controller(self, **more: Any) -> Controller:
        return Controller(self.ledger, self.backend, self.front, self.display, self.clock, **{"grace_s": 7.0, **more})

    @asynccontextmanager
    async def running(self, **more: Any) -> AsyncIterator[asyncio.Task[End]]:
        controller = self.controller(**more)
        task = asyncio.create_task(controller.run())
        try:
            async with asyncio.timeout(HANGS_S):
                yield task
        finally:
            controller.end(Detached())
            try:
                await task
            finally:
                controller.close()

    async def until(self, there: Callable[[], Any]) -> None:
        await eventually(there)

    async def settled(self) -> None:
        """Wait until a controller has seen that all is as it is to be now."""
        await self.until(lambda: (seen := self.ledger.status()) and seen.settled and seen.number == self.number)

    @property
    def number(self) -> int:
        return self.ledger.desired_state().number

    def history(self, what: str) -> list[str]:
        return [one.name for one in self.ledger.history() if one.what == what]

    def trouble(self) -> str:
        seen = self.ledger.status()
        return "" if seen is None else "; ".join(seen.trouble)


async def ticks(backend: MemoryBackend, number: int = 5) -> None:
    """Let the controller look a few times."""
    for _ in range(number):
        backend.changed.set()
        await asyncio.sleep(0.05)


async def test_what_is_wanted_is_started_and_told(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling(2, 1))
    async with made.running():
        await made.settled()
        assert made.backend.serving == [DECODE, PREFILL, "prefill-1", ROUTER]
        assert made.front.declared == {PREFILL: ("prefill", ""), "prefill-1": ("prefill", ""), DECODE: ("decode", "")}
        assert made.display.of("up") == [["http://router-0:1"]]
        status = made.ledger.status()
        assert status is not None
        assert (status.roles["prefill"].desired, status.roles["prefill"].ready) == (2, 2)
        assert status.url == "http://router-0:1"
        assert [one.name for one in status.members] == [DECODE, PREFILL, "prefill-1", ROUTER]
    assert sorted(made.history("start")) == [DECODE, PREFILL, "prefill-1", ROUTER]
    assert made.backend.serving == [DECODE, PREFILL, "prefill-1", ROUTER]  # the fleet goes on without it


async def test_what_operators_have_added_to_the_routers_is_not_taken_for_a_member(tmp_path: Path) -> None:
    """It may be called as one that is starting, which routers do not know of yet."""
    made = Controlled(tmp_path, pooling(1, 1))
    url = "http://elsewhere:1"
    made.front.operators[DECODE] = RouterInstanceView(
        DECODE, "decode", "draining", 0, draining=True, drained=True, url=url
    )
    made.backend.serves_at_once = False
    async with made.running():
        await made.until(lambda: len(made.backend.here) == 3)
        made.backend.serve(ROUTER)
        await ticks(made.backend)
        assert made.backend.stops == []
        made.backend.serve(PREFILL)
        made.backend.serve(DECODE)
        await made.settled()
    async with made.running():  # another controller finds them
        await ticks(made.backend)
        assert made.backend.stops == []


async def test_an_instance_without_a_partner_is_in_the_status_for_as_long_as_it_has_none(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling(1, 1))

    def details() -> dict[str, str]:
        status = made.ledger.status()
        return {} if status is None else {member.name: member.detail for member in status.members}

    made.front.no_hand_off[PREFILL] = "they differ in model: a and b (with decode-0)"
    async with made.running():
        await made.settled()
        expected = "takes part in no hand-off: they differ in model: a and b (with decode-0)"
        await made.until(lambda: details().get(PREFILL) == expected)
        assert details()[DECODE] == ""
        made.front.no_hand_off.clear()
        await made.until(lambda: details()[PREFILL] == "")
    assert made.backend.stops == []


async def test_who_dies_is_started_again_under_its_name_after_waits_that_double(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling(failure={"backoff": ["200ms", "10s"]}))
    async with made.running():
        await made.settled()
        for number in (2, 3, 4):
            made.backend.die(DECODE)
            await made.until(lambda number=number: [one for one, _ in made.backend.starts].count(DECODE) == number)
            await made.settled()
    times = [at for name, at in made.backend.starts if name == DECODE]
    waits = [later - before for before, later in pairwise(times)]
    assert [wait >= least for wait, least in zip(waits, (0.2, 0.4, 0.8), strict=True)] == [True] * 3
    assert [one for one, _ in made.backend.starts].count(PREFILL) == 1
    assert made.backend.stops == [(DECODE, 0.0)] * 3


async def test_a_crash_loop_is_named_and_ends_nothing_else(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling(failure={"crash_loop": 3}))
    async with made.running():
        await made.settled()
        made.backend.serves_at_once = False
        for number in range(3):
            made.backend.die(DECODE, f"ended with exit code {number}")
            if number < 2:
                await made.until(
                    lambda: (
                        DECODE in made.backend.here
                        and DECODE not in made.backend.serving
                        and made.backend.here[DECODE].reason == ""
                    )
                )
        await made.until(lambda: "failed 3 times in a row" in made.trouble())
        assert made.trouble() == "decode: failed 3 times in a row, and is not started again: ended with exit code 2"
        started = len(made.backend.starts)
        await ticks(made.backend)
        assert len(made.backend.starts) == started
        assert made.backend.serving == [PREFILL, ROUTER]
        made.backend.serves_at_once = True
        made.ledger.apply(pooling(failure={"crash_loop": 3}))  # whoever says it again wants it tried
        await made.settled()


async def test_what_cannot_be_started_counts_as_a_failure(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling(failure={"crash_loop": 2}))
    made.backend.cannot_start.add("decode")
    async with made.running():
        await made.until(
            lambda: "failed 2 times in a row, and is not started again: there is no room" in made.trouble()
        )
    assert made.history("not started") == [DECODE, DECODE]


async def test_while_the_backend_can_start_nobody_nothing_is_tried_nor_counted(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling(failure={"crash_loop": 2}))
    async with made.running():
        await made.settled()
        made.backend.trouble = "the cluster does not answer"
        made.backend.die(DECODE)
        await made.until(lambda: made.trouble() == "the cluster does not answer" and not made.backend.here.get(DECODE))
        num_starts = len(made.backend.starts)
        await ticks(made.backend, 10)
        assert len(made.backend.starts) == num_starts
        made.backend.trouble = ""
        await made.settled()
        assert made.trouble() == ""


async def test_a_start_that_finds_this_out_is_no_failure_of_a_member(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling(failure={"crash_loop": 1}))
    made.backend.is_unreachable = True
    async with made.running():
        await made.until(lambda: made.trouble() == "it does not answer")
        assert made.history("not started")
        made.backend.is_unreachable, made.backend.trouble = False, ""
        await made.settled()


async def test_who_waits_is_told_at_once_that_it_cannot_come_up(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling())
    made.backend.serves_at_once = False
    async with made.running(attended=True) as task:
        await made.until(lambda: len(made.backend.here) == 3)
        made.backend.die(PREFILL, "ended with exit code 7 while starting")
        end = await task
    assert isinstance(end, FleetFailed)
    assert end.member is not None
    assert (end.member.name, end.reason) == (PREFILL, "ended with exit code 7 while starting")


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_fleet_in_the_foreground_ends_when_nobody_is_left_who_can_answer(tmp_path: Path, role: str) -> None:
    made = Controlled(tmp_path, pooling(failure={"crash_loop": 1}))
    async with made.running(attended=True) as task:
        await made.settled()
        made.backend.die(f"{role}-0")
        if role == "prefill":
            await made.until(lambda: "failed once" in made.trouble())
            await ticks(made.backend)
            assert not task.done()
            return
        end = await task
    assert isinstance(end, FleetFailed)
    assert end.member is not None
    assert end.member.name == DECODE
    assert "decode: failed once" in end.reason


async def test_a_drain_waits_for_what_runs(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling(1, 2))
    async with made.running():
        await made.settled()
        made.front.busy |= {DECODE, "decode-1"}
        made.ledger.apply(pooling(1, 1))
        await made.until(lambda: made.front.draining)
        (leaving,) = made.front.draining
        await ticks(made.backend)
        assert made.backend.stops == []
        assert leaving in made.front.declared
        made.front.busy.clear()
        await made.settled()
        assert [name for name, _ in made.backend.stops] == [leaving]
        assert leaving not in made.front.declared
    assert made.history("drain") == [leaving]


async def test_a_drain_has_a_deadline(tmp_path: Path) -> None:
    told = {"failure": {"drain": "200ms"}}
    made = Controlled(tmp_path, pooling(1, 2, **told))
    async with made.running():
        await made.settled()
        made.front.busy |= {DECODE, "decode-1"}
        made.ledger.apply(pooling(1, 1, **told))
        await made.settled()
    assert len(made.backend.stops) == 1


async def test_while_no_router_answers_what_they_said_last_holds(tmp_path: Path) -> None:
    """A router that hangs may have requests everywhere: nothing is stopped in its back, and who is new serves only
    once a router knows it."""
    made = Controlled(tmp_path, pooling(1, 2))
    async with made.running():
        await made.settled()
        made.front.answers = False
        made.front.busy |= {DECODE, "decode-1"}
        made.ledger.apply(pooling(2, 1))
        await made.until(lambda: made.history("drain") and "prefill-1" in made.backend.serving)
        await ticks(made.backend)
        assert made.backend.stops == []
        status = made.ledger.status()
        assert status is not None
        assert [one.phase for one in status.members if one.name == "prefill-1"] == ["starting"]
        made.front.answers = True
        made.front.busy.clear()
        await made.settled()
        assert len(made.backend.stops) == 1


async def test_the_end_of_one_that_hangs_may_take_longer_than_a_look(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling(failure={"hang": "200ms"}))  # nothing answers for the health of a router here
    made.backend.stop_takes_s = 2.0
    async with made.running():
        await made.until(lambda: made.backend.stops)
    assert made.backend.stops[0] == (ROUTER, 0.0)


async def test_where_no_router_is_nobody_waits_for_one(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling(1, 2, routers=0))
    async with made.running():
        await made.settled()
        made.ledger.apply(pooling(1, 1, routers=0))
        await made.settled()
    assert len(made.backend.stops) == 1


@pytest.mark.parametrize("error", [ValueError("embedded null byte"), OSError(2, "No such file"), RuntimeError()])
async def test_whatever_keeps_a_member_from_being_started_the_rest_is_looked_after(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Controlled(tmp_path, pooling(failure={"crash_loop": 2}))
    start = made.backend.start

    async def fails(member: MemberSpec) -> None:
        if member.role == "decode":
            raise error
        await start(member)

    monkeypatch.setattr(made.backend, "start", fails)
    async with made.running() as task:
        await made.until(lambda: f"is not started again: {str(error) or 'RuntimeError'}" in made.trouble())
        assert made.backend.serving == [PREFILL, ROUTER]
        made.backend.die(PREFILL)
        await made.until(lambda: [one for one, _ in made.backend.starts].count(PREFILL) == 2)
        assert not task.done()


async def test_a_status_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling())
    in_its_place = made.ledger.folder / "status.json"
    in_its_place.mkdir()
    async with made.running() as task:
        await ticks(made.backend, 20)
        assert not task.done()
        in_its_place.rmdir()
        await made.settled()


async def test_a_controller_says_that_it_is_there(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling())
    async with made.running():
        await made.settled()
        first = made.ledger.controller
        assert first is not None
        await made.until(
            lambda: (now := made.ledger.controller) is not None and now.last_heartbeat_s > first.last_heartbeat_s
        )


async def test_an_operator_drains_an_instance_at_a_router_and_it_is_replaced(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling())
    async with made.running():
        await made.settled()
        made.front.draining.add(DECODE)
        views = made.front.instance_views()
        assert views[DECODE].draining
        declare = made.front.declare

        async def told(*what: Any) -> Any:
            found = await declare(*what)
            made.front.declare = declare  # type: ignore[method-assign]
            return {**found, DECODE: views[DECODE]} if found is not None else None

        made.front.declare = told  # type: ignore[method-assign]
        await made.until(lambda: DECODE in [name for name, _ in made.backend.stops])
        await made.settled()


async def test_an_instance_changes_its_role_and_is_not_restarted(tmp_path: Path) -> None:
    def fleet(prefill: int, decode: int) -> DesiredFleet:
        roles = {"prefill": {"count": prefill, "can_be": ["decode"]}, "decode": {"count": decode}}
        return pooling(role=roles)

    made = Controlled(tmp_path, fleet(2, 1))
    async with made.running():
        await made.settled()
        started = len(made.backend.starts)
        made.ledger.apply(fleet(1, 2))
        await made.settled()
        assert len(made.backend.starts) == started
        assert made.backend.stops == []
        ((name, role),) = made.backend.assigned
        assert (name[:7], role) == ("prefill", "decode")
        await made.until(lambda: made.front.declared[name] == ("decode", ""))


async def test_a_change_of_role_that_ends_while_routers_answer_is_made_once(tmp_path: Path) -> None:
    roles = {"prefill": {"count": 2, "can_be": ["decode"]}, "decode": {"count": 1}}
    made = Controlled(tmp_path, pooling(role=roles))
    async with made.running():
        await made.settled()
        declare, made.backend.assign_during = made.front.declare, asyncio.Event()

        async def slow(*arguments: Any) -> Any:
            assert made.backend.assign_during is not None
            if made.history("role"):
                made.backend.assign_during.set()
            views = await declare(*arguments)
            await ticks(made.backend)
            return views

        made.front.declare = slow  # type: ignore[method-assign]
        roles = {"prefill": {"count": 1, "can_be": ["decode"]}, "decode": {"count": 2}}
        made.ledger.apply(pooling(role=roles))
        await made.settled()
        assert len(made.backend.assigned) == len(made.history("role")) == 1


async def test_a_unit_is_admitted_when_it_is_whole(tmp_path: Path) -> None:
    made = Controlled(tmp_path, replica(1))
    made.backend.serves_at_once = False
    async with made.running():
        await made.until(lambda: len(made.backend.here) == 3)
        router, prefill, decode = sorted(made.backend.here, key=lambda one: ("router" not in one, "decode" in one))
        made.backend.serve(router)
        made.backend.serve(prefill)
        await ticks(made.backend)
        assert made.front.declared == {}
        made.backend.serve(decode)
        await made.settled()
        (unit,) = {unit for _, unit in made.front.declared.values()}
        assert made.front.declared == {prefill: ("prefill", unit), decode: ("decode", unit)}
        assert unit

        made.backend.die(decode)  # those of it that were admitted stay so
        await made.until(lambda: decode not in made.front.declared)
        assert prefill in made.front.declared


async def test_a_second_controller_waits_and_takes_up_what_is_there(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling(1, 2))
    async with made.running():
        await made.settled()
        made.front.busy |= {DECODE, "decode-1"}
        made.ledger.apply(pooling(1, 1))
        await made.until(lambda: made.front.draining)
        second = made.controller()
        task = asyncio.create_task(second.run())
        told = ["another controller looks after this fleet; waiting in case it ends"]
        await made.until(lambda: told in made.display.of("note"))
        assert made.backend.num_opened == 1
    started = len(made.backend.starts)
    async with asyncio.timeout(HANGS_S):
        await made.until(lambda: made.backend.num_opened == 2)
        await ticks(made.backend)
        assert len(made.front.draining) == 1  # as the first one left it
        assert made.backend.stops == []
        made.front.busy.clear()
        await made.settled()
    assert len(made.backend.starts) == started
    assert sorted(made.history("found")) == [DECODE, "decode-1", PREFILL, ROUTER]
    second.end(Detached())
    assert await task == Detached()
    assert made.ledger.has_controller  # until it has let go of all members
    second.close()
    assert not made.ledger.has_controller


async def test_a_controller_that_is_not_to_wait_ends_if_there_is_another(tmp_path: Path) -> None:
    """Two commands at once may each start one, and only one is to stay."""
    made = Controlled(tmp_path, pooling())
    async with made.running():
        await made.settled()
        assert await made.controller(wait_for_leadership=False).run() == Detached()
        assert made.backend.num_opened == 1
    async with made.running(wait_for_leadership=False):
        await made.settled()


async def test_a_controller_that_waits_can_be_ended(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling())
    async with made.running():
        second = made.controller()
        task = asyncio.create_task(second.run())
        await made.until(lambda: made.display.of("note"))
        second.end(Detached())
        assert await task == Detached()


async def test_routers_with_another_token_are_left_alone(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling())
    async with made.running():
        await made.settled()
    made.front.stranger = "does not take orders: another token"
    with pytest.raises(ConfigError, match="does not take orders: another token"):
        await made.controller().run()
    assert len(made.backend.serving) == 3


async def test_changes_while_it_serves(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling())
    async with made.running():
        await made.settled()
        first = {one.name for one in made.backend.members()}
        made.ledger.apply(pooling(2, 3))
        await made.settled()
        assert len(made.backend.serving) == 6
        assert first <= set(made.backend.serving)
        other = pooling(2, 3, engine={"args": ["--seed=1"]})
        made.ledger.apply(other)
        await made.settled()
        assert {one.revision for one in made.backend.members() if one.role != "router"} == {other.revision}
        stopped = [name for name, _ in made.backend.stops]
        assert len(stopped) == 5
        assert ROUTER not in stopped
        made.ledger.apply(msgspec.structs.replace(other, stamp="again"))  # as `kvferry fleet roll` does
        await made.settled()
        assert len(made.backend.stops) == 5 + 6
        assert ROUTER in [name for name, _ in made.backend.stops]


async def test_a_change_that_cannot_be_run_is_not_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = Controlled(tmp_path, pooling())
    made.backend.cannot_run.add("wrong")
    async with made.running() as task:
        await made.settled()
        made.ledger.apply(pooling(stamp="wrong"))
        await made.until(lambda: "it cannot be run here" in caplog.text)
        assert not task.done()
        assert made.backend.stops == []
        made.ledger.apply(pooling(2, 1))
        await made.settled()
        assert "prefill-1" in made.backend.serving


async def test_a_roll_for_which_there_is_no_room_says_so(tmp_path: Path) -> None:
    roles = {"prefill": {"count": 1}, "decode": {"count": 2, "max": 2}}
    made = Controlled(tmp_path, pooling(role=roles))
    async with made.running():
        await made.settled()
        made.ledger.apply(pooling(role=roles, stamp="again"))
        await made.until(lambda: "decode-0, decode-1, prefill-0 could never be replaced: there is no" in made.trouble())
        made.ledger.apply(pooling(role=roles, stamp="again", roll={"pause": True}))
        await made.until(lambda: made.trouble() == "")
        made.ledger.apply(pooling(role=roles, stamp="again", roll={"unavailable": 1}))
        await made.settled()
        assert made.trouble() == ""


async def test_a_fleet_does_not_move_to_another_backend(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling())
    async with made.running():
        await made.settled()
        made.ledger.apply(pooling(backend={"kind": "ray"}))
        await made.until(lambda: "backend.kind cannot be changed" in made.trouble())
        assert made.backend.stops == []


async def test_what_dies_is_still_replaced_after_a_change_that_cannot_be_run(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling())
    made.backend.cannot_run.add("wrong")
    async with made.running():
        await made.settled()
        made.ledger.apply(pooling(stamp="wrong"))
        await ticks(made.backend)
        made.backend.die(DECODE)
        async with asyncio.timeout(10):
            await made.until(lambda: [one for one, _ in made.backend.starts].count(DECODE) == 2)


async def test_a_paused_fleet_replaces_nothing(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling())
    async with made.running():
        await made.settled()
        made.ledger.apply(pooling(roll={"pause": True}))
        await made.settled()
        made.backend.die(DECODE)
        await made.until(lambda: DECODE not in made.backend.here)
        await ticks(made.backend)
        assert made.backend.serving == [PREFILL, ROUTER]
        made.ledger.apply(pooling())
        await made.settled()
        assert DECODE in made.backend.serving


async def test_a_fleet_that_is_deleted_ends_routers_first(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling())
    controller = made.controller()
    task = asyncio.create_task(controller.run())
    async with asyncio.timeout(HANGS_S):
        await made.settled()
        made.ledger.delete()
        assert await task == ShutdownRequested()
        await controller.shut_down()
        controller.close()
    assert made.backend.here == {}
    assert made.backend.stops[0] == (ROUTER, 7.0)
    assert sorted(made.backend.stops[1:]) == [(DECODE, 7.0), (PREFILL, 7.0)]
    assert made.ledger.desired_state().deleted


async def test_a_member_that_never_serves_is_given_up(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling(failure={"start": "200ms", "crash_loop": 2}))
    made.backend.serves_at_once = False
    async with made.running():
        await made.until(
            lambda: (
                "decode: failed 2 times in a row, and is not started again: does not serve after 200ms"
                " (start in [failure], --start-timeout-s)" in made.trouble()
            )
        )


async def test_routers_that_do_not_answer_change_nothing(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling(1, 2))
    async with made.running():
        await made.settled()
        made.front.answers = False
        await ticks(made.backend)
        assert made.backend.stops == []
        assert len(made.backend.starts) == 4


async def test_settings_that_change_nothing_in_processes_roll_nothing(tmp_path: Path) -> None:
    made = Controlled(tmp_path, pooling())
    async with made.running():
        await made.settled()
        fleet = made.ledger.desired_state().fleet
        roll = msgspec.structs.replace(fleet.roll, history=3, surge=2)
        made.ledger.apply(msgspec.structs.replace(fleet, roll=roll))
        await made.settled()
    assert made.backend.stops == []
