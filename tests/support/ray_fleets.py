"""A fleet on a Ray cluster of tests: its commands, its processes, and what is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from kvferry.fleet.processes.start_time import started_at
from support.fleets import SPEC, Fleet, require_clean
from support.ray_nodes import Nodes, runs
from support.waiting import until

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

    def restore(self) -> None:
        """Have one P and one D again, on which nothing is kept, and wait until nothing runs of all that was before."""
        self.settle()
        self.scale("prefill=1", "decode=1")
        require_clean(self)
        here = {pid for pair in self.processes().values() for pid in pair}
        until(lambda: not any(runs(*one) for one in self.pids if one[0] not in here), 60, lambda: self.log)


class SharedFleet:
    """One fleet for the tests of a module. It is made for the first test that borrows it, and made anew after one that
    has not left it as it was."""

    def __init__(self, make: Callable[[], AbstractContextManager[RayFleet]]) -> None:
        self._make, self._ends = make, ExitStack()
        self._fleet: RayFleet | None = None

    @contextmanager
    def borrowed(self) -> Iterator[RayFleet]:
        """The fleet, for one test."""
        if self._fleet is None:
            self._fleet = self._ends.enter_context(self._make())
        yield self._fleet
        try:
            self._fleet.restore()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Delete it, for a test that wants to be alone on the cluster."""
        self._fleet = None
        self._ends.close()


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


def eventually(fleet: RayFleet, holds: Callable[[], bool], timeout_s: float) -> None:
    """As `until`, and shows what the controller has written meanwhile."""
    try:
        until(holds, timeout_s)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{[*map(str, fleet.status.members)]}\n{fleet.log}") from None
