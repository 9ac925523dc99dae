"""What runs beside the event loop, and how much of it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvferry.core.errors import QueueFull, Unavailable
from kvferry.engine.server.thread_offload import ThreadOffload


async def test_small_work_is_done_here_and_large_work_is_not() -> None:
    thread_offload = ThreadOffload()
    assert await thread_offload.run_if(False, threading.get_ident) == threading.get_ident()
    assert await thread_offload.run_if(True, threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await thread_offload.run_if(True, lambda: 1 / 0)


async def test_so_many_run_and_so_many_wait() -> None:
    thread_offload, go = ThreadOffload(max_concurrent=2, max_waiting=3), threading.Event()
    running = [asyncio.create_task(thread_offload.run_if(True, go.wait)) for _ in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="3 large requests are waiting"):
        await thread_offload.run_if(True, go.wait)
    go.set()
    assert await asyncio.gather(*running) == [True] * 5
    assert await thread_offload.run_if(True, go.wait)


async def test_what_takes_too_long_is_given_up_and_keeps_its_turn() -> None:
    thread_offload, go = ThreadOffload(max_concurrent=1, timeout_s=0.05), threading.Event()
    for _ in range(2):  # the first runs into its limit, the second waits for its turn in vain
        with pytest.raises(Unavailable, match="could not be read within"):
            await thread_offload.run_if(True, go.wait)
    go.set()
    while True:
        try:
            assert await thread_offload.run_if(True, go.wait)
            break
        except Unavailable:
            continue


async def test_a_client_that_leaves_gives_its_turn_back_when_its_work_is_done() -> None:
    thread_offload, go, done = ThreadOffload(max_concurrent=1), threading.Event(), []

    def work() -> None:
        go.wait()
        done.append(1)
        raise ValueError("nobody is there to see it")

    leaving = asyncio.create_task(thread_offload.run_if(True, work))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    waiting = asyncio.create_task(thread_offload.run_if(True, lambda: list(done)))
    await asyncio.sleep(0)
    assert not waiting.done()
    go.set()
    assert await waiting == [1]
