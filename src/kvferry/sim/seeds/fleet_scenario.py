"""Scenarios of fleets that a seed decides: what is wanted changes, members die, and so does the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, get_args

from kvferry.fleet.control.spec import WantedFleet, fleet_from
from kvferry.sim.fleet import FleetWorld
from kvferry.sim.seeds.faults import OUTSIDE, Fault, FaultInjector, draw_faults
from kvferry.sim.seeds.invariants import Violation
from kvferry.sim.seeds.scenario import Report, draw, judged, require_finished
from kvferry.sim.world import RequestSpec, WorldSpec

ChangeKind = Literal["scale", "swap", "roll", "kill", "controller"]
KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)
_BECOMES_SO_S = 120.0


@dataclass(frozen=True)
class Change:
    """What happens to a fleet: another number of instances is wanted (`scale`), one more of a role and one less of the
    other (`swap`), or others in their places (`roll`); a member dies (`kill`), or the controller, and after `seconds`
    there is another one. `place` and `other` choose.
    """

    at_s: float
    kind: ChangeKind
    place: float
    other: float
    seconds: float


@dataclass(frozen=True)
class FleetScenario:
    """A fleet with `counts` of instances and routers, what it is asked, and what happens to it."""

    seed: int
    world: WorldSpec
    counts: tuple[int, int, int]
    """Instances that prefill and that decode, and routers."""
    requests: list[RequestSpec]
    faults: list[Change | Fault]
    """Changes, and faults of `faults.OUTSIDE`."""

    @property
    def loses_nothing(self) -> bool:
        """Whether each request must be answered, unless its client leaves: nobody dies but the controller, and each
        role is there twice."""
        keeps = self.world.instance.kv_load_failure_policy == "recompute" and min(self.counts[:2]) > 1
        return keeps and all(one.kind in ("roll", "controller") for one in self.faults)

    def only(self, requests: Sequence[int], faults: Sequence[int]) -> FleetScenario:
        return replace(
            self, requests=[self.requests[one] for one in requests], faults=[self.faults[one] for one in faults]
        )


def draw_fleet(seed: int) -> FleetScenario:
    """The scenario of a seed."""
    plain, random = draw(seed, with_faults=False), Random(f"kvferry fleet {seed}")
    is_gentle = random.random() < 0.4
    counts = (2, 2, 1) if is_gentle else (random.randint(1, 2), random.randint(1, 2), random.randint(1, 2))
    kinds: tuple[ChangeKind, ...] = ("roll", "controller") if is_gentle else KINDS
    changes: list[Change | Fault] = [
        Change(random.random() * 4.0, random.choice(kinds), random.random(), random.random(), random.random() * 3.0)
        for _ in range(random.choice((1, 2, 3)))
    ]
    if not is_gentle:
        changes += draw_faults(random, random.choice((0, 1, 3)), 4.0, OUTSIDE)
    return FleetScenario(seed, plain.world, counts, plain.requests, sorted(changes, key=lambda one: one.at_s))


def fleet_of(prefill: int, decode: int, routers: int, stamp: str = "") -> WantedFleet:
    """A fleet in pooling mode."""
    return fleet_from(
        {
            "name": "simulated",
            "model": "simulated",
            "mode": "pooling",
            "role": {"prefill": {"count": prefill}, "decode": {"count": decode}},
            "router": {"count": routers},
            "stamp": stamp,
        }
    )


class _Changes:
    """Lets changes happen in a fleet. Owns what is wanted."""

    def __init__(self, world: FleetWorld, counts: tuple[int, int, int]) -> None:
        self._world, self._counts, self._stamp = world, counts, 0
        self.num_open = 0

    def schedule(self, changes: list[Change]) -> None:
        """Let each change happen at its time, counted from now."""
        begins = self._world.simulation.now
        self.num_open += len(changes)
        for change in changes:
            self._world.network.loop.call_at(begins + change.at_s, self._happen, change)

    def _happen(self, change: Change) -> None:
        world, loop = self._world, self._world.network.loop
        match change.kind:
            case "scale":
                self._counts = (1 + int(change.place * 3), 1 + int(change.other * 3), self._counts[2])
                world.want(fleet_of(*self._counts, stamp=str(self._stamp)))
            case "swap":
                prefill, decode, routers = self._counts
                moved = 1 if decode > 1 else -1 if prefill > 1 else 0
                self._counts = (prefill + moved, decode - moved, routers)
                world.want(fleet_of(*self._counts, stamp=str(self._stamp)))
            case "roll":
                self._stamp += 1
                world.want(fleet_of(*self._counts, stamp=str(self._stamp)))
            case "kill":
                started = list(world.started.values())
                if started:
                    started[int(change.place * len(started))].what.crash()
            case "controller":
                if world.controller_process.is_alive:
                    world.controller_process.crash()
                    loop.call_later(change.seconds, self._start_controller)
                    return
        self.num_open -= 1

    def _start_controller(self) -> None:
        self._world.start_controller()
        self.num_open -= 1


def run_fleet(scenario: FleetScenario, *, keep_log: bool = False) -> Report:
    """Let it happen, and look whether everything held that must."""
    world = FleetWorld(scenario.world, fleet_of(*scenario.counts), scenario.seed, keep_log=keep_log)
    with judged(world, scenario) as report:
        changes, breaker = _Changes(world, scenario.counts), FaultInjector(world)
        if not world.is_settled:
            report.violations.append(Violation("a fleet becomes what is wanted", "it does not come up"))
        changes.schedule([one for one in scenario.faults if isinstance(one, Change)])
        breaker.schedule([one for one in scenario.faults if isinstance(one, Fault)])
        require_finished(world, report)
        if not world.run_until(lambda: not (changes.num_open or breaker.lasting) and world.is_settled, _BECOMES_SO_S):
            seen = world.ledger.status()
            report.violations.append(Violation("a fleet becomes what is wanted", f"{seen}"))
    return report
