"""Scenarios of fleets that a seed decides: their specs change, members die, and so does the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, get_args

from hunts.faults import OUTSIDE, Fault, FaultInjector, draw_faults
from hunts.invariants import FleetSteps, Violation, check_bounds
from hunts.scenario import Report, draw, judged, require_finished
from kvferry.fleet.spec.fleet_spec import DesiredFleet, fleet_from
from kvferry.sim.fleet import FleetWorld
from kvferry.sim.world import RequestSpec, WorldSpec

ChangeKind = Literal["scale", "swap", "roll", "kill", "controller", "stand"]
KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)
_CONVERGES_S = 120.0
_SCALED_SHARE = 0.35
"""Share of the seeds whose fleet has `[scale]`."""
_AGAIN_S = (0.0, 0.5, 2.5)
"""Times at which each request comes to such a fleet, after its time in a fleet without `[scale]`."""
_MAX_INSTANCES = 4
"""Largest number of instances of a role in such a fleet."""
_TWO_CONTROLLERS_SHARE = 0.4
_STANDS_S = 18.0
"""Seconds that a controller stands still at least, which is longer than others wait for its lease."""
_GENTLE: tuple[ChangeKind, ...] = ("roll", "controller", "stand")
"""Changes during which no request may be lost, if each role is there twice."""


@dataclass(frozen=True)
class Change:
    """A change of a fleet: another number of instances (`scale`; a fleet with `[scale]` loses it, or gets it again),
    one more of a role and one less of the other (`swap`), or another revision (`roll`). A member dies (`kill`), or the
    controller, and after `seconds` there is another one; or the controller stands still for longer than its lease
    (`stand`). `choice` and `second_choice` choose.
    """

    at_s: float
    kind: ChangeKind
    choice: float
    second_choice: float
    seconds: float


@dataclass(frozen=True)
class FleetScenario:
    """A fleet with `counts` of instances and routers, its requests, and its changes and faults."""

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
    max_instances: int = _MAX_INSTANCES
    """Largest number of instances of a role, if the fleet has `[scale]`."""

    @property
    def must_answer_all(self) -> bool:
        """True if each request must be answered, unless its client leaves: only controllers die, and each role has two
        instances."""
        keeps = self.world.instance.kv_load_failure_policy == "recompute" and min(self.counts[:2]) > 1
        stays = self.scale is None or "idle" not in self.scale
        return keeps and stays and all(fault.kind in _GENTLE for fault in self.faults)

    @property
    def is_undisturbed(self) -> bool:
        """True if only controllers die and nothing else breaks, so that all routers have their controller's
        declaration."""
        return all(isinstance(fault, Change) and fault.kind != "kill" for fault in self.faults)

    def fleet(self, counts: tuple[int, int, int], stamp: str = "", *, is_scaled: bool = True) -> DesiredFleet:
        """The fleet with other counts. `is_scaled`: with `[scale]`, if the scenario has it."""
        prefill, decode, routers = counts
        role: dict[str, dict[str, Any]] = {"prefill": {"count": prefill}, "decode": {"count": decode}}
        table = {"name": "simulated", "model": "simulated", "mode": "pooling", "router": {"count": routers}}
        if self.scale is not None:
            bounds = {"min": 0 if "idle" in self.scale else 1, "max": self.max_instances}
            for name, other in (("prefill", "decode"), ("decode", "prefill")):
                role[name] |= bounds | {"can_be": [other] if self.world.instance.takes_any_role else []}
            table |= {} if "budget" in self.scale else {"roll": {"unavailable": 1}}
            table |= {"scale": self.scale} if is_scaled else {}
        return fleet_from({**table, "role": role, "stamp": stamp})

    def only(self, requests: Sequence[int], faults: Sequence[int]) -> FleetScenario:
        return replace(
            self, requests=[self.requests[index] for index in requests], faults=[self.faults[index] for index in faults]
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
    scale_rng = Random(f"kvferry scale {seed}")  # so that the other seeds stay what they were
    scale, world, requests = None, plain.world, plain.requests
    if scale_rng.random() < _SCALED_SHARE:
        scale = _draw_scale(scale_rng) | ({"budget": _MAX_INSTANCES} if is_gentle else {})
        requests = [replace(request, at_s=request.at_s + again) for again in _AGAIN_S for request in plain.requests]
        requests.sort(key=lambda timed: timed.at_s)
        room = len(_AGAIN_S) * world.instance.max_waiting  # else they may be refused without a fault
        world = replace(world, instance=replace(world.instance, max_waiting=room))
    controller_rng = Random(f"kvferry controllers {seed}")
    num_controllers = 2 if controller_rng.random() < _TWO_CONTROLLERS_SHARE else 1
    changes.sort(key=lambda timed: timed.at_s)
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
    """Applies changes to a fleet. Owns its desired state."""

    def __init__(self, world: FleetWorld, scenario: FleetScenario) -> None:
        self._world, self._scenario, self._counts, self._stamp = world, scenario, scenario.counts, 0
        self._is_scaled = True
        self.num_open = 0

    def schedule(self, changes: list[Change]) -> None:
        """Apply each change at its time, counted from now."""
        begins = self._world.simulation.now
        self.num_open += len(changes)
        for change in changes:
            self._world.network.loop.call_at(begins + change.at_s, self._apply, change)

    def _apply(self, change: Change) -> None:
        world, loop = self._world, self._world.network.loop
        match change.kind:
            case "scale":
                self._counts = (1 + int(change.choice * 3), 1 + int(change.second_choice * 3), self._counts[2])
                self._is_scaled = not self._is_scaled
                self._apply_fleet()
            case "swap":
                prefill, decode, routers = self._counts
                moved = 1 if decode > 1 else -1 if prefill > 1 else 0
                self._counts = (prefill + moved, decode - moved, routers)
                self._apply_fleet()
            case "roll":
                self._stamp += 1
                self._apply_fleet()
            case "kill":
                started = list(world.started.values())
                if started:
                    started[int(change.choice * len(started))].what.crash()
            case "controller":
                if world.controller_process.is_alive:
                    world.controller_process.crash()
                    loop.call_later(change.seconds, self._start_controller)
                    return
            case "stand":
                seconds = _STANDS_S + 8.0 * change.seconds
                world.controller_process.stall(seconds)
                loop.call_later(seconds, self._end_one)
                return
        self.num_open -= 1

    def _apply_fleet(self) -> None:
        self._world.apply(self._scenario.fleet(self._counts, str(self._stamp), is_scaled=self._is_scaled))

    def _start_controller(self) -> None:
        self._world.start_controllers()
        self._end_one()

    def _end_one(self) -> None:
        self.num_open -= 1


def run_fleet(scenario: FleetScenario, *, keep_log: bool = False) -> Report:
    """Run the scenario, and check all invariants."""
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
    with judged(world, scenario, lambda: [*check_bounds(world), *steps.violations]) as report:
        changes, breaker = _Changes(world, scenario), FaultInjector(world)
        if not world.is_settled:
            report.violations.append(Violation("a fleet becomes as desired", "it does not come up"))
        changes.schedule([change for change in scenario.faults if isinstance(change, Change)])
        breaker.schedule([change for change in scenario.faults if isinstance(change, Fault)])
        require_finished(world, report)
        if not world.run_until(lambda: not (changes.num_open or breaker.lasting) and world.is_settled, _CONVERGES_S):
            seen = world.ledger.status()
            report.violations.append(Violation("a fleet becomes as desired", f"{seen}"))
        report.violations.extend(steps.violations)
        report.violations.extend(Violation("one controller acts", what) for what in world.actions_without_lease)
    return report
