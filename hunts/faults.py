"""Faults of a simulated deployment and their times, all drawn from a seed before it begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from kvferry.router.instances.instance import LegRole
from kvferry.router.instances.membership import Membership
from kvferry.sim.engine import SimInstance
from kvferry.sim.loop import SimProcess
from kvferry.sim.network import SimHost
from kvferry.sim.world import World

Kind = Literal[
    "crash",
    "power",
    "stall",
    "crash router",
    "stall router",
    "cut",
    "reset",
    "lose",
    "late",
    "clock",
    "stop",
    "drain",
    "roll",
    "role",
]
StoreKind = Literal["full", "errors", "hang", "slow", "lost blocks", "damaged blocks", "pin"]
KINDS: tuple[Kind, ...] = get_args(Kind)
STORE_KINDS: tuple[StoreKind, ...] = get_args(StoreKind)
"""Faults of stores. No request may be lost by one of these."""
OUTSIDE: tuple[Kind, ...] = ("stall", "stall router", "cut", "reset", "lose", "late", "clock")
"""Faults of processes, machines and the network that end no process: a fleet may have them as well."""
GENTLE: tuple[Kind, ...] = ("clock", "drain", "roll", "role")
"""No request may be lost by one of these, where another instance of the role is left."""
_POLL_S = 0.05
_STOPS_WITHIN_S = 60.0
_CLOCK_FACTOR = 100.0


@dataclass(frozen=True)
class Fault:
    """One fault. `choice` and `second_choice` (0 to 1) choose its targets; `seconds`: its duration.

    crash: a process ends, and is started again; power: its machine does, and its peers get no message of it; stall: a
    process runs nothing; cut: nothing arrives between two hosts; reset: a connection breaks; lose: further data on a
    connection never arrives; late: all between two hosts takes up to `seconds` longer; clock: a wall clock jumps, and
    jumps back; stop: a process ends as at SIGTERM, and is started again. Changes by operators: drain an instance, and
    add it again; roll: stop it in between; role: give it the other role, and its own again.

    Of a store's disk: full: nothing can be written; errors: nothing can be read or written; hang: no call returns;
    slow: all takes fifty times as long; lost blocks, damaged blocks: this happens to a share of its files. pin: an
    operator has an instance pin the stored blocks of a prompt, and unpin them.
    """

    at_s: float
    kind: Kind | StoreKind
    choice: float
    second_choice: float
    seconds: float


def draw_faults(
    random: Random, number: int, horizon_s: float, kinds: Sequence[Kind | StoreKind] = KINDS
) -> list[Fault]:
    """Faults at any time within `horizon_s`; most are short, a few last long."""
    faults = []
    for _ in range(number):
        seconds = random.choice((0.05, 0.3, 1.5, 6.0)) * (0.5 + random.random())
        fault = Fault(random.random() * horizon_s, random.choice(kinds), random.random(), random.random(), seconds)
        faults.append(fault)
    return sorted(faults, key=lambda fault: fault.at_s)


class FaultInjector:
    """Applies faults to a world. `lasting`: number of faults that last at the moment."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._loop = world.network.loop
        self.lasting = 0
        self._pinned: list[Sequence[int]] = []

    def schedule(self, faults: list[Fault]) -> None:
        """Apply each of these at its time from now."""
        now = self._world.simulation.now
        for fault in faults:
            self.lasting += 1
            self._loop.call_at(now + fault.at_s, self._apply, fault)

    def _apply(self, fault: Fault) -> None:
        world = self._world
        if not (world.instances and world.routers):  # of a fleet that has none at the moment
            self._end_one()
            return
        instance = world.instances[int(fault.choice * len(world.instances))]
        router = world.routers[int(fault.choice * len(world.routers))]
        match fault.kind:
            case "crash" | "power":
                if not instance.process.is_alive or instance.engine is None:
                    self._end_one()
                    return
                instance.host.is_up = fault.kind == "crash"
                instance.process.crash()
                self._later(fault, instance.restart)
            case "crash router":
                if router.router is None:
                    self._end_one()
                    return
                router.crash()
                self._later(fault, router.restart)
            case "stall":
                self._stall(instance.process, fault)
            case "stall router":
                self._stall(router.process, fault)
            case "cut":
                first, other = self._pair(fault)
                world.network.partition(first, other)
                self._later(fault, lambda: world.network.repair(first, other))
            case "late":
                first, other = self._pair(fault)
                world.network.slow_down(first, other, fault.seconds)
                self._later(fault, lambda: world.network.slow_down(first, other, 0.0))
            case "reset" | "lose":
                self._break(fault)
            case "clock":
                self._jump(
                    instance.host, math.copysign(fault.seconds * _CLOCK_FACTOR, fault.second_choice - 0.5), fault
                )
            case "stop":
                self._stop(instance, self._end_one)
            case "drain" | "roll":
                self._drain(instance, fault)
            case "full" | "errors" | "hang" | "slow" | "lost blocks" | "damaged blocks":
                self._break_store(fault)
            case "pin":
                self._pin(instance, fault)
            case "role":
                other_role: LegRole = "decode" if instance.role == "prefill" else "prefill"
                leg_role: LegRole = "prefill" if instance.role == "prefill" else "decode"
                self._change_role(instance, other_role)
                self._later(fault, lambda: self._change_role(instance, leg_role))

    def _break_store(self, fault: Fault) -> None:
        simulation, storage = self._world.simulation, self._world.storage
        until = simulation.now + fault.seconds
        simulation.note(f"the disk of the stores: {fault.kind} for {fault.seconds:.6f} s")
        match fault.kind:
            case "full":
                storage.full_until = max(storage.full_until, until)
            case "errors":
                storage.fails_until = max(storage.fails_until, until)
            case "hang":
                storage.disk.hangs_until = max(storage.disk.hangs_until, until)
            case "slow":
                storage.disk.slow_until = max(storage.disk.slow_until, until)
            case "lost blocks":
                storage.lose(simulation.random, fault.choice)
            case _:
                storage.damage(simulation.random, fault.choice)
        self._later(fault, lambda: None)

    def _pin(self, instance: SimInstance, fault: Fault) -> None:
        results = self._world.results
        if results:
            self._pinned.append(results[int(fault.second_choice * len(results))].spec.prompt)
            self._world.simulation.note(f"{instance.name} is to pin {len(self._pinned[-1])} tokens")
            instance.keep(self._pinned[-1], pin=True)
        self._later(fault, self.unpin)

    def unpin(self) -> None:
        """Have all instances unpin all pinned prompts, as it is not known which instance has pinned them."""
        for prompt in self._pinned:
            for instance in self._world.instances:
                instance.keep(prompt, pin=False)

    def _operate(self, event: str, change: Callable[[Membership], object]) -> None:
        for router in self._world.routers:
            router.apply_change(event, change)

    def _change_role(self, instance: SimInstance, role: LegRole) -> None:
        self._operate(f"has {instance.name} as {role}", lambda membership: membership.change_role(instance.url, role))

    def _break(self, fault: Fault) -> None:
        """Break a connection, or lose its data; not a client's, which would only wait."""
        world = self._world
        connections = [
            connection for connection in world.network.open_connections() if connection.process.name != "clients"
        ]
        if connections:
            connection = connections[int(fault.second_choice * len(connections))]
            if fault.kind == "lose":
                world.network.lose(connection)
            else:
                world.simulation.note(f"a connection of {connection.process.name} breaks")
                connection.reset()
        self._end_one()

    def _jump(self, host: SimHost, seconds: float, fault: Fault) -> None:
        def back() -> None:
            host.clock_s -= seconds

        host.clock_s += seconds
        self._world.simulation.note(f"the clock of {host.address} jumps by {seconds:.3f} s")
        self._later(fault, back)

    def _drain(self, instance: SimInstance, fault: Fault) -> None:
        role: LegRole = "prefill" if instance.role == "prefill" else "decode"

        def add() -> None:
            self._operate(f"has {instance.name} again", lambda membership: membership.add(role, instance.url))
            self._end_one()

        self._operate(f"sends {instance.name} nothing new", lambda membership: membership.drain(instance.url))
        if fault.kind == "drain":
            self._loop.call_later(fault.seconds, add)
        else:
            self._loop.call_later(fault.seconds, self._stop, instance, add)

    def _stop(self, instance: SimInstance, then: Callable[[], None]) -> None:
        """Have a process end by itself, and start the next one after that; a process that does not serve is left
        alone."""
        process, begun = instance.process, self._loop.time()

        def look() -> None:
            if instance.process is not process or not process.is_alive:  # something else has ended it
                then()
            elif process.tasks() and self._loop.time() - begun < _STOPS_WITHIN_S:
                self._loop.call_later(_POLL_S, look)
            else:
                process.crash()
                instance.restart()
                then()

        if instance.engine is None or not process.is_alive:
            then()
            return
        self._world.simulation.note(f"{process.name} is to stop")
        instance.stop()
        look()

    def _stall(self, process: SimProcess, fault: Fault) -> None:
        process.stall(fault.seconds)
        self._later(fault, lambda: None)

    def _pair(self, fault: Fault) -> tuple[SimHost, SimHost]:
        """Two hosts, but not the clients': they would only wait."""
        hosts = self._world.hosts()
        first = hosts.pop(int(fault.choice * len(hosts)))
        return first, hosts[int(fault.second_choice * len(hosts))]

    def _later(self, fault: Fault, end: object) -> None:
        def over() -> None:
            assert callable(end)
            end()
            self._end_one()

        self._loop.call_later(fault.seconds, over)

    def _end_one(self) -> None:
        self.lasting -= 1
