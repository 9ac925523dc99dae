"""One thread for calls that block and cannot be cancelled. It may be left behind in a call; then it keeps alive only
what that call uses, and ends with it.

A process that exits while such a thread is inside of a C++ library could crash, so it waits for them up to `EXIT_S`.
"""

from __future__ import annotations

import asyncio
import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from kvferry.core.clock import SYSTEM_CLOCK

Result = TypeVar("Result")
EXIT_S = 15.0
_busy: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _wait_for_calls() -> None:
    deadline = SYSTEM_CLOCK.monotonic() + EXIT_S
    while _busy and SYSTEM_CLOCK.monotonic() < deadline:
        time.sleep(0.01)


class BlockingThread:
    """`run` one call at a time from a loop; `close` once."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, call: Callable[[], Result]) -> Result:
        """Make the call on the thread. If this is cancelled, the call goes on, and its result is dropped."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def report(finish: Callable[[], None]) -> None:
            try:
                loop.call_soon_threadsafe(lambda: None if done.done() else finish())
            except RuntimeError:  # the loop ended first: nobody waits
                if not loop.is_closed():
                    raise

        def work() -> None:
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the caller's
                failure = error  # the name of an except clause is gone after it
                report(lambda: done.set_exception(failure))
            else:
                report(lambda: done.set_result(result))

        self._calls.put(work)
        return await done

    def close(self) -> None:
        """End the thread after the calls that it has been given."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            _busy.add(threading.current_thread())
            call()
            del call
            _busy.discard(threading.current_thread())
