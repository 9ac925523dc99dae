"""The loop: any spec, deaths and late facts; small worlds exhaustively."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import ConfigError
from kvferry.fleet.control.backoff import record_failure, start_backoff
from kvferry.fleet.control.dry_run import dry_run_steps
from kvferry.fleet.control.facts import Drain, Failure, ObservedInstance, Phase, Start, Step, StopMember, SwitchRole
from kvferry.fleet.control.loop import plan
from kvferry.fleet.spec.fleet_spec import DesiredFleet, fleet_from, unrollable_part
from support.examples import examples

POOLING = {"name": "chat", "model": "m", "mode": "pooling"}
REPLICA = {"name": "chat", "model": "m", "mode": "replica"}
TICK_S = 1.0


def pooling(prefill: int = 1, decode: int = 1, **more: Any) -> DesiredFleet:
    roles = {"prefill": {"count": prefill}, "decode": {"count": decode}}
    return fleet_from({**POOLING, "role": roles, **more})


def replica(count: int = 1, prefill: int = 1, decode: int = 1, **more: Any) -> DesiredFleet:
    unit = {"members": {"prefill": prefill, "decode": decode}, "count": count}
    return fleet_from({**REPLICA, "unit": unit, **more})


class World:
    """A backend that does every step, at once or late, and whose instances live and die as they are told."""

    def __init__(self, fleet: DesiredFleet) -> None:
        self.fleet, self.now = fleet, 0.0
        self.members: dict[str, ObservedInstance] = {}
        self.failures: list[Failure] = []
        self.seen: list[ObservedInstance] = []

    def tick(self, *, late: bool = False) -> list[Step]:
        """One round; `late`: with the facts of the round before."""
        self.now += TICK_S
        facts = self.seen if late else list(self.members.values())
        self.seen = list(self.members.values())
        steps = plan(self.fleet, facts, self.failures, self.now)
        assert steps == plan(self.fleet, facts, self.failures, self.now)
        for step in steps:
            self.do(step)
        self.check(steps, late=late)
        return steps

    def do(self, step: Step) -> None:
        one = self.members.get(step.name)
        match step:
            case Start():
                if one is None:
                    self.members[step.name] = ObservedInstance(
                        step.name, step.role, step.revision, Phase.STARTING, self.now, step.unit
                    )
            case Drain():
                if one is not None and one.phase in (Phase.READY, Phase.STARTING):
                    self.to(one, Phase.DRAINING)
            case StopMember():
                if one is not None:
                    del self.members[step.name]
                    if step.failed:
                        self.failures.append(Failure(one.role, one.revision, self.now, step.reason))
            case SwitchRole():
                if one is not None and one.phase is Phase.READY:
                    self.members[one.name] = replace(one, role=step.role, phase=Phase.STARTING, since=self.now)

    def to(self, one: ObservedInstance, phase: Phase) -> None:
        self.members[one.name] = replace(one, phase=phase, since=self.now)

    def check(self, steps: Sequence[Step], *, late: bool) -> None:
        fleet = self.fleet
        for role in {} if late else {one.role for one in steps if isinstance(one, Start)} & set(fleet.role):
            one = fleet.role[role]
            assert self.number(role) <= (one.count + fleet.roll.surge if one.max is None else one.max)
        if fleet.roll.pause:
            assert not [one for one in steps if isinstance(one, Start | Drain | SwitchRole)]
        names = [one.name for one in steps if isinstance(one, Start)]
        assert len(names) == len(set(names))

    def number(self, role: str) -> int:
        return sum(one.role == role for one in self.members.values())

    def settle(self, rounds: int = 400) -> None:
        """Everything that can happen well does, until nothing is left to do."""
        for _ in range(rounds):
            for one in list(self.members.values()):
                if one.phase is Phase.STARTING:
                    self.to(one, Phase.READY)
                elif one.phase is Phase.DRAINING:
                    self.to(one, Phase.DRAINED)
            if not self.tick() and self.is_done():
                return
        raise AssertionError(f"no end: {self.members}")

    def is_done(self) -> bool:
        fleet, here = self.fleet, list(self.members.values())
        if any((one.revision, one.phase) != (fleet.revision, Phase.READY) for one in here):
            return False
        if fleet.unit is None:
            wanted = {role: one.count for role, one in fleet.role.items() if one.count}
            return Counter(one.role for one in here) == wanted
        units = {one.unit for one in here}
        members = [Counter(one.role for one in here if one.unit == unit) for unit in units]
        return len(units) == fleet.unit.count and all(one == fleet.unit.members for one in members)


def changed(fleet: DesiredFleet, **more: Any) -> DesiredFleet:
    return msgspec.structs.replace(fleet, **more)


def another_model(fleet: DesiredFleet) -> DesiredFleet:
    return changed(fleet, model=f"{fleet.model}+")


# Small worlds, all of them.


@pytest.mark.parametrize("mode", ["pooling", "replica"])
def test_from_nothing_and_to_nothing_and_between_any_sizes(mode: str) -> None:
    make = pooling if mode == "pooling" else replica
    sizes = list(product(range(4), repeat=2)) if mode == "pooling" else [(number,) for number in range(5)]
    for before, after in product(sizes, repeat=2):
        world = World(make(*before))
        world.settle()
        world.fleet = make(*after)
        world.settle()


def test_every_roll_keeps_what_it_promises() -> None:
    for prefill, decode, surge, unavailable, skew in product((1, 2, 3), (1, 2, 4), (0, 1, 2), (0, 1), (1, 2)):
        if not surge and not unavailable:
            continue
        roll = {"surge": surge, "unavailable": unavailable, "max_skew": skew}
        world = World(pooling(prefill, decode, roll=roll))
        world.settle()
        after = another_model(world.fleet)
        try:
            dry_run_steps(after, list(world.members.values()))
        except ConfigError:
            assert not surge  # with room for one more, each roll comes to its end
            continue
        world.fleet = after
        for _ in range(200):
            before = effective(world)
            steps = world.tick()
            for role, one in world.fleet.role.items():
                assert effective(world)[role] >= min(before[role], one.count - unavailable)
                assert world.number(role) <= one.count + surge
            for member in list(world.members.values()):
                if member.phase is Phase.DRAINING:
                    world.to(member, Phase.DRAINED)
                elif member.phase is Phase.STARTING:
                    world.to(member, Phase.READY)
                    break  # one at a time
            if not steps and world.is_done():
                break
        assert world.is_done()


def effective(world: World) -> dict[str, int]:
    ready = Counter((one.revision, one.role) for one in world.members.values() if one.phase is Phase.READY)
    whole = [
        revision for revision in {one for one, _ in ready} if ready[revision, "prefill"] and ready[revision, "decode"]
    ]
    return {role: sum(ready[one, role] for one in whole) for role in ("prefill", "decode")}


def test_one_role_is_not_far_ahead_of_the_other() -> None:
    world = World(pooling(2, 4, roll={"surge": 4, "max_skew": 1}))
    world.settle()
    world.fleet = another_model(world.fleet)
    new = Counter[str]()
    for step in world.tick():
        if isinstance(step, Start):
            new[step.role] += 1
            assert abs(new["prefill"] / 2 - new["decode"] / 4) <= 1 / 2


# Random worlds.

COUNTS = st.integers(0, 3)


@st.composite
def fleets(draw: st.DrawFn) -> DesiredFleet:
    roll = {
        "surge": draw(st.integers(0, 2)),
        "unavailable": draw(st.integers(0, 2)),
        "max_skew": draw(st.integers(1, 2)),
    }
    if not roll["surge"]:
        roll["unavailable"] = max(1, roll["unavailable"])
    failure = {"restart": draw(st.sampled_from(["instance", "unit"])), "crash_loop": 1000}
    more = {"roll": {**roll, "pause": draw(st.booleans())}, "failure": failure, "model": draw(st.sampled_from("ab"))}
    if draw(st.booleans()):
        return replica(draw(COUNTS), draw(st.integers(1, 2)), draw(st.integers(1, 2)), **more)
    roles = {
        "prefill": {"count": draw(COUNTS), "can_be": draw(st.sampled_from([[], ["decode"]]))},
        "decode": {"count": draw(COUNTS), "can_be": draw(st.sampled_from([[], ["prefill"]]))},
    }
    return fleet_from({**POOLING, **more, "role": roles})


@given(data=st.data())
@settings(max_examples=examples(1000))
def test_whatever_happens_it_comes_to_what_is_wanted(data: st.DataObject) -> None:
    """Specs change in the middle of rolls, instances die and hang, facts come late; then nothing more happens."""
    first = data.draw(fleets())
    world = World(first)
    for _ in range(data.draw(st.integers(1, 25))):
        events = ("tick", "late", "ready", "die", "drained", "spec", "count")
        match data.draw(st.sampled_from(events)):
            case "tick" | "late" as how:
                world.tick(late=how == "late")
            case "spec":
                other = data.draw(fleets())
                if other.mode == world.fleet.mode:
                    world.fleet = other
            case "count" if world.fleet.unit is not None:
                world.fleet = changed(
                    world.fleet, unit=msgspec.structs.replace(world.fleet.unit, count=data.draw(COUNTS))
                )
            case event:
                wanted = {"ready": Phase.STARTING, "drained": Phase.DRAINING}.get(event)
                here = [one for one in world.members.values() if wanted in (None, one.phase)]
                if here:
                    phase = {"ready": Phase.READY, "drained": Phase.DRAINED}.get(event, Phase.FAILED)
                    world.to(data.draw(st.sampled_from(here)), phase)
    unpaused = msgspec.structs.replace(world.fleet.roll, pause=False, surge=max(1, world.fleet.roll.surge))
    world.fleet = changed(world.fleet, roll=unpaused)
    world.settle()


@st.composite
def bounded_fleets(draw: st.DrawFn, mode: str) -> DesiredFleet:
    """With bounds that leave some way to roll."""
    roll = {"surge": draw(st.integers(1, 2)), "unavailable": draw(st.integers(0, 2)), "pause": draw(st.booleans())}
    more = {"roll": roll, "failure": {"crash_loop": 1000}, "model": draw(st.sampled_from("ab"))}
    if mode == "replica":
        unit = {"members": {"prefill": 1, "decode": draw(st.integers(1, 2))}, "count": draw(COUNTS)}
        unit["max"] = unit["count"] + draw(st.integers(0, 2))
        return fleet_from({**REPLICA, "unit": unit, **more})
    roles = {}
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        count = draw(COUNTS)
        bounds = {"min": draw(st.integers(0, count)), "max": count + draw(st.integers(0, 2))}
        if count and bounds["max"] == count:
            bounds["min"] = min(bounds["min"], max(0, count - roll["unavailable"]))
        roles[role] = {"count": count, "can_be": draw(st.sampled_from([[], [other]])), **bounds}
    return fleet_from({**POOLING, **more, "role": roles})


class Bounded(World):
    """Facts may be late: what the controller did itself it knows, and what became of a member it may learn later."""

    def __init__(self, fleet: DesiredFleet) -> None:
        super().__init__(fleet)
        self.known: dict[str, ObservedInstance] = {}

    def look(self, late: frozenset[str]) -> None:
        """One round, in which nothing new is known of `late`."""
        self.now += TICK_S
        facts = {name: self.known.get(name, one) if name in late else one for name, one in sorted(self.members.items())}
        steps = plan(self.fleet, list(facts.values()), self.failures, self.now)
        for step in steps:
            self.do(step)
        self.known = {name: facts.get(name, one) if name in late else one for name, one in self.members.items()}
        self.check_bounds(steps, facts)

    def check_bounds(self, steps: Sequence[Step], facts: dict[str, ObservedInstance]) -> None:
        if self.fleet.roll.pause:
            assert not [one for one in steps if isinstance(one, Start | Drain | SwitchRole)]
        came = {one.role for one in steps if isinstance(one, Start | SwitchRole)}
        unit = self.fleet.unit
        if unit is not None and came:
            assert unit.max is not None
            assert len({one.unit for one in self.members.values()}) <= unit.max
        left = {one.name for one in steps if isinstance(one, Drain | StopMember | SwitchRole)}
        for role, one in self.fleet.role.items():
            assert one.max is not None
            assert role not in came or self.number(role) <= one.max
            ready = {name for name, fact in facts.items() if fact.role == role and fact.phase is Phase.READY}
            assert len(ready - left) >= min(len(ready), one.min)


@pytest.mark.parametrize("mode", ["pooling", "replica"])
@given(data=st.data())
@settings(max_examples=examples(200))
def test_bounds_hold_whatever_happens(mode: str, data: st.DataObject) -> None:
    """Never more than `max`, never fewer than `min` that serve unless they die, nothing is started while paused."""
    world = Bounded(data.draw(bounded_fleets(mode)))
    for _ in range(data.draw(st.integers(1, 30))):
        here = list(world.members.values())
        match data.draw(st.sampled_from(("look", "look", "ready", "ready", "die", "drained", "spec"))):
            case "look":
                late = data.draw(st.sets(st.sampled_from(sorted(world.members)))) if here else set()
                world.look(frozenset(late))
            case "spec":
                world.fleet = data.draw(bounded_fleets(mode))
            case "ready":
                for one in here:
                    if one.phase is Phase.STARTING:
                        world.to(one, Phase.READY)
            case event:
                wanted = Phase.DRAINING if event == "drained" else None
                if able := [one for one in here if wanted in (None, one.phase)]:
                    world.to(data.draw(st.sampled_from(able)), Phase.DRAINED if wanted else Phase.FAILED)


# Failures.


def test_waits_after_failures_grow_and_a_crash_loop_ends_it() -> None:
    world = World(pooling(1, 1, failure={"backoff": ["2s", "8s"], "crash_loop": 4}))
    starts: list[float] = []
    for _ in range(100):
        for step in world.tick():
            if isinstance(step, Start) and step.role == "decode":
                starts.append(world.now)
        for one in list(world.members.values()):
            if one.phase is Phase.STARTING:
                world.to(one, Phase.READY if one.role == "prefill" else Phase.FAILED)
    waits = [later - earlier for earlier, later in pairwise(starts)]
    assert waits == [3.0, 5.0, 9.0]  # and the round in which the failure is seen
    assert [one.role for one in world.members.values()] == ["prefill"]
    backoff = start_backoff(world.fleet, "decode", world.members.values(), world.failures, world.now)
    assert backoff is not None
    assert backoff.is_permanent
    assert backoff.reason.startswith("failed 4 times in a row, and is not started again: ")


def test_any_number_of_failures_makes_a_crash_loop() -> None:
    fleet = pooling(failure={"crash_loop": 3000, "backoff": ["1ms", "2ms"]})
    failures: list[Failure] = []
    for number in range(2999):
        record_failure(failures, Failure("decode", fleet.revision, float(number), "it ended"), 3000)
        record_failure(failures, Failure("prefill", fleet.revision, float(number), "it ended"), 3)
    held = start_backoff(fleet, "decode", [], failures, 2998.001)
    assert held is not None
    assert not held.is_permanent
    for _ in range(2):
        record_failure(failures, Failure("decode", fleet.revision, 3000.0, "the last"), 3000)
    held = start_backoff(fleet, "decode", [], failures, 9000.0)
    assert held is not None
    assert (held.is_permanent, held.reason[:22]) == (True, "failed 3000 times in a")
    assert Counter(one.role for one in failures) == {"decode": 3000, "prefill": 3}


def test_a_new_revision_that_fails_takes_nothing_from_the_old_one() -> None:
    world = World(pooling(2, 2, roll={"surge": 1}, failure={"crash_loop": 3, "backoff": ["1s", "1s"]}))
    world.settle()
    old = world.fleet.revision
    world.fleet = another_model(world.fleet)
    for _ in range(50):
        world.tick()
        for one in list(world.members.values()):
            if one.phase is Phase.STARTING:
                world.to(one, Phase.FAILED)
    serving = [one for one in world.members.values() if one.phase is Phase.READY]
    assert [(one.revision) for one in serving] == [old] * 4


def test_who_has_served_for_a_while_has_recovered() -> None:
    fleet = pooling(failure={"crash_loop": 1})
    failed = [Failure("decode", fleet.revision, 10.0, "it ended")]
    one = ObservedInstance("decode-0", "decode", fleet.revision, Phase.READY, 20.0)
    assert start_backoff(fleet, "decode", [one], failed, 30.0)
    assert not start_backoff(fleet, "decode", [one], failed, 90.0)


def test_a_unit_holds_nothing_while_it_waits_for_what_never_comes() -> None:
    world = World(replica(1, 1, 2, failure={"start": "30s", "crash_loop": 100}))
    world.tick()
    [first, *_] = world.members.values()
    world.to(first, Phase.READY)
    stopped = [step for _ in range(40) for step in world.tick() if isinstance(step, StopMember)]
    assert len(stopped) == 3
    assert {step.reason for step in stopped} == {"does not serve after 30s (start in [failure], --start-timeout-s)"}


@pytest.mark.parametrize("restart", ["instance", "unit"])
def test_what_is_replaced_when_a_member_of_a_unit_fails(restart: str) -> None:
    world = World(replica(2, 1, 1, failure={"restart": restart}))
    world.settle()
    failed = next(iter(world.members.values()))
    world.to(failed, Phase.FAILED)
    steps = world.tick()
    assert steps[0] == StopMember(failed.name, "it ended", failed=True)
    drained = [step.name for step in steps if isinstance(step, Drain)]
    mates = [one.name for one in world.members.values() if one.unit == failed.unit]
    assert drained == ([] if restart == "instance" else mates)
    world.settle()


def test_who_does_not_drain_is_stopped_after_its_time_and_not_before() -> None:
    world = World(pooling(1, 2, failure={"drain": "20s"}))
    world.settle()
    world.fleet = pooling(1, 1, failure={"drain": "20s"})
    [drained] = [step.name for step in world.tick() if isinstance(step, Drain)]
    begun = world.now
    while drained in world.members:
        world.tick()
    assert world.now - begun == 20.0


def test_a_role_change_comes_before_an_end_and_a_start() -> None:
    def roles(prefill: int, decode: int) -> DesiredFleet:
        able = {"prefill": {"count": prefill, "can_be": ["decode"]}, "decode": {"count": decode}}
        return fleet_from({**POOLING, "role": able})

    world = World(roles(2, 1))
    world.settle()
    world.fleet = roles(1, 2)
    [step] = world.tick()
    assert isinstance(step, SwitchRole)
    assert step.role == "decode"
    world.settle()
    world.fleet = roles(2, 1)  # and a decode instance cannot
    assert {type(step) for step in world.tick()} == {Start, Drain}


def test_a_roll_that_could_never_end_is_refused_before_it_begins() -> None:
    roles = {"prefill": {"count": 1, "max": 1}, "decode": {"count": 3, "max": 3}}
    fleet = fleet_from({**POOLING, "role": roles, "roll": {"unavailable": 1}})
    world = World(fleet)
    world.settle()
    with pytest.raises(ConfigError, match="could never be replaced"):
        dry_run_steps(another_model(fleet), list(world.members.values()))


def test_a_change_in_the_middle_of_another_is_rehearsed_as_if_that_had_come_to_its_end() -> None:
    world = World(pooling(1, 2))
    world.tick()  # they start
    dry_run_steps(changed(world.fleet, args=("--log-format=json",)), list(world.members.values()))
    world.settle()
    world.fleet = another_model(world.fleet)
    world.tick()
    for one in [one for one in world.members.values() if one.phase is Phase.READY]:
        world.to(one, Phase.DRAINING)
    dry_run_steps(world.fleet, list(world.members.values()))


@pytest.mark.parametrize(
    ("roles", "roll", "what"),
    [
        ({"prefill": {"count": 1}, "decode": {"count": 3, "max": 3}}, {}, "role.decode"),
        ({"prefill": {"count": 1}, "decode": {"count": 3, "max": 3}}, {"unavailable": 1}, ""),
        ({"prefill": {"count": 1}, "decode": {"count": 3, "max": 4}}, {}, ""),
        ({"prefill": {"count": 1}, "decode": {"count": 0, "max": 0}}, {}, ""),
    ],
)
def test_what_no_roll_could_replace_is_known(roles: Any, roll: dict[str, int], what: str) -> None:
    assert unrollable_part(fleet_from({**POOLING, "role": roles, "roll": roll})) == what


def test_a_roll_keeps_those_that_serve_although_their_other_half_is_dead() -> None:
    """D serves alone when P is dead; it is not drained before another D is ready."""
    world = World(pooling(1, 1))
    world.settle()
    world.to(world.members["prefill-0"], Phase.FAILED)
    world.fleet = another_model(world.fleet)
    world.tick()
    world.tick()
    assert world.members["decode-0"].phase is Phase.READY
    world.settle()


def test_one_that_is_stopped_while_it_starts_takes_room_until_it_is_gone() -> None:
    fleet = pooling(role={"prefill": {"count": 1, "max": 2}, "decode": {"count": 1, "max": 2}})
    here = [
        ObservedInstance("prefill-0", "prefill", fleet.revision, Phase.READY, 0.0),
        ObservedInstance("decode-0", "decode", "old", Phase.READY, 0.0),
        ObservedInstance("decode-1", "decode", "old", Phase.STARTING, 0.0),
    ]
    assert [(type(one), one.name) for one in plan(fleet, here, [], 1.0)] == [(StopMember, "decode-1")]
    assert not plan(fleet, [*here[:2], replace(here[2], phase=Phase.DRAINED)], [], 1.0)[1:]
    assert [(type(one), one.name) for one in plan(fleet, here[:2], [], 1.0)] == [(Start, "decode-1")]


def test_a_roll_begins_when_there_is_room_for_it() -> None:
    """What was drained a moment ago takes room until it is gone."""
    world = World(pooling(4, 4))
    world.settle()
    world.fleet = another_model(pooling(1, 1, roll={"surge": 1}))
    assert {type(step) for step in world.tick()} == {Drain}
    world.settle()
