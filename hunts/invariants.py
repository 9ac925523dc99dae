"""The invariants of every simulation, with any faults."""

from __future__ import annotations

from dataclasses import dataclass

from hunts.stores import capacity_of
from kvferry.core.errors import LeakError
from kvferry.engine.core import EngineCore
from kvferry.fleet.control.backend import MemberSpec
from kvferry.sim.engine import SimInstance
from kvferry.sim.fleet import FleetWorld, StartedMember
from kvferry.sim.world import RequestResult, World
from kvferry.store.media.file_room import PIN_SUFFIX, SCAN_SHARE, SUFFIX

_ON_ITS_WAY = ("num_loading", "writer_waiting_bytes", "moving_bytes", "dirty_blocks")
"""Statistics of stores about unfinished transfers; with several connectors, a number is before the name."""
_LOST = ("failed_", "ended_expired")
"""Statistics of the P2P connector about hand-offs that were not fetched."""
_BLOCK_SHARE = 1 / 8
"""Largest share of its room that the longest block of a simulated store takes."""
_LEASE_ENDS_S = 0.1
"""Seconds in which a lease that is over ends, unless its process stands still."""


@dataclass(frozen=True)
class Violation:
    """A violation of the invariant `name`."""

    name: str
    what: str


def check_requests(results: list[RequestResult], *, has_faults: bool) -> list[Violation]:
    """Each request ends once and with the right tokens: all of them, or a reason; without faults, all of them."""
    violations = []
    for result in results:
        outcome = f"{result.outcome or 'waits'}, {result.status}, {result.num_tokens} tokens"
        detail = f"request {result.number} ({outcome}): {result.reason}"
        if result.num_ends != 1:
            violations.append(Violation("ends once", f"{detail} ended {result.num_ends} times"))
        if not result.has_expected_tokens:
            violations.append(Violation("tokens are right", detail))
        if result.outcome == "broken" and '"error"' not in result.reason and not result.lost_router:
            violations.append(Violation("an answer ends with all its tokens or a reason", detail))
        if result.status == 500:
            violations.append(Violation("no internal error", detail))
        if not (has_faults or result.sent_on_closed_connection) and result.outcome not in ("complete", "left"):
            violations.append(Violation("without a fault all is answered", detail))
    return violations


def check_errors(world: World) -> list[Violation]:
    """The code itself makes no error: none is logged, and none reaches an event loop."""
    logged = [Violation("no error is logged", text) for text in world.logged_errors]
    return logged + [
        Violation("no error is lost", f"{error['loop']}: {error['message']}") for error in world.simulation.errors
    ]


def check_idle(world: World) -> list[Violation]:
    """When no request is left and all leases are over: every block is free, and nothing else is held."""
    violations = []
    for instance in world.instances:
        engine = instance.engine
        if engine is None or not instance.process.is_alive:
            violations.append(Violation("instances come back", f"{instance.name} does not serve"))
            continue
        try:
            engine.check()
        except LeakError as error:
            violations.append(Violation("nothing leaks", f"{instance.name}: {error}"))
        pool = engine.pool.statistics()
        if pool.num_free != pool.num_blocks:
            violations.append(
                Violation("all blocks are free", f"{instance.name}: {pool.num_blocks - pool.num_free} are not")
            )
        if not engine.scheduler.is_empty:
            violations.append(Violation("no request is left", f"{instance.name}: {engine.scheduler.statistics()}"))
    for router in world.routers:
        if router.router is None:
            violations.append(Violation("routers come back", f"{router.host.address} does not serve"))
            continue
        for instance_view in router.router.services.pools:
            if instance_view.load.num_legs:
                detail = f"{router.host.address} counts {instance_view.load.num_legs} at {instance_view.name}"
                violations.append(Violation("no leg is left", detail))
            if not (instance_view.trusted or instance_view.draining):
                detail = f"{instance_view.name} is {instance_view.state.value} for {router.host.address}"
                violations.append(Violation("an instance that answers is used", detail))
    return violations


def check_hand_offs(world: World) -> list[Violation]:
    """Where nothing breaks and there is time, every hand-off is fetched."""
    violations = []
    for instance in world.instances:
        if instance.engine is None:
            continue
        for name, value in instance.engine.statistics().connector.items():
            if name.startswith(_LOST) and value:
                violations.append(Violation("no hand-off is lost", f"{instance.name}: {name} {value:g}"))
    return violations


