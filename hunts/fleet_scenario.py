"""Scenarios of fleets that a seed decides: what is wanted changes, members die, and so does the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, get_args

from hunts.faults import OUTSIDE, Fault, FaultInjector, draw_faults
from hunts.invariants import FleetSteps, Violation, of_bounds
from hunts.scenario import Report, draw, judged, require_finished
from kvferry.fleet.spec.fleet_spec import DesiredFleet, fleet_from
from kvferry.sim.fleet import FleetWorld
from kvferry.sim.world import RequestSpec, WorldSpec

ChangeKind = Literal["scale", "swap", "roll", "kill", "controller", "stand"]
KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)
_BECOMES_SO_S = 120.0
_SCALED_SHARE = 0.35
"""Share of the seeds whose fleet has `[scale]`."""
_AGAIN_S = (0.0, 0.5, 2.5)
"""When each request comes to such a fleet, after its time in one without."""
_MOST = 4
"""Instances of a role that such a fleet has at most."""
_TWO_CONTROLLERS_SHARE = 0.4
_STANDS_S = 18.0
"""How long a controller stands still at least, which is longer than others wait for its lease."""
_GENTLE: tuple[ChangeKind, ...] = ("roll", "controller", "stand")
"""Changes during which no request may be lost, if each role is there twice."""


@dataclass(frozen=True)
class Change:
    """What happens to a fleet: another number of instances is wanted (`scale`; a fleet with `[scale]` loses it, or has
    it again), one more of a role and one less of the other (`swap`), or others in their places (`roll`); a member dies
    (`kill`), or the controller, and after `seconds` there is another one; or the controller stands still for longer
    than its lease (`stand`). `place` and `other` choose.
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
    scale: dict[str, Any] | None = None
    """The table `[scale]`, if there is one. Without a `budget` that leaves a roll room, one of its members may be
    missing."""
    num_controllers: int = 1

    @property
    def loses_nothing(self) -> bool:
        """Whether each request must be answered, unless its client leaves: nobody dies but the controller, and each
        role is there twice."""
        keeps = self.world.instance.kv_load_failure_policy == "recompute" and min(self.counts[:2]) > 1
        stays = self.scale is None or "idle" not in self.scale
        return keeps and stays and all(one.kind in _GENTLE for one in self.faults)

    @property
    def is_undisturbed(self) -> bool:
        """Whether nothing dies or breaks but controllers, so that all routers know what their controller wants."""
        return all(isinstance(one, Change) and one.kind != "kill" for one in self.faults)

    def fleet(self, counts: tuple[int, int, int], stamp: str = "", *, is_scaled: bool = True) -> DesiredFleet:
        """The fleet with other counts. `is_scaled`: with `[scale]`, if the scenario has it."""
        prefill, decode, routers = counts
        role: dict[str, dict[str, Any]] = {"prefill": {"count": prefill}, "decode": {"count": decode}}
        given = {"name": "simulated", "model": "simulated", "mode": "pooling", "router": {"count": routers}}
        if self.scale is not None:
            bounds = {"min": 0 if "idle" in self.scale else 1, "max": _MOST}
            for name, other in (("prefill", "decode"), ("decode", "prefill")):
                role[name] |= bounds | {"can_be": [other] if self.world.instance.takes_any_role else []}
            given |= {} if "budget" in self.scale else {"roll": {"unavailable": 1}}
            given |= {"scale": self.scale} if is_scaled else {}
        return fleet_from({**given, "role": role, "stamp": stamp})

    def only(self, requests: Sequence[int], faults: Sequence[int]) -> FleetScenario:
        return replace(
            self, requests=[self.requests[one] for one in requests], faults=[self.faults[one] for one in faults]
        )


