"""A fleet on a Ray cluster of tests: its commands, its processes, and what is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvferry.fleet.started import started_at
from support.fleets import SPEC, Fleet
from support.processes import until
from support.ray_nodes import Nodes, runs

NAME = "on-ray"
ACTOR, PROCESS = 0, 1
"""Of a member."""
ON_RAY = """
[backend]
kind = "ray"
address = "{address}"
"""


class RayFleet(Fleet):
    """Also knows its processes."""

    def __init__(self, folder: Path, nodes: Nodes) -> None:
        super().__init__(folder, NAME)
        self.nodes = nodes
        self.pids: set[tuple[int, int]] = set()
        """Every process that was seen of it, with its start time."""

    def does(self, *command: str) -> None:
        super().does(*command)
        self.processes()

    def processes(self) -> dict[str, tuple[int, int]]:
        """Of each member: its actor's process, and its own."""
        found = self.nodes.members()
        for pair in found.values():
            with suppress(OSError):
                self.pids |= {(pid, started_at(pid)) for pid in pair}
        return found

    def is_gone(self) -> bool:
        return not any(runs(*one) for one in self.pids)


@contextmanager
def fleet_on(
    nodes: Nodes, folder: Path, model: Path, more: str = "", prefill: str = "[role.prefill]"
) -> Iterator[RayFleet]:
    made = RayFleet(folder, nodes)
    spec = SPEC.format(name=NAME, model=model).replace("count = 2\n", "").replace("[role.prefill]", prefill)
    try:
        made.apply(spec + ON_RAY.format(address=nodes.address) + more)
        yield made
    finally:
        made.delete()
    until(made.is_gone, 60, lambda: made.log)


def replaced(fleet: RayFleet, before: dict[str, tuple[int, int]], *names: str) -> None:
    """Wait until others are in the place of these members, whatever their names, and all serve."""
    lost = {before[name] for name in names}

    def is_whole() -> bool:
        found = fleet.processes().values()
        return len(found) >= len(before) and lost.isdisjoint(found)

    eventually(fleet, is_whole, 150)
    fleet.settle()


def eventually(fleet: RayFleet, holds: Callable[[], bool], within_s: float) -> None:
    """As `until`, and shows what the controller has written meanwhile."""
    try:
        until(holds, within_s)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{[*map(str, fleet.status.members)]}\n{fleet.log}") from None
