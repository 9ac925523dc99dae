"""How a process ends: within seconds, whatever its threads are in.

A thread in a call that never returns, into a disk whose server is gone or a driver, cannot be ended, and Python waits
at its end for every thread of an executor. So a process closes what it has within a limit, and then leaves without
waiting for threads.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

log = logging.getLogger(__name__)

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


class EndLimit:
    """Ends this process with exit code 1 if what follows `begin` takes longer than `END_S`."""

    def __init__(self) -> None:
        self._timer = threading.Timer(END_S, self._over)
        self._timer.daemon = True

    def begin(self) -> None:
        """Start the limit, once the last request is over. Called once."""
        self._timer.start()

    def cancel(self) -> None:
        """End the limit: everything was closed in time, and the process ends by itself."""
        self._timer.cancel()

    def _over(self) -> None:
        log.error("the process could not close everything within %g s, and ends now", END_S)
        leave(1)


@contextmanager
def end_limit() -> Iterator[EndLimit]:
    """A limit that holds from its `begin` to the end of the body."""
    limit = EndLimit()
    try:
        yield limit
    finally:
        limit.cancel()
