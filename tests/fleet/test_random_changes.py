"""A controller, its ledger and its backend, with members that are real processes of a few lines: they are killed,
stopped and scaled, rolled and given other roles at random, in the middle of each other. In between, and in the end,
exactly those processes run that are wanted, and nothing is left of any other.

`KVFERRY_FAULTS` says how many changes (100 at least; thousands in `make soak`), `KVFERRY_SEED` which.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from fleet.children import ANSWERING, child
from fleet.control.memory import MemoryFront
from fleet.fleets import Make, Programs
from fleet.recording import RecordingDisplay
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.fleet.backends.local.folder import MemberFolder
from kvferry.fleet.control.backend import BackendContext, backend_class
from kvferry.fleet.control.controller import Controller, Detached, End
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.processes.process import ProcessSpec
from kvferry.fleet.spec.fleet_spec import Backend, DesiredFleet, MemberRole, fleet_from
from support.waiting import eventually
from support.warm import Program

pytestmark = [
    pytest.mark.processes,
    pytest.mark.full,
    pytest.mark.timeout(4 * 3600),
    pytest.mark.usefixtures("leaves_nobody"),
]

NUM_CHANGES = max(100, int(os.environ.get("KVFERRY_FAULTS", "0")))
SEED = int(os.environ.get("KVFERRY_SEED", "1"))
_PR_SET_CHILD_SUBREAPER = 36
NAME = "changes"
MARK = "KVFERRY_TEST_CHANGES"
ROLES: tuple[MemberRole, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class Recipe:
    """Makes what runs the members, each of which is known by its `token`. Actors get it too."""

    token: str

    def __call__(self, fleet: DesiredFleet) -> Programs:
        makes: dict[MemberRole, Make] = dict.fromkeys((*ROLES, "router"), self._member)
        return Programs(fleet, makes)

    def _member(self, name: str) -> ProcessSpec:
        return child(name, ANSWERING, environment={MARK: self.token})


class Place:
    """Where members are: on this machine, each in a folder of the fleet's."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.backend = Backend()
        self.settles_s = 60.0
        self.token = f"{MARK}-{os.getpid()}-{id(self)}"

    def processes(self) -> set[int]:
        """All members that run, whoever knows of them."""
        found = set()
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                if one.status() != psutil.STATUS_ZOMBIE and one.environ().get(MARK) == self.token:
                    found.add(one.pid)
        return found

    def member_folder(self, name: str) -> Path | None:
        return self.folder / "memory" / "members" / name

    def pid(self, name: str) -> int | None:
        """Of the member."""
        folder = self.member_folder(name)
        return None if folder is None else MemberFolder(folder).pid()

    def any_pid(self, name: str) -> int | None:
        """Of the member, or of what owns it."""
        return self.pid(name)

    def kept(self) -> list[str]:
        """The names of those of whom there is anything beside a process."""
        return sorted(one.name for one in (self.folder / "memory" / "members").iterdir())


class OnRay(Place):
    """Members are actors on the nodes of a cluster."""

    def __init__(self, folder: Path, rng: random.Random, nodes: Any) -> None:
        super().__init__(folder, rng)
        self.nodes = nodes
        self.settles_s = 180.0  # an actor that is stopped may stay for a minute
        self.backend = Backend(kind="ray", address=nodes.address)

    def member_folder(self, name: str) -> Path | None:
        from kvferry.fleet.backends.ray.actor import root_folder

        actor, _ = self.nodes.members().get(name, (0, 0))
        return next(root_folder().glob(f"{actor}-*/member"), None)

    def any_pid(self, name: str) -> int | None:
        return self.rng.choice(self.nodes.members().get(name, (None, None)))

    def kept(self) -> list[str]:
        import ray

        found = ray.util.list_named_actors(all_namespaces=True)
        return sorted(one["name"].rpartition(".")[0] for one in found if one["namespace"] == f"kvferry-{NAME}")

    def to_lose(self) -> list[Any]:
        """All nodes but that of Ray's control service, where the controller and the routers are."""
        return [one for one in self.nodes.cluster.list_all_nodes() if one is not self.nodes.head]


def wanted(rng: random.Random, backend: Backend) -> DesiredFleet:
    counts = {role: {"count": rng.randint(0, 3), "max": 4} for role in ROLES}
    counts["prefill"]["can_be"], counts["decode"]["can_be"] = ["decode"], ["prefill"]
    surge = rng.randint(0, 2)
    told = {
        "name": NAME,
        "model": rng.choice("mn"),
        "mode": "pooling",
        "role": counts,
        "router": {"count": 1, "port": 0},
        "roll": {"surge": surge, "unavailable": rng.randint(1, 2) if surge else 4},  # else some could never end
        "failure": {"backoff": ["10ms", "50ms"], "hang": "1s", "drain": "300ms", "start": "20s", "crash_loop": 4000},
    }
    return msgspec.structs.replace(fleet_from(told), backend=backend)


