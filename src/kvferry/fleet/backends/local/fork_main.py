"""The process that instances are forked from: it imports what every instance imports, once, and then only forks.

python -m kvferry.fleet.backends.local.fork_main DESCRIPTOR      the descriptor of its end of the controller's socket

It has one thread and runs no operation of torch. So a child begins like a new process: with its own session,
environment, cores, standard streams and signals, and no other descriptor. The controller's side and the messages are in
`fork_server`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import setproctitle

from kvferry.core.errors import PeerLost
from kvferry.core.messages.wire import Pipe
from kvferry.core.names import resolve, without_collections
from kvferry.core.runtime.process_exit import exit_code_of, exit_process
from kvferry.fleet.backends.local.fork_messages import (
    NUM_DESCRIPTORS,
    Forked,
    ForkRequest,
    Imported,
    NotForked,
)
from kvferry.fleet.backends.local.launcher import write_process
from kvferry.fleet.processes.member_main import run_member
from kvferry.fleet.processes.process_settings import read_document
from kvferry.fleet.processes.running import RUN_INSTANCE
from kvferry.observe.logs import LogConfig, set_up_logging

_PR_SET_PDEATHSIG = 1
_ADOPTION_POLL_S = 0.001
"""Seconds between two checks whether the controller has become the parent."""


def main(descriptor: int) -> int:
    """Fork until the controller closes its end. Returns in each child too, with the exit code of its command."""
    setproctitle.setproctitle("kvferry: instances are forked from this process")
    with without_collections():  # a collection in a child would copy what they share
        resolve(RUN_INSTANCE)  # this imports everything that an instance imports
    if len(list(Path("/proc/self/task").iterdir())) != 1:
        return 1  # a lock that another thread holds would stay locked in a child forever
    child = _Forks(descriptor).run()
    if child is None:
        os._exit(0)  # destroying 350,000 objects one by one would take longer than the child's work
    return _run(child)


@dataclass(frozen=True)
class _Child:
    """A forked child's request; `ready`: the descriptor of its start messages."""

    request: ForkRequest
    ready: int


class _Forks:
    """The controller's socket, and the requests that arrive on it."""

    def __init__(self, descriptor: int) -> None:
        self._controller = Pipe(descriptor, ForkRequest)

    def run(self) -> _Child | None:
        """Returns the request in each child, which no longer has the socket. In this process, returns None when the
        controller has closed its end."""
        self._controller.send(Imported())
        while True:
            try:
                request, descriptors = self._controller.receive_with_descriptors(NUM_DESCRIPTORS)
            except PeerLost:
                return None
            if (child := self._fork(request, *descriptors)) is not None:
                return child
            for descriptor in descriptors:
                os.close(descriptor)

    def _fork(self, request: ForkRequest, log: int, ready: int) -> _Child | None:
        """Fork twice: the process in between ends at once, so that the controller becomes the child's parent and the
        child can outlive this process."""
        try:
            intermediate_pid = os.fork()
        except OSError as error:
            self._controller.send(NotForked(error.errno or 0))
            return None
        if intermediate_pid:
            os.waitpid(intermediate_pid, 0)
            return None
        intermediate_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._controller.send(NotForked(error.errno or 0))
            os._exit(1)
        if pid:
            try:
                self._controller.send(Forked(pid))
            except PeerLost:  # the controller has ended and cannot stop the child
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        self._controller.close()
        _detach(intermediate_pid, request, log)
        return _Child(request, ready)


# In a child.


def _detach(intermediate_pid: int, request: ForkRequest, log: int) -> None:
    """Get its own session and standard streams and, if the request says so, end with the controller."""
    os.setsid()
    os.dup2(log, 1)  # before the next line, because the controller recognises the process by its log
    os.dup2(log, 2)
    os.close(log)  # standard input is inherited from the process that forks, and is empty
    write_process(request.process)
    while os.getppid() == intermediate_pid:
        time.sleep(_ADOPTION_POLL_S)
    if request.is_tied:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != request.parent:
            os._exit(1)


def _run(child: _Child) -> int:
    """Run as `member_main` does in a new process."""
    request = child.request
    setproctitle.setproctitle(request.title)
    if request.cores:
        os.sched_setaffinity(0, request.cores)
    os.environ.clear()
    os.environ.update(request.environment)
    # By name, since this package does not import torch. Torch read the variable when it was imported.
    resolve("torch:set_num_threads")(int(request.environment["OMP_NUM_THREADS"]))
    sys.argv = request.title.split()
    set_up_logging(LogConfig())
    return exit_code_of(lambda: run_member(read_document(request.settings), child.ready))


if __name__ == "__main__":
    exit_process(main(int(sys.argv[1])))
