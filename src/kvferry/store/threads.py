"""Threads of a store, for what blocks: a coroutine that waits for them ends only when they have."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

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

    async def run(self, function: Callable[[Stop], Result]) -> Result:
        """Run it on a thread. On cancellation it is told to stop, and waited for: it may hold the caller's memory."""
        stop = Stop()
        future = asyncio.get_running_loop().run_in_executor(self._pool, function, stop)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            stop.now()
            while not future.done():
                with suppress(asyncio.CancelledError, Exception):
                    await asyncio.shield(future)
            if not future.cancelled():
                future.exception()  # looked at, so that nobody logs it as forgotten
            raise

    def close(self) -> None:
        """Wait for what runs, and end the threads."""
        self._pool.shutdown()
