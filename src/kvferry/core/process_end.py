"""How a process ends: within seconds, whatever its threads are in.

A thread in a call that never returns, into a disk whose server is gone or a driver, cannot be ended, and Python waits
at its end for every thread of an executor. So a process closes what it has within a limit, and then leaves without
waiting for threads.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

END_S = 15.0
"""Most seconds that a process takes to close what it has, after its last request."""
EXIT_S = 2.0
"""Most seconds for what libraries do at a process's exit."""


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to end what it does: Ctrl-C, SIGTERM, and the end of its terminal, unless
    `nohup` has it outlive that. To be called before any handler is set."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if outlives else (signal.SIGHUP,)))


def leave(code: int) -> NoReturn:
    """End this process. Its exit handlers run, but threads are not waited for."""
    leaving = threading.Thread(target=atexit._run_exitfuncs, name="kvferry-exit", daemon=True)
    leaving.start()
    leaving.join(EXIT_S)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


class UnjoinedThreads(ThreadPoolExecutor):
    """The threads of an event loop whose end does not wait for them, such as for the look-up of a name whose server
    does not answer."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, for a command that ends with `leave`: threads are not waited for."""
    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(UnjoinedThreads(thread_name_prefix="kvferry"))
        return runner.run(main)


class EndLimit:
    """Ends this process with exit code 1 if what follows `begin` takes longer than `END_S`; and with the exit code of
    what it ran if threads keep it for longer than `EXIT_S` once that has closed everything."""

    def __init__(self) -> None:
        self._timer = _timer(END_S, self._over)

    async def run(self, serving: Awaitable[int]) -> int:
        """The exit code of `serving`. An event loop ends only when its threads do, and the look-up of a name whose
        server does not answer takes minutes."""
        code = await serving
        self._timer.cancel()
        self._timer = _timer(EXIT_S, leave, code)
        self._timer.start()
        return code

    def begin(self) -> None:
        """Start the limit, once the last request is over. Called once."""
        self._timer.start()

    def cancel(self) -> None:
        """End the limit: everything was closed in time, and the process ends by itself."""
        self._timer.cancel()

    def _over(self) -> None:
        log.error("the process could not close everything within %g s, and ends now", END_S)
        leave(1)


def _timer(seconds: float, act: Callable[..., object], *arguments: Any) -> threading.Timer:
    timer = threading.Timer(seconds, act, arguments)
    timer.daemon = True
    return timer


@contextmanager
def end_limit() -> Iterator[EndLimit]:
    """A limit that holds from its `begin` to the end of the body."""
    limit = EndLimit()
    try:
        yield limit
    finally:
        limit.cancel()
