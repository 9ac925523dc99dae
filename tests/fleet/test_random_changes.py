"""A controller, its ledger and its backend, with members that are real processes of a few lines: they are killed,
stopped and scaled, rolled and given other roles at random, in the middle of each other. In between, and in the end,
exactly those processes run that are wanted, and nothing is left of any other.

`KVFERRY_FAULTS` says how many changes (100 at least; thousands in `make soak`), `KVFERRY_SEED` which.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from fleet.children import child
from fleet.control.memory import MemoryFront
from fleet.fleets import Programs
from fleet.recording import RecordingDisplay
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.fleet.backends.local.backend import LocalBackend
from kvferry.fleet.backends.local.folder import MemberFolder
from kvferry.fleet.control.backend import BackendContext
from kvferry.fleet.control.controller import Controller, End, LetGo
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.control.spec import MemberRole, WantedFleet, fleet_from
from kvferry.fleet.process import ProcessSpec

pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(4 * 3600)]

NUM_CHANGES = max(100, int(os.environ.get("KVFERRY_FAULTS", "0")))
SEED = int(os.environ.get("KVFERRY_SEED", "1"))
SETTLES_S = 60.0
MARK = "KVFERRY_TEST_CHANGES"
ROLES: tuple[MemberRole, ...] = ("prefill", "decode")

MEMBER = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    url = f"http://127.0.0.1:{server.getsockname()[1]}"
    writer.ready({"url": url, "health_url": url})
    while True:
        with server.accept()[0] as client:
            client.recv(4096)
            client.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
"""
"""Answers everything with 200."""


def wanted(dice: random.Random) -> WantedFleet:
    counts = {role: {"count": dice.randint(0, 3), "max": 4} for role in ROLES}
    counts["prefill"]["can_be"], counts["decode"]["can_be"] = ["decode"], ["prefill"]
    told = {
        "name": "changes",
        "model": dice.choice("mn"),
        "mode": "pooling",
        "role": counts,
        "router": {"count": 1, "port": 0},
        "roll": {"surge": dice.randint(0, 2), "unavailable": dice.randint(1, 2)},
        "failure": {"backoff": ["10ms", "50ms"], "hang": "1s", "drain": "300ms", "crash_loop": 4000},
    }
    return fleet_from(told)


