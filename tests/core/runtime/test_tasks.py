"""Background tasks and the wake-up of a waiter."""

from __future__ import annotations

import asyncio

from kvferry.core.runtime.tasks import BackgroundTasks, WakeUp


async def test_tasks_are_held_until_they_end() -> None:
    tasks, gate = BackgroundTasks(), asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    task = tasks.start(wait())
    await asyncio.sleep(0)
    assert [*tasks] == [task]
    gate.set()
    await task
    await asyncio.sleep(0)
    assert len(tasks) == 0


async def test_close_cancels_and_waits() -> None:
    tasks, ended = BackgroundTasks(), []

    async def clean_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    for _ in range(3):
        tasks.start(clean_up())
    await asyncio.sleep(0)
    await tasks.close()
    assert ended == [True] * 3
    await asyncio.sleep(0)
    assert len(tasks) == 0


async def test_errors_are_reported_and_cancellations_are_not() -> None:
    errors: list[BaseException] = []
    tasks = BackgroundTasks(errors.append)

    async def fail() -> None:
        raise ValueError("broken")

    tasks.start(fail())
    tasks.start(asyncio.Event().wait())  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await tasks.close()
    await asyncio.sleep(0)
    assert [str(error) for error in errors] == ["broken"]


async def test_a_waiter_is_woken_once_for_any_number_of_wake_ups() -> None:
    waiter, num_woken = WakeUp(), 0
    waiter.wake()  # without a waiter, it is lost

    async def wait() -> None:
        nonlocal num_woken
        await waiter.wait()
        num_woken += 1

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert num_woken == 0
    waiter.wake()
    waiter.wake()
    await task
    assert num_woken == 1


async def test_a_cancelled_waiter_can_wait_again() -> None:
    waiter = WakeUp()
    task = asyncio.create_task(waiter.wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    waiter.wake()
    task = asyncio.create_task(waiter.wait())
    await asyncio.sleep(0)
    waiter.wake()
    await task
