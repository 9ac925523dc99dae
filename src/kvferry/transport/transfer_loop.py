"""The thread of an instance for all data-plane work, with an asyncio loop, beside the engine's thread; and the error
handling of its tasks.

Owns the thread and the loop, and so every task on it: `close` ends them all. A function that raises on the loop is
logged and counted, and ends nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from kvferry.core.errors import KvferryError, LeakError, TransferError
from kvferry.core.runtime.threads import Thread

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
CLOSE_S = 10.0


class TransferLoop:
    """Start it once, close it once. In between, any thread may `submit` and `call`."""

    def __init__(self, name: str = "kvferry-transfer") -> None:
        self._thread = Thread(self._run, name=name)
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self.num_errors = 0
        """Functions that raised on the loop, each a bug with a traceback in the log."""

    def start(self) -> None:
        """Start the thread; returns when the loop runs."""
        self._thread.start()
        self._started.wait()

    def submit(self, job: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the loop. The caller has to check the future: its error is not reported otherwise."""
        return asyncio.run_coroutine_threadsafe(job, self._loop)

    def run(self, job: Coroutine[Any, Any, object], timeout_s: float) -> None:
        """Run a coroutine on the loop and wait for its end. Raises `TimeoutError`, or its exception."""
        self.submit(job).result(timeout_s)

    def wait_for(self, changed: threading.Condition, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until a task on the loop has made a condition true, and notified `changed`, which the caller holds.
        Returns true if it is."""
        return changed.wait_for(condition, timeout_s)

    def call(self, function: Callable[[], object]) -> None:
        """Run a plain function on the loop, soon. Does nothing once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # closed meanwhile: the call is no longer needed
            if not self._loop.is_closed():
                raise

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Cancel all tasks, wait for them, end the thread. Raises `LeakError` if they do not end in time."""
        if not self._thread.is_alive():
            return
        self.call(self._stop.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            tasks = ", ".join(task.get_name() for task in asyncio.all_tasks(self._loop))
            raise LeakError(f"data-plane tasks did not end within {timeout_s:g} s: {tasks}")

    def _run(self) -> None:
        # uvloop: an iteration costs it a third of asyncio's, and bulk TCP takes many. The exit cancels and awaits every
        # task.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(self._on_exception)
        self._started.set()
        await self._stop.wait()

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.num_errors += "handle" in context
        loop.default_exception_handler(context)


def translated(error: BaseException) -> KvferryError:
    """The error itself if it is a `KvferryError`; otherwise, for a bug, a `TransferError` that names it."""
    return error if isinstance(error, KvferryError) else TransferError(f"unexpected {type(error).__name__}: {error}")


def call_contained(call: Callable[[], object], description: str, on_error: Callable[[Exception], object]) -> None:
    """Make a call for one request or one peer. If it raises, `on_error` gets the error, and the others continue."""
    try:
        call()
    except Exception as error:  # the edge between one request and the instance
        logger.exception("%s failed unexpectedly", description)
        on_error(error)


async def run_together(*jobs: Coroutine[Any, Any, Result]) -> list[Result]:
    """Run all jobs, and return their results when all have ended. The first one that raises cancels the others; its
    error is raised itself, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from errors
    return [task.result() for task in tasks]


async def uncancelled(job: Coroutine[Any, Any, None]) -> None:
    """Await the job to its end, even if cancelled meanwhile; the cancellation is raised after it."""
    task = asyncio.ensure_future(job)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
