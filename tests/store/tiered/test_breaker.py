"""A breaker opens at a failure, probes with pauses that double, and closes when a probe succeeds."""

from __future__ import annotations

import asyncio

from kvferry.core.errors import StoreError
from kvferry.store.tiered.breaker import Breaker
from support.waiting import eventually


async def test_it_closes_when_a_probe_succeeds() -> None:
    answers = [StoreError("not yet"), ZeroDivisionError("a mistake"), None]

    async def probe() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    breaker = Breaker("file:/x", probe, first_pause_s=0.001, max_pause_s=0.002)
    assert not breaker.is_open
    breaker.open("it failed")
    breaker.open("it failed again")
    assert (breaker.is_open, breaker.num_failures) == (True, 2)
    await eventually(lambda: not breaker.is_open)
    assert answers == [], "one task probes, until an answer comes"
    breaker.open("it failed")
    assert breaker.is_open
    await breaker.close()


async def test_a_probe_that_hangs_is_abandoned() -> None:
    num_probes = 0

    async def probe() -> None:
        nonlocal num_probes
        num_probes += 1
        if num_probes == 1:
            await asyncio.Event().wait()

    breaker = Breaker("file:/x", probe, first_pause_s=0.001)
    breaker.probe_s = 0.01
    breaker.open("it hangs")
    await eventually(lambda: not breaker.is_open)
    assert num_probes == 2


async def test_closing_ends_the_probes() -> None:
    async def probe() -> None:
        raise StoreError("never")

    breaker = Breaker("file:/x", probe, first_pause_s=0.001, max_pause_s=0.001)
    await breaker.close()
    breaker.open("it failed")
    await breaker.close()
    assert len(asyncio.all_tasks()) == 1
