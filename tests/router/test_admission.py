"""Whose turn it is, when more is asked for than is done at once."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack

import pytest

from kvferry.core.errors import QueueFull
from kvferry.router.admission import Admission


class Crowd:
    """Requests of several tenants; `order` is that in which they had their turns."""

    def __init__(self, admission: Admission) -> None:
        self.admission, self.order = admission, list[str]()
        self.refused = list[str]()
        self.go = asyncio.Event()
        self.tasks = list[asyncio.Task[None]]()

    async def ask(self, name: str) -> asyncio.Task[None]:
        """One request, of the tenant that is its first letter; returns when it has its turn, or waits."""
        task = asyncio.create_task(self._run(name))
        self.tasks.append(task)
        await asyncio.sleep(0)
        return task

    async def _run(self, name: str) -> None:
        try:
            async with self.admission.turn(name[:1].encode()):
                self.order.append(name)
                await self.go.wait()
        except QueueFull:
            self.refused.append(name)

    async def end(self) -> None:
        """All have their turn, one after the other."""
        self.go.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.admission.check()


async def test_tenants_have_turns_in_rotation() -> None:
    crowd = Crowd(Admission(1, 10, max_waiting=100, wait_s=60))
    for name in ("a0", "a1", "a2", "a3", "b0", "b1", "c0"):
        await crowd.ask(name)
    await crowd.end()
    assert crowd.order == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


async def test_when_too_many_wait_it_is_the_greediest_who_is_refused() -> None:
    crowd = Crowd(Admission(1, 10, max_waiting=4, wait_s=60))
    for name in ("a0", "a1", "a2", "a3", "a4", "b0", "c0", "b1", "b2", "a5"):
        await crowd.ask(name)
    assert sorted(crowd.refused) == ["a3", "a4", "a5", "b1", "b2"]
    await crowd.end()
    assert crowd.order[:4] == ["a0", "a1", "b0", "c0"]


async def test_one_tenant_alone_is_refused_when_its_line_is_full() -> None:
    crowd = Crowd(Admission(1, 10, max_waiting=2, wait_s=60))
    for name in ("a0", "a1", "a2", "a3"):
        await crowd.ask(name)
    assert crowd.refused == ["a3"]
    await crowd.end()


async def test_without_a_line_nobody_waits() -> None:
    crowd = Crowd(Admission(1, 10, max_waiting=0))
    await crowd.ask("a0")
    with pytest.raises(QueueFull):
        async with crowd.admission.turn(b"b"):
            pass
    await crowd.end()


async def test_whoever_leaves_at_whatever_moment_keeps_no_turn() -> None:
    dice = random.Random(5)
    crowd = Crowd(Admission(3, 10, max_waiting=8, wait_s=60))
    for number in range(300):
        task = await crowd.ask(f"{dice.choice('abcd')}{number}")
        if dice.random() < 0.5:
            dice.choice([task, dice.choice(crowd.tasks)]).cancel()
        if dice.random() < 0.3:
            crowd.go.set()
            await asyncio.sleep(0)
            crowd.go.clear()
        assert crowd.admission.num_requests <= 3
        assert crowd.admission.num_waiting <= 8
    await crowd.end()


async def test_a_wait_has_its_end() -> None:
    crowd = Crowd(Admission(1, 10, max_waiting=3, wait_s=0.01))
    await crowd.ask("a0")
    waiting = await crowd.ask("b0")
    await waiting
    assert crowd.refused == ["b0"]
    await crowd.end()


def test_bodies_that_are_not_whole_are_bounded_for_each_client() -> None:
    admission = Admission(1, 100)
    with ExitStack() as stack:
        begun = [stack.enter_context(admission.hold("a")) for _ in range(3)]
        begun[0].grow(30)
        begun[1].grow(20)
        with pytest.raises(QueueFull, match="this client has begun"):
            begun[2].grow(1)
        other = stack.enter_context(admission.hold("b"))
        other.grow(40)
        begun[0].whole()  # it still takes its bytes, but waits for nothing
        begun[2].grow(10)
        with pytest.raises(QueueFull, match="as many request bodies as it may"):
            other.grow(1)
    admission.check()
    assert not admission.unfinished


def test_the_longest_body_is_admitted_however_little_may_be_held() -> None:
    admission = Admission(1, 100, least_unfinished_bytes=100)
    with admission.hold("a") as slot:
        slot.grow(100)
    admission.check()
