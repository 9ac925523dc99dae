"""Calls of a store that do not return: nobody waits for them, and no process does at its end."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from kvferry.core.errors import StoreError
from kvferry.store.threads import Stop, Threads
from support.waiting import eventually


async def left_behind(pool: Threads, gate: threading.Event) -> asyncio.Task[object]:
    """A call that nobody waits for any more."""
    begun = threading.Event()

    def hang(stop: Stop) -> None:
        begun.set()
        gate.wait(60)

    task = asyncio.create_task(pool.run(hang))
    await eventually(begun.is_set, interval_s=0)
    task.cancel()
    await asyncio.wait([task], timeout=20)
    assert task.cancelled()
    return task


async def test_others_are_called_beside_those_that_do_not_return() -> None:
    pool, gate = Threads(2, "test", max_abandoned=4), threading.Event()
    for number in range(4):
        assert await pool.run(lambda stop, number=number: number) == number  # type: ignore[misc]
        await left_behind(pool, gate)
    with pytest.raises(StoreError, match="4 calls that do not return"):
        await pool.run(lambda stop: None)
    gate.set()
    deadline = time.monotonic() + 20
    while True:
        try:
            assert await pool.run(lambda stop: "again") == "again"
            break
        except StoreError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0)
    pool.close()


async def test_what_waits_for_a_thread_is_called_when_one_is_left_behind() -> None:
    pool, gate = Threads(1, "test"), threading.Event()
    begun = threading.Event()
    hanging = asyncio.create_task(pool.run(lambda stop: (begun.set(), gate.wait(60))))
    await eventually(begun.is_set, interval_s=0)
    waiting = asyncio.create_task(pool.run(lambda stop: threading.current_thread().name))
    given_up = asyncio.create_task(pool.run(lambda stop: pytest.fail("nobody waits for this")))
    await asyncio.sleep(0)
    given_up.cancel()
    hanging.cancel()
    async with asyncio.timeout(20):
        assert await waiting == "test"
    gate.set()
    pool.close()


async def test_nothing_is_written_once_nobody_waits() -> None:
    pool, gate, begun, over = Threads(1, "test"), threading.Event(), threading.Event(), threading.Event()
    written: list[bool] = []

    def read(stop: Stop) -> None:
        begun.set()
        gate.wait(60)
        assert not stop.write(lambda: written.append(True))
        over.set()

    task = asyncio.create_task(pool.run(read))
    await eventually(begun.is_set, interval_s=0)
    task.cancel()
    await asyncio.wait([task])
    gate.set()
    assert over.wait(20)
    assert written == []
    pool.close()
    with pytest.raises(StoreError, match="closed"):
        await pool.run(lambda stop: None)


def test_a_process_ends_beside_a_call_that_does_not_return() -> None:
    """Whether it closed its threads or not."""
    code = """
import asyncio, threading
from kvferry.store import threads
threads.Threads.close_s = 0.01
async def main():
    for close in (True, False):
        pool = threads.Threads(1, "test")
        try:
            await asyncio.wait_for(pool.run(lambda stop: threading.Event().wait()), 0.01)
        except TimeoutError:
            print("left")
        if close:
            pool.close()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "left\nleft\n"
