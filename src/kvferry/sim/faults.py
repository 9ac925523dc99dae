"""What goes wrong in a simulated deployment, and when: all of it drawn from a seed before it begins."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from kvferry.sim.loop import SimProcess
from kvferry.sim.network import SimHost
from kvferry.sim.world import World

Kind = Literal["crash", "power", "stall", "stall router", "cut", "reset"]
KINDS: tuple[Kind, ...] = ("crash", "power", "stall", "stall router", "cut", "reset")


@dataclass(frozen=True)
class Fault:
    """One fault. `place` and `other` choose whom it meets; `seconds`: how long it lasts.

    crash: a process ends, and is started again; power: its machine does, and nobody hears of it; stall: a process runs
    nothing; cut: nothing arrives between two hosts; reset: a connection breaks.
    """

    at_s: float
    kind: Kind
    place: float
    other: float
    seconds: float


def draw_faults(random: Random, number: int, within_s: float, kinds: tuple[Kind, ...] = KINDS) -> list[Fault]:
    """Faults at any time within `within_s`; most are short, a few last long."""
    found = []
    for _ in range(number):
        seconds = random.choice((0.05, 0.3, 1.5, 6.0)) * (0.5 + random.random())
        fault = Fault(random.random() * within_s, random.choice(kinds), random.random(), random.random(), seconds)
        found.append(fault)
    return sorted(found, key=lambda one: one.at_s)


class FaultInjector:
    """Lets faults happen in a world. `lasting`: how many last at the moment."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._loop = world.network.loop
        self.lasting = 0

    def schedule(self, faults: list[Fault]) -> None:
        """Let these happen, each at its time from now."""
        now = self._world.simulation.now
        for fault in faults:
            self.lasting += 1
            self._loop.call_at(now + fault.at_s, self._happen, fault)

    def _happen(self, fault: Fault) -> None:
        world = self._world
        instance = world.instances[int(fault.place * len(world.instances))]
        match fault.kind:
            case "crash" | "power":
                if not instance.process.is_alive or instance.engine is None:
                    self._over()
                    return
                instance.host.is_up = fault.kind == "crash"
                instance.process.crash()
                self._later(fault, instance.start_again)
            case "stall":
                self._stall(instance.process, fault)
            case "stall router":
                self._stall(world.router_process, fault)
            case "cut":
                one, other = self._pair(fault)
                world.network.cut(one, other)
                self._later(fault, lambda: world.network.heal(one, other))
            case "reset":
                connections = [one for one in world.network.open_connections() if one.process.name != "clients"]
                if connections:
                    connection = connections[int(fault.other * len(connections))]
                    world.simulation.note(f"a connection of {connection.process.name} breaks")
                    connection.reset()
                self._over()

    def _stall(self, process: SimProcess, fault: Fault) -> None:
        process.stall(fault.seconds)
        self._later(fault, lambda: None)

    def _pair(self, fault: Fault) -> tuple[SimHost, SimHost]:
        """Two hosts, but not the clients': they would only wait."""
        world = self._world
        hosts = [world.network.host("router"), *(one.host for one in world.instances)]
        one = hosts.pop(int(fault.place * len(hosts)))
        return one, hosts[int(fault.other * len(hosts))]

    def _later(self, fault: Fault, end: object) -> None:
        def over() -> None:
            assert callable(end)
            end()
            self._over()

        self._loop.call_later(fault.seconds, over)

    def _over(self) -> None:
        self.lasting -= 1