def check_stores(world: World) -> list[Violation]:
    """When no request is left: nothing is on its way into stores or between their tiers, nothing is half written, and
    the files of blocks fit into the room that they have."""
    violations = []
    has_files = any(world.storage.files())
    pinned = "tier0_pinned_blocks" if has_files else "pinned_blocks"  # of shared memory, which is the first tier
    for instance in world.instances:
        if instance.engine is None or not instance.process.is_alive:
            continue
        for name, value in instance.engine.statistics().connector.items():
            if name.endswith(pinned) and value and world.storage.has_memory:
                violations.append(Violation("no pin is left", f"{instance.name}: {name} {value:g}"))
            if name.endswith("_healthy") and not value:
                violations.append(Violation("a tier that answers is used", f"{instance.name}: {name} {value:g}"))
            if name.endswith(_ON_ITS_WAY) and value:
                violations.append(Violation("nothing is on its way into a store", f"{instance.name}: {name} {value:g}"))
    total = 0
    for _, name, file in world.storage.files():
        total += len(file.content) if name.endswith(SUFFIX) else 0
        if name.endswith(PIN_SUFFIX):
            violations.append(Violation("no pin is left", name))
        if file.owner is not None and file.owner.is_alive:
            violations.append(Violation("no file is half written", f"{file.owner.name}: {name}"))
    room = capacity_of(world.spec.instance)
    # Each process looks how full the directory is when it has written `SCAN_SHARE` of it, at least one block.
    if room is not None and total > room * (1 + len(world.instances) * (SCAN_SHARE + _BLOCK_SHARE)):
        violations.append(Violation("blocks fit into their room", f"{total} bytes in {room}"))
    return violations


def check_leases(world: World) -> list[Violation]:
    """At any time: no lease lasts longer than its bound."""
    violations, now = [], world.simulation.now
    for instance in world.instances:
        process, executor = instance.process, instance.executor
        stands = process.stalled_until + _LEASE_ENDS_S > now
        if executor is None or instance.engine is None or not process.is_alive or stands:
            continue
        if (p2p := executor.p2p) is None:
            continue
        try:
            p2p.table.audit(_LEASE_ENDS_S)
        except LeakError as error:
            violations.append(Violation("no lease beyond its bound", f"{instance.name}: {error}"))
    return violations


def check_steps(engine: EngineCore) -> list[Violation]:
    """Between two steps: all records of which blocks are in use agree, and cached blocks are computed."""
    try:
        engine.scheduler.audit()
    except LeakError as error:
        return [Violation("blocks are accounted for", str(error))]
    return []


def check_blocks(world: World) -> list[Violation]:
    """At any time: all records of which blocks are in use, and by whom, agree."""
    violations = []
    for instance in world.instances:
        if instance.engine is not None and instance.process.is_alive and instance.is_between_steps:
            violations += check_steps(instance.engine)
    return violations


def check_bounds(world: FleetWorld) -> list[Violation]:
    """At any time: no role has more members than its `max`, leaving ones included, and none is to have fewer than its
    `min`. The bounds of a fleet do not change."""
    violations, seen = [], world.ledger.status()
    for role, bounds in world.ledger.desired_state().fleet.role.items():
        number = sum(member.spec.role == role for member in world.started.values())
        if bounds.max is not None and number > bounds.max:
            violations.append(
                Violation("a fleet stays within its bounds", f"{number} {role}, and {bounds.max} at most")
            )
        if seen is not None and role in seen.roles and seen.roles[role].desired < bounds.min:
            violations.append(
                Violation("a fleet stays within its bounds", f"{seen.roles[role].desired} {role} are desired")
            )
    return violations


class FleetSteps:
    """The invariants of a controller's starts and stops of members."""

    def __init__(self, world: FleetWorld) -> None:
        self._world = world
        self.violations: list[Violation] = []

    def require_room(self, spec: MemberSpec) -> None:
        """A role without a `max` has at most `surge` members more than desired, leaving ones included, when another one
        starts."""
        world = self._world
        seen, fleet = world.ledger.status(), world.ledger.desired_state().fleet
        if seen is None or spec.role not in seen.roles or (spec.role != "router" and fleet.role[spec.role].max):
            return
        max_members = seen.roles[spec.role].desired + fleet.roll.surge
        number = 1 + sum(member.spec.role == spec.role for member in world.started.values())
        if number > max_members:
            detail = f"{spec.name} is the {number}th {spec.role}, and {max_members} may be there"
            self.violations.append(Violation("a fleet stays within its surge", detail))

    def require_drained(self, started: StartedMember, grace_s: float) -> None:
        """Nothing runs on an instance that is stopped, and nothing is held there, unless it has failed, everything ends
        or no router serves, which would report requests there."""
        world, what = self._world, started.what
        is_ending = world.ledger.desired_state().deleted or not any(router.router for router in world.routers)
        if not isinstance(what, SimInstance) or what.engine is None or not grace_s or is_ending:
            return
        requests = what.engine.scheduler.statistics()
        held = what.engine.statistics().connector.get("num_keys", 0.0)
        if requests.num_running or requests.num_waiting or held:
            detail = f"{started.spec.name}: {requests}, {held:g} hand-offs"
            self.violations.append(Violation("what is stopped is drained", detail))