class Changing:
    """A fleet, and one controller at a time."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.folder, self.dice = folder, dice
        self.ledger, self.front = Ledger(folder / "ledger"), MemoryFront()
        self.ledger.want(wanted(dice))
        self.token = f"{MARK}-{os.getpid()}-{id(self)}"
        self.running: asyncio.Task[End] | None = None

    # The controller.

    async def begin(self) -> None:
        context = BackendContext(self.folder / "memory", self._recipe, RecordingDisplay())
        self.backend = LocalBackend(context)
        self.controller = Controller(self.ledger, self.backend, self.front, RecordingDisplay(), SYSTEM_CLOCK)
        self.running = asyncio.create_task(self.controller.run())

    async def end(self, *, at_once: bool = False, members_too: bool = False) -> None:
        """`at_once`: in the middle of whatever it is doing."""
        assert self.running is not None
        if at_once:
            self.running.cancel()
        else:
            self.controller.end(LetGo())
        with suppress(asyncio.CancelledError):
            await self.running
        if members_too:
            await self.controller.bring_down()
        await self.backend.close()
        self.controller.close()

    def _recipe(self, fleet: WantedFleet) -> Programs:
        makes = dict.fromkeys((*ROLES, "router"), self._member)
        return Programs(fleet, makes)  # type: ignore[arg-type]

    def _member(self, name: str) -> ProcessSpec:
        return child(name, MEMBER, environment={MARK: self.token})

    # What runs.

    def processes(self) -> set[int]:
        """All that this fleet has started and that run, whoever knows of them."""
        found = set()
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                if one.status() != psutil.STATUS_ZOMBIE and one.environ().get(MARK) == self.token:
                    found.add(one.pid)
        return found

    def pid(self, role: MemberRole | None = None) -> int | None:
        """Of one of the members at random."""
        names = [one.name for one in self.backend.members() if role in (None, one.role)]
        if not names:
            return None
        return MemberFolder(self.folder / "memory" / "members" / self.dice.choice(names)).pid()

    async def settle(self) -> None:
        """Until all is as it is to be; then exactly the members' processes run."""
        self.front.busy.clear()
        self.change(roll={"pause": False})
        try:
            async with asyncio.timeout(SETTLES_S):
                while not self._is_settled():
                    assert self.running is not None
                    if self.running.done():
                        self.running.result()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"it does not settle: {self.ledger.status()}") from None
        members = {MemberFolder(self.folder / "memory" / "members" / one.name).pid() for one in self.backend.members()}
        assert self.processes() == members

    def _is_settled(self) -> bool:
        seen = self.ledger.status()
        if seen is None or not seen.settled or seen.number != self.ledger.wanted().number:
            return False
        members = self.backend.members()  # one that was killed just now has not been seen to end yet
        return len(members) == len(seen.members) == len(self.processes())

    # What changes.

    def change(self, **tables: dict[str, object]) -> None:
        def changed(before: object) -> WantedFleet:
            fleet = self.ledger.wanted().fleet
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
        for pid in self.processes():
            self._signal(pid, signal.SIGKILL)

    async def apply(self) -> None:
        self.ledger.want(wanted(self.dice))

    async def roll(self) -> None:
        stamp = str(self.dice.random())
        self.ledger.change(lambda before: msgspec.structs.replace(before.fleet, stamp=stamp))

    async def roll_back(self) -> None:
        if earlier := self.ledger.wanted().earlier:
            self.ledger.change(lambda _: earlier[0])

    async def pause(self) -> None:
        self.change(roll={"pause": self.dice.random() < 0.5})

    async def requests(self) -> None:
        """They run on some of the instances, which drain until `failure.drain`."""
        names = [one.name for one in self.backend.members()]
        self.front.busy = set(self.dice.sample(names, len(names) // 2))

    async def routers_hang(self) -> None:
        self.front.answers = False
        await asyncio.sleep(0.3)
        self.front.answers = True

    async def folder_goes(self) -> None:
        """As where what a user has in memory is removed at logout."""
        names = [one.name for one in self.backend.members()]
        if names:
            shutil.rmtree(self.folder / "memory" / "members" / self.dice.choice(names), ignore_errors=True)
            await asyncio.sleep(2.5)  # it is written anew before anybody else looks for it

    async def another_controller(self) -> None:
        await self.end(at_once=self.dice.random() < 0.5)
        await self.begin()

    def _signal(self, pid: int | None, number: int) -> None:
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


async def test_whatever_happens_exactly_what_is_wanted_runs_in_the_end(tmp_path: Path) -> None:
    dice = random.Random(SEED)
    fleet = Changing(tmp_path, dice)
    common = [fleet.kill, fleet.stop, fleet.terminate, fleet.kill_router, fleet.apply, fleet.roll, fleet.roll_back]
    changes = [*common * 2, fleet.kill_all, fleet.pause, fleet.requests, fleet.routers_hang]
    changes += [fleet.folder_goes, fleet.another_controller, fleet.another_controller]
    done: list[str] = []
    await fleet.begin()
    try:
        for number in range(NUM_CHANGES):
            change = dice.choice(changes)
            done.append(change.__name__)
            await change()
            await asyncio.sleep(dice.choice([0.0, 0.0, 0.05, 0.3]))
            if number % 10 == 9:
                await fleet.settle()
        await fleet.settle()
    except AssertionError as error:
        raise AssertionError(f"after {done}") from error
    finally:
        await fleet.end(members_too=True)
        left = fleet.processes()
        await fleet.kill_all()
    assert not left, f"after {done}"
