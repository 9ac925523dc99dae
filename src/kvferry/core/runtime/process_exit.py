"""Exit of a process: its exit code, and its end within seconds, whatever its threads do.

A thread whose call never returns (to a driver, or a disk whose server is gone) cannot be ended, and Python waits at
exit for every thread of an executor. So a process closes its resources within a deadline, and then exits without
waiting for threads.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from kvferry.core.errors import ConfigError, KvferryError, UnsupportedModel

logger = logging.getLogger(__name__)

EXIT_S = 2.0
"""Maximum seconds for the exit handlers of libraries, and for threads to end after the event loop."""
EXIT_USER_ERROR = 2
"""Exit code of a process with wrong settings: a restart with the same settings would end in the same way."""
ERROR_PREFIX = "kvferry: error: "
"""Beginning of the line in which a process reports wrong settings."""


def shutdown_signals() -> tuple[signal.Signals, ...]:
    """The signals that shut this process down: SIGINT (Ctrl-C), SIGTERM, and SIGHUP (the end of its terminal) unless
    `nohup` has the process ignore it. Call this before any handler is set."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if outlives else (signal.SIGHUP,)))


def exit_process(code: int) -> NoReturn:
    """End this process. Its exit handlers run, but threads are not waited for."""
    handlers_thread = threading.Thread(target=atexit._run_exitfuncs, name="kvferry-exit", daemon=True)
    handlers_thread.start()
    handlers_thread.join(EXIT_S)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader is gone
            stream.flush()
    os._exit(code)


def exit_code_of(run: Callable[[], int]) -> int:
    """Run a command's main function, and return the exit code of the process. A known error becomes one line on
    standard error."""
    try:
        return run()
    except (ConfigError, UnsupportedModel) as error:
        return report_error(str(error), EXIT_USER_ERROR)
    except KvferryError as error:
        return report_error(str(error), 1)
    except KeyboardInterrupt:
        warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that cannot be awaited any more
        return 130


def report_error(text: str, code: int) -> int:
    """Write an error as one line on standard error; returns `code`."""
    sys.stderr.write(f"{ERROR_PREFIX}{' '.join(text.split()).rstrip('.')}\n")
    return code


class ShutdownDeadline:
    """Ends this process with exit code 1 if it has not closed its resources `max_close_s` after `begin`. Once they are
    closed, ends it with its own exit code if threads keep it alive for more than `EXIT_S`."""

    max_close_s = 15.0
    """Maximum seconds in which a process closes its resources, after its last request."""

    def __init__(self) -> None:
        self._timer = _timer(self.max_close_s, self._expire)

    async def run(self, serving: Awaitable[int]) -> int:
        """Await `serving` and return its exit code. From then on, the process ends after `EXIT_S` even if threads still
        run: an event loop waits for them, and a thread that looks up a host name may take minutes."""
        code = await serving
        self._timer.cancel()
        self._timer = _timer(EXIT_S, exit_process, code)
        self._timer.start()
        return code

    def begin(self) -> None:
        """Start the deadline, once the last request is over. Called once."""
        self._timer.start()

    def cancel(self) -> None:
        """Cancel the deadline: everything was closed in time, and the process ends by itself."""
        self._timer.cancel()

    def _expire(self) -> None:
        logger.error("the process could not close everything within %g s, and ends now", self.max_close_s)
        exit_process(1)


def _timer(seconds: float, func: Callable[..., object], *arguments: Any) -> threading.Timer:
    timer = threading.Timer(seconds, func, arguments)
    timer.daemon = True
    return timer


@contextmanager
def shutdown_deadline() -> Iterator[ShutdownDeadline]:
    """A deadline that holds from its `begin` to the end of the body."""
    deadline = ShutdownDeadline()
    try:
        yield deadline
    finally:
        deadline.cancel()
