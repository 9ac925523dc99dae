"""The threads of a store, for calls that block, such as those to a network file system whose server is gone.

Owns the threads. `run` ends only when its thread has, for functions that use the caller's memory; `ask` abandons the
thread on cancellation.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Most seconds that `close` waits for running calls."""
Result = TypeVar("Result")


class Stop:
    """Tells a function on a thread that nobody waits for its result any more. Any thread."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def now(self) -> None:
        """Ask the function to stop."""
        self._event.set()

    @property
    def requested(self) -> bool:
        """Whether the function should stop."""
        return self._event.is_set()


class Threads:
    """At most `number` threads, started when they are needed; `name` begins their names."""

    def __init__(self, number: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(number, thread_name_prefix=name)
        self._calls: set[Future[Any]] = set()

    async def run(self, function: Callable[[Stop], Result]) -> Result:
        """Run a function on a thread. On cancellation it is asked to stop and then waited for, since it may use the
        caller's memory."""
        stop = Stop()
        call = self._submit(partial(function, stop))
        future = asyncio.wrap_future(call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            stop.now()
            call.cancel()  # has an effect only if it has not begun
            while not future.done():
                with suppress(asyncio.CancelledError, Exception):
                    await asyncio.shield(future)
            if not future.cancelled():
                future.exception()  # retrieved, so that asyncio does not log it
            raise

    async def ask(self, function: Callable[[], Result]) -> Result:
        """Run a function that does not use the caller's memory. On cancellation its thread is abandoned."""
        return await asyncio.wrap_future(self._submit(function))

    def close(self) -> None:
        """Wait for running calls, `CLOSE_S` at most, and end the threads."""
        _, hung = wait(set(self._calls), CLOSE_S)
        if hung:
            log.warning("%d calls of a store do not return; their threads are left behind", len(hung))
        self._pool.shutdown(wait=not hung, cancel_futures=bool(hung))

    def _submit(self, function: Callable[[], Result]) -> Future[Result]:
        call = self._pool.submit(function)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call
