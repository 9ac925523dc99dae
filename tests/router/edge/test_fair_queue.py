"""Whose turn it is, when more is asked for than is done at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvferry.core.errors import QueueFull
from kvferry.router.edge.fair_queue import FairQueue
from kvferry.router.edge.tenants import Limits, Tenant
from support.waiting import eventually


@asynccontextmanager
async def a_turn(turns: FairQueue, tenant: Tenant, priority: int = 0) -> AsyncIterator[None]:
    """As the router takes one."""
    if not turns.begin(tenant):
        await turns.wait(tenant, priority)
    try:
        yield
    finally:
        turns.end(tenant)


class Crowd:
    """Requests of several tenants; `order` is that in which they had their turns."""

    def __init__(self, turns: FairQueue, **limits: Limits) -> None:
        self.turns, self.order = turns, list[str]()
        self.refused = list[str]()
        self.go = asyncio.Event()
        self.tasks = list[asyncio.Task[None]]()
        self.tenants = {name: Tenant(name.encode(), limits.get(name, Limits())) for name in "abcd"}

    async def ask(self, name: str, priority: int = 0) -> asyncio.Task[None]:
        """One request, of the tenant that is its first letter; returns when it has its turn, or waits."""
        task = asyncio.create_task(self._run(name, priority))
        self.tasks.append(task)
        await asyncio.sleep(0)
        return task

    async def _run(self, name: str, priority: int) -> None:
        try:
            async with a_turn(self.turns, self.tenants[name[0]], priority):
                self.order.append(name)
                await self.go.wait()
        except QueueFull:
            self.refused.append(name)

    async def end(self) -> None:
        """All have their turn, one after the other."""
        self.go.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.turns.check()


async def test_tenants_have_turns_in_rotation() -> None:
    crowd = Crowd(FairQueue(1, max_waiting=100, wait_s=60))
    for name in ("a0", "a1", "a2", "a3", "b0", "b1", "c0"):
        await crowd.ask(name)
    await crowd.end()
    assert crowd.order == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


async def test_when_too_many_wait_it_is_the_greediest_who_is_refused() -> None:
    crowd = Crowd(FairQueue(1, max_waiting=4, wait_s=60))
    for name in ("a0", "a1", "a2", "a3", "a4", "b0", "c0", "b1", "b2", "a5"):
        await crowd.ask(name)
    assert sorted(crowd.refused) == ["a3", "a4", "a5", "b1", "b2"]
    await crowd.end()
    assert crowd.order[:4] == ["a0", "a1", "b0", "c0"]


async def test_who_is_leaving_when_a_line_is_full_makes_room_for_the_newcomer() -> None:
    crowd = Crowd(FairQueue(1, max_waiting=2, wait_s=60))
    for name in ("a0", "a1", "a2"):
        await crowd.ask(name)
    newcomer = asyncio.create_task(crowd.ask("b0"))
    await asyncio.sleep(0)  # b0 has its first step next
    crowd.tasks[2].cancel()  # a2 hears of it only after that
    await newcomer
    await asyncio.sleep(0)
    assert crowd.turns.num_waiting == 2
    await crowd.end()
    assert crowd.order == ["a0", "a1", "b0"]
    assert not crowd.refused


async def test_one_tenant_alone_is_refused_when_its_line_is_full() -> None:
    crowd = Crowd(FairQueue(1, max_waiting=2, wait_s=60))
    for name in ("a0", "a1", "a2", "a3"):
        await crowd.ask(name)
    assert crowd.refused == ["a3"]
    await crowd.end()


async def test_without_a_line_nobody_waits() -> None:
    crowd = Crowd(FairQueue(1, max_waiting=0))
    await crowd.ask("a0")
    with pytest.raises(QueueFull):
        async with a_turn(crowd.turns, crowd.tenants["b"]):
            pass
    await crowd.end()


async def test_whoever_leaves_at_whatever_moment_keeps_no_turn() -> None:
    rng = random.Random(5)
    crowd = Crowd(FairQueue(3, max_waiting=8, wait_s=60))
    for number in range(300):
        task = await crowd.ask(f"{rng.choice('abcd')}{number}")
        if rng.random() < 0.5:
            rng.choice([task, rng.choice(crowd.tasks)]).cancel()
        if rng.random() < 0.3:
            crowd.go.set()
            await asyncio.sleep(0)
            crowd.go.clear()
        assert crowd.turns.num_requests <= 3
        assert crowd.turns.num_waiting <= 8
    await crowd.end()


async def test_a_wait_has_its_end() -> None:
    crowd = Crowd(FairQueue(1, max_waiting=3, wait_s=0.01))
    await crowd.ask("a0")
    waiting = await crowd.ask("b0")
    await waiting
    assert crowd.refused == ["b0"]
    await crowd.end()


async def test_within_a_tenant_what_is_lower_comes_first() -> None:
    crowd = Crowd(FairQueue(1, max_waiting=100, wait_s=60))
    for name, priority in (("a0", 0), ("a1", 5), ("a2", 0), ("a3", -1), ("a4", 0), ("b0", 9)):
        await crowd.ask(name, priority)
    await crowd.end()
    assert crowd.order == ["a0", "a3", "b0", "a2", "a4", "a1"]  # b's 9 is no worse than a's


async def test_when_too_many_wait_it_is_the_least_urgent_of_the_greediest_who_is_refused() -> None:
    crowd = Crowd(FairQueue(1, max_waiting=3, wait_s=60))
    for name, priority in (("a0", 0), ("a1", 5), ("a2", 0), ("a3", 1), ("a4", -1), ("a5", 7), ("b0", 9)):
        await crowd.ask(name, priority)
    await crowd.end()
    assert crowd.refused == ["a1", "a5", "a3"]
    assert crowd.order == ["a0", "a4", "b0", "a2"]


async def test_shares_are_by_weight() -> None:
    crowd = Crowd(FairQueue(1, max_waiting=1000, wait_s=60), a=Limits(weight=3))
    for number in range(40):
        for name in "ab":
            await crowd.ask(f"{name}{number}")
    await crowd.end()
    assert sum(name[0] == "a" for name in crowd.order[1:33]) == 24
    assert len(crowd.order) == 80


@pytest.mark.parametrize("num_clients", [1, 3])
async def test_shares_are_by_weight_though_lines_are_empty_after_each_turn(num_clients: int) -> None:
    turns = FairQueue(10, max_waiting=1000, wait_s=60)
    tenants = {name: Tenant(name.encode(), Limits(weight=weight)) for name, weight in (("a", 100), ("b", 1))}
    order = list[str]()

    async def client(name: str) -> None:
        while len(order) < 5000:
            async with a_turn(turns, tenants[name]):
                order.append(name)
                await asyncio.sleep(0)

    await asyncio.gather(*(client(name) for name in "a" * 60 + "b" * num_clients))
    assert 40 <= order.count("b") <= 60
    turns.check()


async def test_who_came_back_after_all_had_left_begins_as_others_do() -> None:
    crowd = Crowd(FairQueue(1, max_waiting=100, wait_s=60), a=Limits(weight=100), b=Limits(weight=0.001))
    for name in ("a0", "b0"):
        await crowd.ask(name)
    await crowd.end()
    crowd.go.clear()
    for name in ("a1", "b1", "a2", "a3"):
        await crowd.ask(name)
    await crowd.end()
    assert crowd.order == ["a0", "b0", "a1", "b1", "a2", "a3"]


async def test_what_is_remembered_of_those_who_do_not_wait_is_bounded() -> None:
    turns = FairQueue(1, max_waiting=2, wait_s=60, max_remembered=50)
    before, after = Tenant(b"first", Limits()), Tenant(b"slow", Limits(weight=0.01))
    assert turns.begin(before)
    for number in range(1000):
        assert not turns.begin(after)
        waiting = asyncio.create_task(turns.wait(after))
        await asyncio.sleep(0)
        turns.end(before)
        await waiting
        before, after = after, Tenant(b"%d" % number, Limits())
    assert len(turns._served_ahead) < 200
    assert turns._served_ahead[b"slow"] == 100
    turns.end(before)
    turns.check()


async def test_who_may_have_few_at_a_time_waits_for_his_own_and_holds_up_nobody() -> None:
    crowd = Crowd(FairQueue(10, max_waiting=100, wait_s=60), a=Limits(max_in_flight=2))
    for name in ("a0", "a1", "a2", "a3", "b0", "b1"):
        await crowd.ask(name)
    assert crowd.order == ["a0", "a1", "b0", "b1"]
    crowd.tasks[4].cancel()  # b0: its place is none of a's
    await asyncio.sleep(0)
    assert crowd.turns.num_waiting == 2
    crowd.tasks[0].cancel()
    async with asyncio.timeout(30):
        await eventually(lambda: "a2" in crowd.order, interval_s=0)
    assert "a3" not in crowd.order
    await crowd.end()
    assert "a3" in crowd.order


async def test_those_who_left_their_lines_block_nobody() -> None:
    turns = FairQueue(1, max_waiting=1000, wait_s=60)
    crowd = Crowd(turns)
    await crowd.ask("a0")
    for number in range(500):
        (await crowd.ask(f"{'bcd'[number % 3]}{number}")).cancel()
        await asyncio.sleep(0)
    assert not turns.num_waiting
    assert len(turns._ready) < 200
    crowd.tasks[0].cancel()
    await asyncio.sleep(0)
    await crowd.ask("b")
    assert crowd.order == ["a0", "b"]
    await crowd.end()


async def test_whoever_leaves_among_limits_and_priorities_keeps_no_turn() -> None:
    rng = random.Random(6)
    limits = {"a": Limits(max_in_flight=1), "b": Limits(max_in_flight=2, weight=0.5), "c": Limits(weight=7)}
    crowd = Crowd(FairQueue(4, max_waiting=9, wait_s=60), **limits)
    for number in range(600):
        task = await crowd.ask(f"{rng.choice('abcd')}{number}", rng.randrange(-2, 3))
        if rng.random() < 0.5:
            rng.choice([task, rng.choice(crowd.tasks)]).cancel()
        if rng.random() < 0.3:
            crowd.go.set()
            await asyncio.sleep(0)
            crowd.go.clear()
        assert crowd.turns.num_requests <= 4
        assert crowd.turns.num_waiting <= 9
    await crowd.end()
    assert crowd.turns.num_requests == 0