class Changing:
    """A fleet, and one controller at a time."""

    def __init__(self, place: Place) -> None:
        self.place, self.rng = place, place.rng
        self.ledger, self.front = Ledger(place.folder / "ledger"), MemoryFront()
        self.ledger.apply(wanted(self.rng, place.backend))
        self.running: asyncio.Task[End] | None = None

    # The controller.

    async def begin(self) -> None:
        recipe, memory = Recipe(self.place.token), self.place.folder / "memory"
        context = BackendContext(memory, recipe, RecordingDisplay(), token="a token")
        self.backend = backend_class(self.place.backend.kind)(context)
        self.controller = Controller(self.ledger, self.backend, self.front, RecordingDisplay(), SYSTEM_CLOCK)
        self.running = asyncio.create_task(self.controller.run())

    async def end(self, *, at_once: bool = False, members_too: bool = False) -> None:
        """`at_once`: in the middle of whatever it is doing."""
        assert self.running is not None
        if at_once:
            self.running.cancel()
        else:
            self.controller.end(Detached())
        with suppress(asyncio.CancelledError):
            await self.running
        if members_too:
            await self.controller.shut_down()
        await self.backend.close()
        self.controller.close()

    # What runs.

    def pid(self, role: MemberRole | None = None) -> int | None:
        """Of one of the members at random, or of what owns it."""
        names = [one.name for one in self.backend.members() if role in (None, one.role)]
        if not names:
            return None
        return self.place.any_pid(self.rng.choice(names))

    async def settle(self) -> None:
        """Until all is as it is to be; then exactly the members' processes run."""
        self.front.busy.clear()
        self.change(roll={"pause": False})
        try:
            async with asyncio.timeout(self.place.settles_s):
                while not self._is_settled():
                    assert self.running is not None
                    if self.running.done():
                        self.running.result()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"it does not settle: {self.place.kept()}, {self.ledger.status()}") from None
        names = {one.name for one in self.backend.members()}
        assert self.place.processes() == {*map(self.place.pid, names)}

    def _is_settled(self) -> bool:
        seen = self.ledger.status()
        if seen is None or not seen.settled or seen.number != self.ledger.desired_state().number:
            return False
        members = self.backend.members()  # one that was killed just now has not been seen to end yet
        names = sorted(one.name for one in members)
        return len(names) == len(seen.members) == len(self.place.processes()) and names == self.place.kept()

    # What changes.

    def change(self, **tables: dict[str, object]) -> None:
        def changed(before: object) -> DesiredFleet:
            fleet = self.ledger.desired_state().fleet
            parts = {name: msgspec.structs.replace(getattr(fleet, name), **told) for name, told in tables.items()}
            return msgspec.structs.replace(fleet, **parts)

        self.ledger.change(changed)

    async def kill(self) -> None:
        self._signal(self.pid(), signal.SIGKILL)

    async def stop(self) -> None:
        self._signal(self.pid(), signal.SIGSTOP)

    async def terminate(self) -> None:
        self._signal(self.pid(), signal.SIGTERM)

    async def kill_router(self) -> None:
        self._signal(self.pid("router"), signal.SIGKILL)

    async def kill_all(self) -> None:
        for pid in self.place.processes():
            self._signal(pid, signal.SIGKILL)

    async def apply(self) -> None:
        self.ledger.apply(wanted(self.rng, self.place.backend))

    async def roll(self) -> None:
        stamp = str(self.rng.random())
        self.ledger.change(lambda before: msgspec.structs.replace(before.fleet, stamp=stamp))

    async def roll_back(self) -> None:
        if earlier := self.ledger.desired_state().earlier:
            self.ledger.change(lambda _: earlier[0])

    async def pause(self) -> None:
        self.change(roll={"pause": self.rng.random() < 0.5})

    async def requests(self) -> None:
        """They run on some of the instances, which drain until `failure.drain`."""
        names = [one.name for one in self.backend.members()]
        self.front.busy = set(self.rng.sample(names, len(names) // 2))

    async def routers_hang(self) -> None:
        self.front.answers = False
        await asyncio.sleep(0.3)
        self.front.answers = True

    async def folder_goes(self) -> None:
        """As where what a user has in memory is removed at logout."""
        names = [one.name for one in self.backend.members()]
        if names and (folder := self.place.member_folder(self.rng.choice(names))) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            await asyncio.sleep(2.5)  # it is written anew before anybody else looks for it

    async def clock_is_set(self) -> None:
        """The wall clock, by an hour. Nothing has a deadline by it."""
        step_s = self.rng.choice([-3600.0, 0.0, 3600.0])
        SYSTEM_CLOCK.wall = lambda: time.time() + step_s  # type: ignore[method-assign]

    async def another_controller(self) -> None:
        await self.end(at_once=self.rng.random() < 0.5)
        await self.begin()

    async def lose_node(self) -> None:
        """While a controller looks, which is then replaced if there are to be more nodes: Ray starts them in the main
        thread only, and takes seconds for it."""
        place = self.place
        assert isinstance(place, OnRay)
        node = self.rng.choice(place.to_lose())
        await asyncio.to_thread(lambda: place.nodes.cluster.remove_node(node, allow_graceful=False))
        if len(place.to_lose()) < 2:
            await asyncio.sleep(self.rng.choice([0.0, 5.0]))
            await self.end(at_once=True)
            place.nodes.add()
            place.nodes.add()
            await self.begin()

    def _signal(self, pid: int | None, number: int) -> None:
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


async def test_whatever_happens_exactly_what_is_wanted_runs_in_the_end(tmp_path: Path) -> None:
    await change_at_random(Place(tmp_path, random.Random(SEED)), NUM_CHANGES)


def has_begun(controller: Program) -> bool:
    return bool(controller.output) or controller.process.poll() is not None


async def test_controllers_that_are_killed_at_any_moment_start_nobody_twice(tmp_path: Path) -> None:
    """Between the start of a process and its record, for one: each is a process of its own, and ends by SIGKILL a
    moment after it has begun to follow a change."""
    place = Place(tmp_path, random.Random(SEED))
    fleet = Changing(place)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # in a container, there may be nobody else who reaps orphans
    try:
        for number in range(NUM_CHANGES // 5):
            await place.rng.choice([fleet.apply, fleet.roll, fleet.kill_all, fleet.apply])()
            folder = tmp_path / f"controller-{number}"
            controller = Program(CONTROL.format(folder=str(tmp_path), token=place.token), folder)
            await eventually(partial(has_begun, controller))
            await asyncio.sleep(place.rng.uniform(0.0, 0.6))
            assert controller.process.poll() is None, (folder / "errors").read_text()
            controller.process.kill()
            controller.process.wait(30)
            if number % 5 == 4:
                await fleet.begin()
                await fleet.settle()
                await fleet.end()
    finally:
        await fleet.begin()
        await fleet.end(members_too=True)
        left = place.processes()
        await fleet.kill_all()
    assert not left
    assert place.kept() == []


CONTROL = """
import asyncio
from pathlib import Path
from fleet.test_random_changes import control
asyncio.run(control(Path({folder!r}), {token!r}))
"""


async def control(folder: Path, token: str) -> None:
    """For ever."""
    ledger = Ledger(folder / "ledger")
    context = BackendContext(folder / "memory", Recipe(token), RecordingDisplay(), token="a token")
    backend = backend_class("local")(context)
    print("begins", flush=True)
    await Controller(ledger, backend, MemoryFront(), RecordingDisplay(), SYSTEM_CLOCK).run()


async def test_on_ray_too_and_nodes_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    import ray

    from support.ray_nodes import ray_nodes

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))  # actors are sent what this folder has
    with ray_nodes(3) as nodes:
        ray.init(nodes.address, log_to_driver=False)
        try:
            await change_at_random(OnRay(tmp_path, random.Random(SEED), nodes), NUM_CHANGES // 4)
        finally:
            ray.shutdown()


async def change_at_random(place: Place, number: int) -> None:
    fleet = Changing(place)
    common = [fleet.kill, fleet.stop, fleet.terminate, fleet.kill_router, fleet.apply, fleet.roll, fleet.roll_back]
    changes = [*common * 2, fleet.kill_all, fleet.pause, fleet.requests, fleet.routers_hang]
    changes += [fleet.folder_goes, fleet.clock_is_set, fleet.another_controller, fleet.another_controller]
    if isinstance(place, OnRay):
        changes += [fleet.lose_node] * 2
    done: list[str] = []
    await fleet.begin()
    try:
        for at in range(number):
            change = place.rng.choice(changes)
            done.append(change.__name__)
            await change()
            await asyncio.sleep(place.rng.choice([0.0, 0.0, 0.05, 0.3]))
            if at % 10 == 9:
                await fleet.settle()
        await fleet.settle()
    except AssertionError as error:
        raise AssertionError(f"after {done}") from error
    finally:
        SYSTEM_CLOCK.wall = time.time  # type: ignore[method-assign]
        await fleet.end(members_too=True)
        left = place.processes()
        await fleet.kill_all()
    assert not left, f"after {done}"
    assert place.kept() == []
