"""Workers that ask each other for what is kept for next turns, and what becomes of it when nobody answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.core.clock import ManualClock
from kvferry.core.errors import InvalidRequest, Unavailable
from kvferry.core.instance_facts import InstanceFacts
from kvferry.router.exchange import conversation
from kvferry.router.instance import Instance
from kvferry.router.next_turn import Kept, KeptTickets
from kvferry.router.policies.base import Asked
from kvferry.router.worker_turns import LONGEST_MESSAGE, KeeperElsewhere, answer_for_others, keeper_number


class Released:
    """What instances were told to free."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def start(self, instance: Instance, transfer_id: str) -> None:
        self.ids.append(transfer_id)


class Worker:
    """One of them, with its own view of the one instance."""

    def __init__(self) -> None:
        self.instance, self.clock, self.released = (
            Instance("decode", "http://d:1", name="decode-0"),
            ManualClock(),
            Released(),
        )
        self.instance.facts = InstanceFacts(engine_id="engine-d")
        self.instances = [self.instance]
        self.own = KeptTickets(self.instances, self.clock, self.released)  # type: ignore[arg-type]

    def kept(self, name: str = "one", **params: Any) -> Kept:
        return Kept(self.instance, "engine-d", name, {"remote_transfer_id": name, **params}, until=100.0)

    async def hear(self, message: bytes) -> bytes:
        assert len(message) < LONGEST_MESSAGE
        return await answer_for_others(self.own, message)


@pytest.fixture
def here() -> Worker:
    return Worker()


@pytest.fixture
def there() -> Worker:
    return Worker()


@pytest.fixture
def elsewhere(here: Worker, there: Worker) -> KeeperElsewhere:
    return KeeperElsewhere(there.hear, here.own, here.clock)


async def test_a_ticket_comes_back_as_it_went(here: Worker, there: Worker, elsewhere: KeeperElsewhere) -> None:
    kept = here.kept(remote_prefixes=[[3, "a" * 32]], nothing=None, number=2**63)
    await elsewhere.keep("talk", kept)
    assert (len(there.own), len(here.own)) == (1, 0)
    assert await elsewhere.take("another") is None
    assert await elsewhere.take("talk") == kept
    assert await elsewhere.take("talk") is None
    await elsewhere.put_back("talk", kept)
    await elsewhere.put_back("talk", here.kept("older"))
    assert there.released.ids == ["older"]
    await elsewhere.keep("talk", here.kept("newer"))
    assert there.released.ids == ["older", "one"]
    await elsewhere.drop("talk")
    assert there.released.ids == ["older", "one", "newer"]
    assert not here.released.ids


async def test_the_longest_ticket_passes(here: Worker, there: Worker, elsewhere: KeeperElsewhere) -> None:
    await elsewhere.keep("x" * 600, here.kept(remote_prefixes=["\\" * 60_000]))
    assert len(there.own) == 1


async def test_a_keeper_that_does_not_answer_is_left_alone_for_a_while(here: Worker) -> None:
    num_asked = 0

    async def nobody(message: bytes) -> bytes:
        nonlocal num_asked
        num_asked += 1
        raise Unavailable("it stands still")

    elsewhere = KeeperElsewhere(nobody, here.own, here.clock)
    for _ in range(5):
        assert await elsewhere.take("talk") is None
        await elsewhere.drop("talk")
    await elsewhere.keep("talk", here.kept())
    assert num_asked == 1
    assert here.released.ids == ["one"]  # nobody would find it
    here.clock.advance(5)
    await elsewhere.put_back("talk", here.kept("two"))
    assert num_asked == 2
    assert here.released.ids == ["one", "two"]


async def test_one_message_that_cannot_be_said_stands_in_the_way_of_no_other(here: Worker, there: Worker) -> None:
    async def refusing(message: bytes) -> bytes:
        if b"refused" in message:
            raise InvalidRequest("worker 1 answered 400")
        return await there.hear(message)

    elsewhere = KeeperElsewhere(refusing, here.own, here.clock)
    await elsewhere.keep("talk", here.kept())
    for name in ("x" * LONGEST_MESSAGE, "refused"):
        await elsewhere.drop(name)
        assert await elsewhere.take(name) is None
        await elsewhere.keep(name, here.kept("lost"))
    assert here.released.ids == ["lost"] * 2
    assert await elsewhere.take("talk") == here.kept()


@pytest.mark.parametrize("model", ["\x01" * 300_000, "m" * 300_000])
async def test_whatever_a_client_calls_the_model_the_keeper_can_be_told(
    model: str, there: Worker, elsewhere: KeeperElsewhere
) -> None:
    session = conversation(Asked(model=model, session="\x01" * 256))
    assert session is not None
    await elsewhere.keep(session, there.kept(remote_prefixes=["\\" * 60_000]))
    assert len(there.own) == 1


async def test_what_comes_for_who_has_left_is_released(here: Worker, there: Worker) -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    async def late(message: bytes) -> bytes:
        asked.set()
        await go.wait()
        return await there.hear(message)

    elsewhere = KeeperElsewhere(late, here.own, here.clock)
    await there.own.keep("talk", there.kept())
    for work in (elsewhere.take("talk"), elsewhere.keep("other", here.kept("two"))):
        task = asyncio.create_task(work)  # type: ignore[arg-type]
        await asked.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        asked.clear()
    go.set()
    while elsewhere._under_way:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert here.released.ids == ["one"]
    assert len(there.own) == 1  # the other's, which was kept all the same


async def test_an_instance_that_one_of_them_does_not_know_is_of_no_use(
    here: Worker, there: Worker, elsewhere: KeeperElsewhere
) -> None:
    await elsewhere.keep("talk", here.kept())
    here.instances.clear()
    assert await elsewhere.take("talk") is None
    there.instances.clear()
    await elsewhere.keep("talk", here.kept())
    assert len(there.own) == 0
    assert here.released.ids == ["one"]


def test_conversations_are_spread_over_the_workers() -> None:
    found = [keeper_number(f"model talk {number}", 4) for number in range(400)]
    assert {found.count(number) > 50 for number in range(4)} == {True}
    assert keeper_number("\ud800", 4) < 4