def draw_fleet(seed: int) -> FleetScenario:
    """The scenario of a seed."""
    plain, random = draw(seed, with_faults=False), Random(f"kvferry fleet {seed}")
    is_gentle = random.random() < 0.4
    counts = (2, 2, 1) if is_gentle else (random.randint(1, 2), random.randint(1, 2), random.randint(1, 2))
    kinds = _GENTLE if is_gentle else KINDS
    changes: list[Change | Fault] = [
        Change(random.random() * 4.0, random.choice(kinds), random.random(), random.random(), random.random() * 3.0)
        for _ in range(random.choice((1, 2, 3)))
    ]
    if not is_gentle:
        changes += draw_faults(random, random.choice((0, 1, 3)), 4.0, OUTSIDE)
    own = Random(f"kvferry scale {seed}")  # so that the other seeds stay what they were
    scale, world, requests = None, plain.world, plain.requests
    if own.random() < _SCALED_SHARE:
        scale = _draw_scale(own) | ({"budget": _MOST} if is_gentle else {})
        requests = [replace(one, at_s=one.at_s + again) for again in _AGAIN_S for one in plain.requests]
        requests.sort(key=lambda one: one.at_s)
        room = len(_AGAIN_S) * world.instance.max_waiting  # else they may be refused without a fault
        world = replace(world, instance=replace(world.instance, max_waiting=room))
    other = Random(f"kvferry controllers {seed}")
    num_controllers = 2 if other.random() < _TWO_CONTROLLERS_SHARE else 1
    changes.sort(key=lambda one: one.at_s)
    return FleetScenario(seed, world, counts, requests, changes, scale, num_controllers)


def _draw_scale(random: Random) -> dict[str, Any]:
    """Targets that are met or not, and times that fit into a scenario."""
    scale = {
        "ttft": random.choice(("25ms", "40ms", "200ms")),
        "itl": random.choice(("12ms", "50ms")),
        "attainment": random.choice((0.9, 0.99)),
        "interval": random.choice(("100ms", "500ms")),
        "cool_down": random.choice(("200ms", "2s")),
        "hold": random.choice(("1s", "5s")),
        "starts": "500ms",
        "warm": random.choice(("0s", "500ms")),
        "least_requests": random.choice((1, 3)),
    }
    return scale | ({"idle": "2s"} if random.random() < 0.25 else {})


class _Changes:
    """Lets changes happen in a fleet. Owns what is wanted."""

    def __init__(self, world: FleetWorld, scenario: FleetScenario) -> None:
        self._world, self._scenario, self._counts, self._stamp = world, scenario, scenario.counts, 0
        self._is_scaled = True
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
                self._is_scaled = not self._is_scaled
                self._want()
            case "swap":
                prefill, decode, routers = self._counts
                moved = 1 if decode > 1 else -1 if prefill > 1 else 0
                self._counts = (prefill + moved, decode - moved, routers)
                self._want()
            case "roll":
                self._stamp += 1
                self._want()
            case "kill":
                started = list(world.started.values())
                if started:
                    started[int(change.place * len(started))].what.crash()
            case "controller":
                if world.controller_process.is_alive:
                    world.controller_process.crash()
                    loop.call_later(change.seconds, self._start_controller)
                    return
            case "stand":
                seconds = _STANDS_S + 8.0 * change.seconds
                world.controller_process.stall(seconds)
                loop.call_later(seconds, self._over)
                return
        self.num_open -= 1

    def _want(self) -> None:
        self._world.apply(self._scenario.fleet(self._counts, str(self._stamp), is_scaled=self._is_scaled))

    def _start_controller(self) -> None:
        self._world.start_controllers()
        self._over()

    def _over(self) -> None:
        self.num_open -= 1


def run_fleet(scenario: FleetScenario, *, keep_log: bool = False) -> Report:
    """Let it happen, and look whether everything held that must."""
    world = FleetWorld(
        scenario.world,
        scenario.fleet(scenario.counts),
        scenario.seed,
        num_controllers=scenario.num_controllers,
        keep_log=keep_log,
    )
    steps = FleetSteps(world)
    world.on_start = steps.require_room
    if scenario.is_undisturbed:
        world.on_stop = steps.require_drained
    with judged(world, scenario, lambda: [*of_bounds(world), *steps.violations]) as report:
        changes, breaker = _Changes(world, scenario), FaultInjector(world)
        if not world.is_settled:
            report.violations.append(Violation("a fleet becomes what is wanted", "it does not come up"))
        changes.schedule([one for one in scenario.faults if isinstance(one, Change)])
        breaker.schedule([one for one in scenario.faults if isinstance(one, Fault)])
        require_finished(world, report)
        if not world.run_until(lambda: not (changes.num_open or breaker.lasting) and world.is_settled, _BECOMES_SO_S):
            seen = world.ledger.status()
            report.violations.append(Violation("a fleet becomes what is wanted", f"{seen}"))
        report.violations.extend(steps.violations)
        report.violations.extend(Violation("one controller acts", what) for what in world.actions_without_lease)
    return report
