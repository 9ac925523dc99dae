"""Threads of a store, for what blocks, such as a network file system whose server is gone.

Owns the threads. A coroutine that lent one the caller's memory ends only when the thread has; others leave it behind.
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
Result = TypeVar("Result")


class Stop:
    """Says to a function on a thread that nobody waits for its result any more."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def now(self) -> None:
        """Go no further."""
        self._event.set()

    @property
    def requested(self) -> bool:
        """Whether to go no further."""
        return self._event.is_set()


class Threads:
    """At most `number` threads, started when they are needed."""

    def __init__(self, number: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(number, thread_name_prefix=name)
        self._calls: set[Future[Any]] = set()

    async def run(self, function: Callable[[Stop], Result]) -> Result:
        """Run it on a thread. On cancellation it is told to stop, and waited for: it may hold the caller's memory."""
        stop = Stop()
        call = self._submit(partial(function, stop))
        future = asyncio.wrap_future(call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            stop.now()
            call.cancel()  # in time only where it has not begun
            while not future.done():
                with suppress(asyncio.CancelledError, Exception):
                    await asyncio.shield(future)
            if not future.cancelled():
                future.exception()  # looked at, so that nobody logs it as forgotten
            raise

    async def ask(self, function: Callable[[], Result]) -> Result:
        """Run what touches nothing of the caller's on a thread. On cancellation the thread is left behind."""
        return await asyncio.wrap_future(self._submit(function))

    def close(self) -> None:
        """Wait for what runs, within `CLOSE_S`, and end the threads."""
        _, hung = wait(set(self._calls), CLOSE_S)
        if hung:
            log.warning("%d calls of a store do not return; their threads are left behind", len(hung))
        self._pool.shutdown(wait=not hung, cancel_futures=bool(hung))

    def _submit(self, function: Callable[[], Result]) -> Future[Result]:
        call = self._pool.submit(function)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call
