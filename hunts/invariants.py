"""What must hold in every simulation, whatever has gone wrong in it."""

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
"""What stores count while it is on its way; with several connectors, a number is before the name."""
_LOST = ("failed_", "ended_expired")
"""What the P2P connector counts of hand-offs that nobody got."""
_BLOCK_SHARE = 1 / 8
"""The share of its room that the longest block of a simulated store takes at most."""
_LEASE_ENDS_S = 0.1
"""Seconds in which a lease that is over ends, unless its process stands still."""


@dataclass(frozen=True)
class Violation:
    """Something that must not happen. `name` is the invariant's."""

    name: str
    what: str


def of_requests(results: list[RequestResult], *, has_faults: bool) -> list[Violation]:
    """Each request ends once and with the right tokens: all of them, or a reason; without faults, all of them."""
    found = []
    for one in results:
        about = f"request {one.number} ({one.outcome or 'waits'}, {one.status}, {one.num_tokens} tokens): {one.why}"
        if one.ends != 1:
            found.append(Violation("ends once", f"{about} ended {one.ends} times"))
        if not one.is_right:
            found.append(Violation("tokens are right", about))
        if one.outcome == "broken" and '"error"' not in one.why and not one.lost_router:
            found.append(Violation("an answer ends with all its tokens or a reason", about))
        if one.status == 500:
            found.append(Violation("no internal error", about))
        if not (has_faults or one.crossed) and one.outcome not in ("complete", "left"):
            found.append(Violation("without a fault all is answered", about))
    return found


def of_code(world: World) -> list[Violation]:
    """The code itself makes no error: none is logged, and none reaches an event loop."""
    logged = [Violation("no error is logged", text) for text in world.logged]
    return logged + [
        Violation("no error is lost", f"{one['loop']}: {one['message']}") for one in world.simulation.errors
    ]


def of_rest(world: World) -> list[Violation]:
    """When no request is left and all leases are over: every block is free, and nothing else is held."""
    found = []
    for instance in world.instances:
        engine = instance.engine
        if engine is None or not instance.process.is_alive:
            found.append(Violation("instances come back", f"{instance.name} does not serve"))
            continue
        try:
            engine.check()
        except LeakError as error:
            found.append(Violation("nothing leaks", f"{instance.name}: {error}"))
        pool = engine.pool.statistics()
        if pool.num_free != pool.num_blocks:
            found.append(
                Violation("all blocks are free", f"{instance.name}: {pool.num_blocks - pool.num_free} are not")
            )
        if not engine.scheduler.is_empty:
            found.append(Violation("no request is left", f"{instance.name}: {engine.scheduler.statistics()}"))
    for place in world.routers:
        if place.router is None:
            found.append(Violation("routers come back", f"{place.host.address} does not serve"))
            continue
        for one in place.router.services.pools:
            if one.load.num_legs:
                about = f"{place.host.address} counts {one.load.num_legs} at {one.name}"
                found.append(Violation("no leg is left", about))
            if not (one.trusted or one.draining):
                about = f"{one.name} is {one.state.value} for {place.host.address}"
                found.append(Violation("an instance that answers is used", about))
    return found


def of_hand_offs(world: World) -> list[Violation]:
    """Where nothing breaks and there is time, every hand-off is fetched."""
    found = []
    for instance in world.instances:
        if instance.engine is None:
            continue
        for name, value in instance.engine.statistics().connector.items():
            if name.startswith(_LOST) and value:
                found.append(Violation("no hand-off is lost", f"{instance.name}: {name} {value:g}"))
    return found


