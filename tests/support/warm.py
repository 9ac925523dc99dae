"""Runs `kvferry` commands in processes forked from one that has imported torch and transformers already.

An instance spends five of its six seconds of CPU time on those imports, and a test run starts over a hundred. What is
forked has everything else of its own: descriptors, environment, signals, exit code. How a command starts from nothing
is tested where that matters: `kvferry serve`, the demo, and the commands of the README.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

_MODULE = "support.warm_imports"


class Child(Protocol):
    """The part of `subprocess.Popen` that tests use."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, minus the number of the signal that ended it; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises `subprocess.TimeoutExpired`."""

    def send_signal(self, sig: int) -> None:
        """Nothing, when it has ended."""

    def kill(self) -> None:
        """SIGKILL."""


class ForkedCommand:
    """One `kvferry` command under way; a `Child`."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path, ready_write: int) -> None:
        """`--ready-fd` is added to `arguments`, with the child's own number for it."""
        self._arguments = arguments
        with Connection(os.dup(ready_write), readable=False) as ready:
            self._process: BaseProcess = _context().Process(
                target=_run, args=(list(arguments), dict(environment), str(log), ready), daemon=True
            )
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(list(self._arguments), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_MODULE])
    return context


def _run(arguments: list[str], environment: dict[str, str], log: str, ready: Connection) -> None:
    """In the child: what `python -m kvferry.cli.main` does."""
    from kvferry.cli.main import main

    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    ready_fd = os.dup(ready.fileno())
    ready.close()
    command = [arguments[0], f"--ready-fd={ready_fd}", *arguments[1:]]
    sys.argv = ["kvferry", *command]
    sys.exit(main(command))
