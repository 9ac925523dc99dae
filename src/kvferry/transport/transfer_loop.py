"""The one thread of an instance for all data-plane work, an asyncio loop beside the engine's thread; and how tasks on
it fail: in a group with one plain error, or by themselves.

Owns the thread and the loop, and thereby every task on it: `close` ends them all. A function that raises here is
counted and logged, and ends nothing but itself: the loop is everybody's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from kvferry.core.errors import KvferryError, LeakError, TransferError

log = logging.getLogger(__name__)

Result = TypeVar("Result")
CLOSE_S = 10.0


class TransferLoop:
    """Start it once, close it once; `submit` and `call` may be used from any thread in between."""

    def __init__(self, name: str = "kvferry-transfer") -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self.num_errors = 0
        """Functions that raised on the loop: mistakes of ours, each with a traceback in the log."""

    def start(self) -> None:
        """Start the thread; returns when the loop runs."""
        self._thread.start()
        self._started.wait()

    def submit(self, job: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the loop. The caller looks at the future: its error is reported nowhere else."""
        return asyncio.run_coroutine_threadsafe(job, self._loop)

    def call(self, function: Callable[[], object]) -> None:
        """Run a plain function on the loop, soon. Does nothing once the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # closed meanwhile: there is nothing left that the call could matter to
            if not self._loop.is_closed():
                raise

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Cancel all tasks, wait for them, end the thread. Raises `LeakError` when they do not end in time."""
        if not self._thread.is_alive():
            return
        self.call(self._stop.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            tasks = ", ".join(task.get_name() for task in asyncio.all_tasks(self._loop))
            raise LeakError(f"data-plane tasks did not end within {timeout_s:g} s: {tasks}")

    def _run(self) -> None:
        # uvloop: a turn of the loop costs it a third, and bulk TCP takes many. The exit cancels and awaits every task.
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
    """The error itself where it is one of the tree; else a `TransferError` that tells of it, the mistake being ours."""
    return error if isinstance(error, KvferryError) else TransferError(f"unexpected {type(error).__name__}: {error}")


async def contained(job: Callable[[], Awaitable[object]], what: str) -> None:
    """Run a task that belongs to one request or one peer: what it raises ends it, and nobody beside it."""
    try:
        await job()
    except Exception:  # the edge between one request and the instance: the others must not hear of it
        log.exception("%s failed unexpectedly", what)


def call_contained(call: Callable[[], object], what: str, otherwise: Callable[[Exception], object]) -> None:
    """As `contained`, for a plain function; `otherwise` is told what it raised."""
    try:
        call()
    except Exception as error:  # as above
        log.exception("%s failed unexpectedly", what)
        otherwise(error)


async def run_together(*jobs: Coroutine[Any, Any, None]) -> None:
    """Run all; the first that raises ends the others, and its error is raised as it is, not as a group."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that is not itself a group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def uncancelled(job: Coroutine[Any, Any, None]) -> None:
    """Await the job to its end, also while being cancelled; the cancellation is raised after it."""
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