def of_stores(world: World) -> list[Violation]:
    """When no request is left: nothing is on its way into stores or between their tiers, nothing is half written, and
    the files of blocks fit into the room that they have."""
    found = []
    has_files = any(world.storage.files())
    pinned = "tier0_pinned_blocks" if has_files else "pinned_blocks"  # of shared memory, which is the first tier
    for instance in world.instances:
        if instance.engine is None or not instance.process.is_alive:
            continue
        for name, value in instance.engine.statistics().connector.items():
            if name.endswith(pinned) and value and world.storage.has_memory:
                found.append(Violation("no pin is left", f"{instance.name}: {name} {value:g}"))
            if name.endswith("_healthy") and not value:
                found.append(Violation("a tier that answers is used", f"{instance.name}: {name} {value:g}"))
            if name.endswith(_ON_ITS_WAY) and value:
                found.append(Violation("nothing is on its way into a store", f"{instance.name}: {name} {value:g}"))
    total = 0
    for _, name, file in world.storage.files():
        total += len(file.content) if name.endswith(SUFFIX) else 0
        if name.endswith(PIN_SUFFIX):
            found.append(Violation("no pin is left", name))
        if file.owner is not None and file.owner.is_alive:
            found.append(Violation("no file is half written", f"{file.owner.name}: {name}"))
    room = capacity_of(world.spec.instance)
    # Each process looks how full the directory is when it has written `SCAN_SHARE` of it, at least one block.
    if room is not None and total > room * (1 + len(world.instances) * (SCAN_SHARE + _BLOCK_SHARE)):
        found.append(Violation("blocks fit into their room", f"{total} bytes in {room}"))
    return found


def of_leases(world: World) -> list[Violation]:
    """At any time: no lease lasts longer than its bound, and those that are over have ended."""
    found, now = [], world.simulation.now
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
            found.append(Violation("no lease beyond its bound", f"{instance.name}: {error}"))
    return found


def of_steps(engine: EngineCore) -> list[Violation]:
    """Between two steps: all records of which blocks are in use agree, and cached blocks are computed."""
    try:
        engine.scheduler.audit()
    except LeakError as error:
        return [Violation("blocks are accounted for", str(error))]
    return []


def of_blocks(world: World) -> list[Violation]:
    """At any time: all records of which blocks are in use, and by whom, agree."""
    found = []
    for instance in world.instances:
        if instance.engine is not None and instance.process.is_alive and instance.is_between_steps:
            found += of_steps(instance.engine)
    return found


def of_bounds(world: FleetWorld) -> list[Violation]:
    """At any time: no role has more members than its `max`, leaving ones included, and none is to have fewer than its
    `min`. The bounds of a fleet do not change."""
    found, seen = [], world.ledger.status()
    for role, bounds in world.ledger.desired_state().fleet.role.items():
        number = sum(one.spec.role == role for one in world.started.values())
        if bounds.max is not None and number > bounds.max:
            found.append(Violation("a fleet stays within its bounds", f"{number} {role}, and {bounds.max} at most"))
        if seen is not None and role in seen.roles and seen.roles[role].desired < bounds.min:
            found.append(Violation("a fleet stays within its bounds", f"{seen.roles[role].desired} {role} are wanted"))
    return found


class FleetSteps:
    """What must hold when a controller starts or stops a member."""

    def __init__(self, world: FleetWorld) -> None:
        self._world = world
        self.violations: list[Violation] = []

    def require_room(self, spec: MemberSpec) -> None:
        """A role without a `max` has at most `surge` members more than are wanted, leaving ones included, when one more
        starts."""
        world = self._world
        seen, fleet = world.ledger.status(), world.ledger.desired_state().fleet
        if seen is None or spec.role not in seen.roles or (spec.role != "router" and fleet.role[spec.role].max):
            return
        most = seen.roles[spec.role].desired + fleet.roll.surge
        number = 1 + sum(one.spec.role == spec.role for one in world.started.values())
        if number > most:
            about = f"{spec.name} is the {number}th {spec.role}, and {most} may be there"
            self.violations.append(Violation("a fleet stays within its surge", about))

    def require_drained(self, started: StartedMember, grace_s: float) -> None:
        """Nothing runs on an instance that is stopped, and nothing is held there, unless it has failed, everything ends
        or no router serves: a router would say that requests run there."""
        world, what = self._world, started.what
        is_everything = world.ledger.desired_state().deleted or not any(one.router for one in world.routers)
        if not isinstance(what, SimInstance) or what.engine is None or not grace_s or is_everything:
            return
        requests = what.engine.scheduler.statistics()
        held = what.engine.statistics().connector.get("num_keys", 0.0)
        if requests.num_running or requests.num_waiting or held:
            about = f"{started.spec.name}: {requests}, {held:g} hand-offs"
            self.violations.append(Violation("what is stopped is drained", about))
