"""Becomes a child of the fleet: ties its life to the supervisor's, takes its cores, then is the child's own program.

Run as a script, before anything else, in the new process: what it sets outlasts `exec`. That keeps the supervisor
from running Python between `fork` and `exec`, which may deadlock once a process has threads. Nothing of kvferry is
imported, so that it costs a few milliseconds.

    python launcher.py SUPERVISOR_PID CORES LEASH -- COMMAND…      CORES: 0,1,2 or "-" for all

LEASH `self`: the command's children end with it. `group`: they may not, so this process stays as its parent, and when
the supervisor ends, in whatever way, it ends the whole group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Does not return: the process is another program then, or ends."""
    supervisor, cores, leash, separator, *command = arguments
    if separator != "--" or not command:
        sys.exit("launcher: expected SUPERVISOR_PID CORES LEASH -- COMMAND…")
    if cores != "-":
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    if leash == "group":
        signal.signal(signal.SIGUSR1, _end_group)
        _signal_when_gone(int(supervisor), signal.SIGUSR1)
        _guard(command)
    _signal_when_gone(int(supervisor), signal.SIGKILL)  # SIGKILL, as a child that hangs would outlive a request.
    _become(command)


def _signal_when_gone(supervisor: int, number: int) -> None:
    """Get a signal when the supervisor ends, in whatever way."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number) != 0:
        sys.exit(f"kvferry: error: cannot tie a process to its supervisor: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != supervisor:
        sys.exit("kvferry: error: the supervisor ended before its child began")


def _become(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"kvferry: error: cannot run {command[0]}: {error.strerror}")


def _guard(command: list[str]) -> None:
    """Run the command as a child, pass SIGTERM on to it, and end as it ends. The supervisor then ends the group."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        _signal_when_gone(os.getppid(), signal.SIGKILL)
        _become(command)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    status = os.waitpid(child, 0)[1]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_group(number: int, frame: object) -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
