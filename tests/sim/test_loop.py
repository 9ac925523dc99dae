"""The virtual clock, the order of callbacks, and the end of processes."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.sim.loop import EPOCH_S, Deadlock, SimLoop, Simulation
from kvferry.sim.network import Network, NetworkSpec


def _start(loop: SimLoop, job: Coroutine[Any, Any, Any]) -> "list[asyncio.Task[Any]]":
    tasks: list[asyncio.Task[Any]] = []
    loop.call_soon(lambda: tasks.append(loop.create_task(job)))
    return tasks


def _threads(simulation: Simulation, number: int) -> list[SimLoop]:
    process = Network(simulation, NetworkSpec()).host("a").process("a")
    return [process.thread(str(place)) for place in range(number)]


def test_time_jumps_to_the_next_timer() -> None:
    simulation, woken = Simulation(1), list[float]()
    [loop] = _threads(simulation, 1)

    async def sleep() -> None:
        for seconds in (3600.0, 0.001):
            await asyncio.sleep(seconds)
            woken.append(loop.time())
        woken.append(SYSTEM_CLOCK.wall() - EPOCH_S)

    with simulation.running():
        tasks = _start(loop, sleep())
        simulation.run_until(lambda: bool(tasks) and tasks[0].done())
    assert woken == pytest.approx([3600.0, 3600.001, 3600.001])


def test_what_waits_for_ever_is_told() -> None:
    simulation = Simulation(1)
    [loop] = _threads(simulation, 1)
    with simulation.running():
        tasks = _start(loop, asyncio.Event().wait())
        with pytest.raises(Deadlock):
            simulation.run_until(lambda: bool(tasks) and tasks[0].done())
        tasks[0].cancel()
        simulation.run_until(tasks[0].done)


def test_a_thread_wakes_up_after_its_time_and_keeps_the_order_of_what_it_was_given() -> None:
    simulation, order = Simulation(3), list[int]()
    one, other = _threads(simulation, 2)
    other.wake_s = 0.5

    def give() -> None:
        for number in range(20):
            other.call_soon_threadsafe(order.append, number)

    with simulation.running():
        one.call_soon(give)
        simulation.run_until(lambda: len(order) == 20)
    assert order == list(range(20))
    assert simulation.now == 0.5


def _order(seed: int) -> list[str]:
    simulation, order = Simulation(seed), list[str]()
    loops = _threads(simulation, 3)
    with simulation.running():
        for loop in loops:
            for number in range(4):
                loop.call_soon(order.append, f"{loop.name}{number}")
        simulation.run_until(lambda: len(order) == 12)
    return order


def test_one_loop_keeps_its_order_and_the_seed_decides_between_loops() -> None:
    orders = [_order(seed) for seed in range(20)]
    for order in orders:
        for name in ("a/0", "a/1", "a/2"):
            assert [one for one in order if one.startswith(name)] == [f"{name}{number}" for number in range(4)]
    assert len({tuple(order) for order in orders}) > 10
    assert orders == [_order(seed) for seed in range(20)]


def test_timers_that_are_due_together_come_in_any_order() -> None:
    seen = set()
    for seed in range(20):
        simulation, order = Simulation(seed), list[int]()
        [loop] = _threads(simulation, 1)
        with simulation.running():
            for number in range(3):
                loop.call_at(1.0, order.append, number)
            simulation.run_until(lambda: len(order) == 3)  # noqa: B023
        seen.add(tuple(order))
    assert len(seen) > 3


def test_a_stalled_process_runs_later() -> None:
    simulation, seen = Simulation(1), list[tuple[int, float]]()
    [loop] = _threads(simulation, 1)
    with simulation.running():
        loop.process.stall(5.0)
        for number in range(3):
            loop.call_later(number, lambda number=number: seen.append((number, loop.time())))
        simulation.run_until(lambda: len(seen) == 3)
    assert sorted(seen) == [(0, 5.0), (1, 5.0), (2, 5.0)]


def test_nothing_of_a_process_runs_after_its_crash() -> None:
    simulation, seen = Simulation(1), list[str]()
    [loop] = _threads(simulation, 1)

    async def work() -> None:
        try:
            await asyncio.sleep(10.0)
            seen.append("went on")
        finally:
            await asyncio.sleep(0)
            seen.append("said something")

    with simulation.running():
        _start(loop, work())
        simulation.run_until(lambda: False, until=1.0)
        loop.process.crash()
        loop.call_soon(seen.append, "was called")
        simulation.run_until(lambda: False, until=20.0)
        assert seen == []
    assert seen == []


def test_executors_run_at_once() -> None:
    simulation = Simulation(1)
    [loop] = _threads(simulation, 1)
    with simulation.running():
        tasks = _start(loop, asyncio.to_thread(sum, [1, 2]))
        simulation.run_until(lambda: bool(tasks) and tasks[0].done())
        assert (tasks[0].result(), simulation.now) == (3, 0.0)
