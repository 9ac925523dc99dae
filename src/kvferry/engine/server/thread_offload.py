"""Threads for work of one request that would block the event loop for all: decoding bodies, tokenization, templates.

Owns the limits on running and waiting work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from kvferry.core.errors import QueueFull, Unavailable
from kvferry.core.runtime.threads import run_in_thread

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class ThreadOffload:
    """Runs functions in threads: `max_concurrent` at a time, `max_waiting` in a queue, each for at most `timeout_s`
    seconds including the wait. `purpose`: what they do with requests, for errors. `normal_s`: the seconds after which a
    function goes on at a low priority; None: never."""

    def __init__(
        self,
        *,
        max_concurrent: int = 2,
        max_waiting: int = 256,
        timeout_s: float = 60.0,
        purpose: str = "read",
        normal_s: float | None = None,
    ) -> None:
        self._purpose = purpose
        self._normal_s = normal_s
        self._turn = asyncio.Semaphore(max_concurrent)
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._num_waiting = 0

    async def run_if(
        self,
        in_thread: bool,
        function: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """Call `function` directly, or in a thread if `in_thread`.

        Raises the function's errors, `QueueFull` if too many calls wait, and `Unavailable` if it takes too long. A
        thread cannot be ended, so it counts as running until its function returns.
        """
        if not in_thread:
            return function(*args, **kwargs)
        if self._num_waiting >= self._max_waiting:
            raise QueueFull(f"{self._num_waiting} large requests are waiting to be {self._purpose}; try again later")
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._wait()
                return await asyncio.shield(self._start(partial(function, *args, **kwargs)))
        except TimeoutError as error:
            raise Unavailable(f"the request could not be {self._purpose} within {self._timeout_s:g} s") from error

    async def _wait(self) -> None:
        self._num_waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._num_waiting -= 1

    def _start(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        if self._normal_s is None:
            future = asyncio.get_running_loop().run_in_executor(None, function)
        else:
            future = run_in_thread(function, name=self._purpose, normal_s=self._normal_s)
        future.add_done_callback(self._done)
        return future

    def _done(self, future: asyncio.Future[Result]) -> None:
        self._turn.release()
        if not future.cancelled():
            future.exception()  # marks it as retrieved: the waiter may be gone
