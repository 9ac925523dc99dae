"""Runs `kvferry` commands, ranks and code in processes forked from one that has torch and transformers already.

An instance spends five of its six seconds of CPU time on those imports, and a test run starts over a hundred. What is
forked has everything else of its own: descriptors, environment, signals, exit code. How processes start from nothing
is tested where that matters: `kvferry serve`, the demo, the commands of the README, and the loss of ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Protocol

_IMPORTS = "support.warm_imports"
_starting = threading.Lock()


class Child(Protocol):
    """The part of `subprocess.Popen` that is used."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def returncode(self) -> int | None:
        """Its exit code, minus the number of the signal that ended it; None while it is not known to have ended."""

    def poll(self) -> int | None:
        """`returncode`, looked up now."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. Raises `subprocess.TimeoutExpired`."""

    def send_signal(self, sig: int) -> None:
        """Nothing, when it has ended."""

    def kill(self) -> None:
        """SIGKILL."""


class Forked:
    """A process under way; a `Child`. It calls `target(descriptor, *arguments)` with a `descriptor` of its own that is
    a copy of the given one."""

    def __init__(self, target: Callable[..., None], descriptor: int, *arguments: Any) -> None:
        with Connection(os.dup(descriptor)) as copied:
            self._process = _context().Process(target=_call, args=(target, copied, *arguments), daemon=True)
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_command(arguments: Sequence[str], environment: Mapping[str, str], log: Path, ready_write: int) -> Forked:
    """`kvferry ARGUMENTS --ready-fd=…`; what it says is in `log`."""
    return Forked(_run_command, ready_write, list(arguments), dict(environment), str(log))


def run_rank(rank: int, pipe: int, auth_token: str) -> Forked:
    """A `StartProcess`."""
    return Forked(_run_rank, pipe, {**os.environ, "OMP_NUM_THREADS": "1", "KVFERRY_AUTH_TOKEN": auth_token})


class Program:
    """`python -c CODE`, under way."""

    def __init__(self, code: str, folder: Path, **environment: str) -> None:
        """`folder` is for what it prints, `environment` is added to this process's."""
        self._output, self._errors = folder / "output", folder / "errors"
        folder.mkdir(exist_ok=True)
        given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        with self._output.open("wb") as output:
            self.process = Forked(_run_program, output.fileno(), code, given, str(self._errors))

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._output.read_text()

    def end(self, timeout: float = 200) -> subprocess.CompletedProcess[str]:
        """Wait for it. Raises `subprocess.TimeoutExpired`."""
        status = self.process.wait(timeout)
        return subprocess.CompletedProcess([], status, self.output, self._errors.read_text())


def _context() -> ForkServerContext:
    with _starting:  # a cache's function may run in two threads at once, and this one changes the environment
        return _make_context()


@cache
def _make_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_IMPORTS])
    # It passes over what it cannot import, and before Python 3.13 does not look where this process does.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


# In the child.


def _call(target: Callable[..., None], copied: Connection, *arguments: Any) -> None:
    descriptor = os.dup(copied.fileno())
    copied.close()
    target(descriptor, *arguments)


def _take_environment(environment: dict[str, str]) -> None:
    assert _IMPORTS in sys.modules, "the process that is forked has imported nothing"
    import torch

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))  # which torch has read before


def _run_command(ready_fd: int, arguments: list[str], environment: dict[str, str], log: str) -> None:
    """What `python -m kvferry.cli.main` does."""
    from kvferry.cli.main import main
    from kvferry.core.runtime.process_exit import exit_process

    _take_environment(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    command = [arguments[0], f"--ready-fd={ready_fd}", *arguments[1:]]
    sys.argv = ["kvferry", *command]
    exit_process(main(command))


def _run_program(output: int, code: str, environment: dict[str, str], errors: str) -> None:
    _take_environment(environment)
    os.dup2(output, 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), 2)
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})


def _run_rank(pipe: int, environment: dict[str, str]) -> None:
    """What `python -m kvferry.engine.executor.rank_start` does."""
    from kvferry.engine.executor.rank_main import main

    _take_environment(environment)
    os._exit(main(pipe))
