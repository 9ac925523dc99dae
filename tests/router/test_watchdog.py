"""Which waits are given up, and which are not: what this process itself was kept from seeing counts against nobody."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvferry.core.clock import ManualClock, SystemClock
from kvferry.router.instance import Instance
from kvferry.router.watchdog import Wait, Watchdog


def waiting(clock: ManualClock | SystemClock, silence_s: float) -> tuple[Watchdog, Wait]:
    watchdog = Watchdog(clock, silence_s)
    wait = Wait(Instance("decode", "http://d:1", name="decode-0"), silence_s, total_s=100.0)
    wait.wake = lambda: None
    watchdog.begin(wait)
    return watchdog, wait


async def test_who_is_silent_for_too_long_is_given_up() -> None:
    clock = ManualClock()
    watchdog, wait = waiting(clock, 10.0)
    clock.advance(9.0)
    watchdog.look()
    assert not wait.given_up
    clock.advance(2.0)
    watchdog.look()
    assert wait.given_up


async def test_time_that_this_process_stood_still_is_nobodys_silence() -> None:
    clock = ManualClock()
    watchdog, wait = waiting(clock, 10.0)
    clock.advance(4.0)
    wait.instance.last_sign = clock.monotonic()
    clock.advance(500.0)
    watchdog.look(missed_s=497.0)
    assert not wait.given_up
    clock.advance(6.9)
    watchdog.look()
    assert not wait.given_up
    clock.advance(0.2)
    watchdog.look()
    assert wait.given_up


async def test_an_answer_that_came_while_the_process_stood_still_is_read() -> None:
    """As after SIGSTOP and SIGCONT: it is here, but not read yet, when the limits are looked at."""
    watchdog, wait = waiting(SystemClock(), 0.2)

    async def nothing(instance: Instance, timeout_s: float) -> bytes:
        return b""

    running = asyncio.create_task(watchdog.run(nothing))
    await asyncio.sleep(0)  # it has begun to wait for its next look
    looked = asyncio.Event()
    look = watchdog.look

    def look_and_tell(missed_s: float = 0.0) -> None:
        look(missed_s)
        looked.set()

    watchdog.look = look_and_tell  # type: ignore[method-assign]
    time.sleep(1.0)  # noqa: ASYNC251 - the process stands still
    await looked.wait()
    assert not wait.given_up
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
