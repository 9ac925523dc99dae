"""The end of a simulation: nothing of it is left, however it ends."""

import asyncio
import gc
import logging
import sys
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from hunts.faults import FaultInjector
from hunts.scenario import draw, run
from kvferry.connectors.p2p.worker import P2pWorkerSide
from kvferry.sim.loop import SimLoop, Simulation
from kvferry.sim.network import Network, NetworkSpec
from kvferry.sim.world import World
from support.planted import planted


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever the collector finds afterwards is an error: a coroutine that goes on, or one that nobody has awaited."""
    found: list[Any] = []
    num_before = _num_simulations()
    monkeypatch.setattr(sys, "unraisablehook", lambda about: found.append((about.object, about.exc_value)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield
        gc.collect()
    assert not found
    assert _num_simulations() <= num_before


@pytest.fixture(autouse=True)
def loggers_have_logged_before() -> None:
    """What a logger is enabled for is remembered; a warning that is kept would keep its exception, with all frames."""
    for name in list(logging.getLogger().manager.loggerDict):
        logging.getLogger(name).isEnabledFor(logging.WARNING)


def _num_simulations() -> int:
    return sum(isinstance(one, Simulation) for one in gc.get_objects())


@pytest.mark.parametrize("seed", [4, 9])
def test_of_a_scenario(seed: int) -> None:
    assert not run(draw(seed)).violations


def test_of_a_scenario_that_cannot_shut_down() -> None:
    with planted(P2pWorkerSide, "close", lambda self: None):
        assert run(draw(1)).violations


@pytest.mark.parametrize("seconds", [0.4, 1.3, 2.0, 4.0])
@pytest.mark.parametrize(("seed", "num_cores"), [(2, 0), (7, 0), (7, 1)])
def test_of_a_world_that_is_dropped_while_it_runs(seed: int, num_cores: int, seconds: float) -> None:
    scenario = draw(seed)
    world = World(replace(scenario.world, num_cores=num_cores), seed)

    def run_a_little() -> None:
        with world.running():
            world.submit(scenario.requests)
            FaultInjector(world).schedule(scenario.faults)
            world.run_for(seconds)
            raise KeyError

    with pytest.raises(KeyError):
        run_a_little()


async def _holds_on() -> None:
    """Waits on its way out, again and again."""
    for _ in range(3):
        try:
            await asyncio.sleep(10.0)
        finally:
            await asyncio.sleep(1.0)


async def _has_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_holds_on())
        await asyncio.Event().wait()


async def _begins_something_at_its_end() -> None:
    try:
        await asyncio.Event().wait()
    finally:
        asyncio.get_running_loop().create_task(_holds_on())


async def _reads_a_generator() -> None:
    async def numbers() -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 1
                await asyncio.sleep(1.0)
        finally:
            await asyncio.sleep(1.0)

    async for _ in numbers():
        pass


@pytest.mark.parametrize("job", [_holds_on, _has_a_group, _begins_something_at_its_end, _reads_a_generator])
@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_of_a_task(job: Callable[[], Any], crashes: bool, seconds: float) -> None:
    simulation = Simulation(1)
    process = Network(simulation, NetworkSpec()).host("a").process("a")
    loop: SimLoop = process.thread("thread")
    with simulation.running():
        tasks = [loop.create_task(job()) for _ in range(3)]
        simulation.run_until(lambda: False, until=seconds)
        if crashes:
            process.crash()
    assert all(task.get_coro().cr_frame is None for task in tasks)  # type: ignore[union-attr]
    assert not process.tasks()
