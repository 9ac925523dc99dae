"""Tasks that run beside their owner, and a wake-up of one coroutine by another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

Task = asyncio.Task[None]


class BackgroundTasks:
    """The tasks of one owner. Each task is referenced until it ends; `close` cancels those that still run. Used on one
    event loop.

    `on_error` gets the error of a task that failed; without it, asyncio logs the error as never retrieved.
    """

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._tasks: dict[Task, None] = {}
        self._on_error = on_error

    def start(self, work: Coroutine[Any, Any, None]) -> Task:
        """Start a task."""
        return self.add(asyncio.create_task(work))

    def add(self, task: Task) -> Task:
        """Add a task that has been created already."""
        self._tasks[task] = None
        task.add_done_callback(self._on_done)
        return task

    def cancel(self) -> None:
        """Cancel all tasks. Does not wait for their end."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks; returns when they have ended."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter([*self._tasks])

    def _on_done(self, task: Task) -> None:
        del self._tasks[task]
        if self._on_error is not None and not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)


class WakeUp:
    """Lets one coroutine wait until another one wakes it. A `wake` while none waits has no effect: check the condition
    before each `wait`. Used on one event loop."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Let `wait` return, if a coroutine waits."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        """Wait for the next `wake`."""
        self._future = asyncio.get_running_loop().create_future()
        try:
            await self._future
        finally:
            self._future = None
