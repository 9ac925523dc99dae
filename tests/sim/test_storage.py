"""Simulated files, shared memory and threads, by themselves."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import StoreError
from kvferry.sim.loop import SimProcess, Simulation
from kvferry.sim.machine import SimCore, SimMachine
from kvferry.sim.network import Network, NetworkSpec
from kvferry.sim.storage import Storage
from kvferry.sim.times import MediumTimes, StoreTimes
from kvferry.store.access import OWNER
from kvferry.store.base import PutResult
from kvferry.store.record import CorruptBlock
from kvferry.store.table import find_store
from kvferry.store.threads import Stop
from kvferry.testing.stores import LAYOUT, block_of, names_of

TIMES = StoreTimes(file=MediumTimes(0.01, read_bandwidth=100.0, write_bandwidth=50.0))


class Place:
    """A simulation with one host, and processes on it."""

    def __init__(self) -> None:
        self.simulation = Simulation(1)
        self._network = Network(self.simulation, NetworkSpec())
        self.storage = Storage(self.simulation, TIMES)

    def process(self, name: str) -> SimProcess:
        return self._network.host(name).process(name)

    def run(self, process: SimProcess, use: Callable[[SimMachine], Coroutine[Any, Any, None]]) -> None:
        """Until it is over."""
        loop = process.thread("test")
        machine, tasks = SimMachine(self.storage, process, 1.0), list[asyncio.Task[None]]()
        loop.call_soon(lambda: tasks.append(loop.create_task(use(machine))))
        self.simulation.run_until(lambda: bool(tasks) and tasks[0].done())
        tasks[0].result()


def _write(machine: SimMachine, path: str, content: bytes) -> Callable[[Stop], None]:
    return lambda stop: machine.disk.write(path, [memoryview(content)], OWNER)


def test_bytes_take_the_time_of_the_medium_and_come_back() -> None:
    place = Place()

    async def use(machine: SimMachine) -> None:
        threads, now = machine.threads(1, "some"), asyncio.get_running_loop().time
        await threads.run(_write(machine, "/kv/one", b"x" * 100))
        assert now() == pytest.approx(2.01)

        def read(stop: Stop) -> bytes:
            into = bytearray(100)
            with machine.disk.open("/kv/one") as file:
                machine.disk.read(file, [memoryview(into)], 0)
                with pytest.raises(CorruptBlock):
                    machine.disk.read(file, [memoryview(into)], 1)
            return bytes(into)

        assert await threads.run(read) == b"x" * 100
        assert now() == pytest.approx(2.01 + 2 * 1.01)
        assert [path.name for path in machine.disk.glob(Path("/kv"), "o*")] == ["one"]
        assert machine.disk.remove("/kv/one")
        with pytest.raises(FileNotFoundError):
            machine.disk.is_readable("/kv/one")

    with place.simulation.running():
        place.run(place.process("a"), use)


def test_a_file_is_there_when_it_is_complete_and_a_crash_leaves_a_temporary_one() -> None:
    place = Place()
    with place.simulation.running():
        first, second = place.process("a"), place.process("b")

        async def begin(machine: SimMachine) -> None:
            task = asyncio.create_task(machine.threads(1, "some").run(_write(machine, "/kv/one", b"x" * 100)))
            await asyncio.sleep(1.0)
            assert not task.done()

        async def look(machine: SimMachine) -> None:
            [left] = machine.disk.glob(Path("/kv"), "*")
            assert left.suffix == ".tmp"
            assert not machine.disk.is_stale(left, 0.0)
            first.crash()
            assert machine.disk.is_stale(left, 0.0)

        place.run(first, begin)
        place.run(second, look)


def test_a_call_that_is_given_up_makes_room_for_another_and_goes_on() -> None:
    place = Place()

    async def use(machine: SimMachine) -> None:
        threads = machine.threads(1, "some")
        place.storage.disk.hangs_until = 5.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await threads.run(_write(machine, "/kv/one", b"x"))
        assert await threads.run(lambda stop: 7) == 7
        await asyncio.sleep(5.0)
        assert machine.disk.exists("/kv/one")
        threads.close()
        with pytest.raises(StoreError):
            await threads.run(lambda stop: 7)

    with place.simulation.running():
        place.run(place.process("a"), use)


def test_a_full_disk_takes_nothing_and_keeps_nothing() -> None:
    place = Place()

    async def use(machine: SimMachine) -> None:
        place.storage.full_until = 1.0
        with pytest.raises(OSError, match="No space"):
            await machine.threads(1, "some").run(_write(machine, "/kv/one", b"x"))
        assert not machine.disk.glob(Path("/kv"), "*")

    with place.simulation.running():
        place.run(place.process("a"), use)


def test_memory_is_shared_and_is_lost_with_the_last_process() -> None:
    place = Place()
    with place.simulation.running():
        one, other, late = (SimMachine(place.storage, place.process(name), 1.0) for name in "abc")
        first, second = one.arena("kv", 64), other.arena("kv", 64)
        first.buffer[3] = 9
        assert second.buffer[3] == 9
        assert second.is_alive(first.identity)
        one.process.crash()
        assert not second.is_alive(first.identity)
        assert late.arena("kv", 64).buffer[3] == 9
        other.process.crash()
        late.process.crash()
        assert SimMachine(place.storage, place.process("d"), 1.0).arena("kv", 64).buffer[3] == 0


def test_a_pin_that_was_given_up_while_the_disk_hung_is_not_made_afterwards() -> None:
    place = Place()

    async def use(machine: SimMachine) -> None:
        store = find_store("file:/kv").make(LAYOUT, machine)
        await store.open()
        assert await store.put([block_of(0)]) == [PutResult.STORED]
        hangs_until = place.storage.disk.hangs_until = asyncio.get_running_loop().time() + 5.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await store.pin(names_of(1))
        await asyncio.sleep(hangs_until + 60.0)
        assert not any(name.endswith(".pin") for _, name, _ in place.storage.files())
        assert await store.pin(names_of(1)) == 1
        assert any(name.endswith(".pin") for _, name, _ in place.storage.files())
        await store.close()

    with place.simulation.running():
        place.run(place.process("a"), use)


def test_steps_on_one_core_share_it() -> None:
    place, ended = Place(), dict[str, float]()
    core = SimCore(place.process("outside").thread("core"))

    def begin(name: str, at_s: float, seconds: float, crashes_at_s: float | None = None) -> None:
        process = place.process(name)
        loop = process.thread("engine")

        async def compute() -> None:
            await asyncio.sleep(at_s)
            await core.compute(seconds)
            ended[name] = loop.time()

        loop.call_soon(lambda: loop.create_task(compute()))
        if crashes_at_s is not None:
            other = place.process(f"{name} is killed").thread("main")
            other.call_at(crashes_at_s, process.crash)

    begin("first", 0.0, 2.0)
    begin("second", 1.0, 0.5)  # half as fast as alone: until 2
    begin("killed", 2.0, 9.0, crashes_at_s=2.5)
    begin("last", 4.0, 1.0)  # alone
    place.simulation.run_until(lambda: len(ended) == 3, until=10.0)
    assert ended == pytest.approx({"second": 2.0, "first": 2.75, "last": 5.0})
