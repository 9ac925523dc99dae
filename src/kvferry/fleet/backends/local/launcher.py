"""Becomes a member of a fleet: writes its process id, may tie its life to the controller's, takes its cores, and then
executes the member's program.

Run as a script in the new process, before anything else: what it sets survives `exec`. So the controller runs no Python
between `fork` and `exec`, which could deadlock in a process with threads. This script imports nothing of kvferry, so
that it takes only a few milliseconds.

    python launcher.py CONTROLLER_PID CORES LEASH FILE -- COMMAND…      CORES: 0,1,2 or "-" for all

LEASH `self`: the command's own children end with it. `group`: they may not, so this process stays as its parent, and
ends the whole group when the controller ends, in whatever way. `none`: the controller may come and go.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

TYPE_CHECKING = False  # as in typing, without the time that takes to import
if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def launch_command(command: Sequence[str], cores: Sequence[int], leash: str, process: str = "-") -> tuple[str, ...]:
    """The command line that runs this script. `process`: the file in which it writes its process id."""
    cores_text = ",".join(map(str, cores)) or "-"
    # Isolated and without site: this script needs the standard library only, and must start fast.
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), cores_text, leash, process, "--", *command)


def main(arguments: list[str]) -> None:
    """Become a member. Does not return: the process becomes another program, or ends."""
    controller, cores, leash, process, separator, *command = arguments
    if separator != "--" or not command:
        sys.exit("launcher: expected CONTROLLER_PID CORES LEASH FILE -- COMMAND…")
    if process != "-":
        write_process(process)
    if cores != "-":
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    if leash == "group":
        signal.signal(signal.SIGUSR1, _end_group)
        _signal_when_gone(int(controller), signal.SIGUSR1)
        _guard(command)
    if leash == "self":
        _signal_when_gone(int(controller), signal.SIGKILL)  # SIGKILL, because a child that hangs ignores SIGTERM.
    _become(command)


def write_process(path: str) -> None:
    """Write the number and the start time of this process, which together identify it."""
    stat = os.open("/proc/self/stat", os.O_RDONLY)
    started = os.read(stat, 4096).rpartition(b")")[2].split()[19].decode()
    os.close(stat)
    file = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(file, f"{os.getpid()} {started}\n".encode())
    os.close(file)
    os.rename(f"{path}.new", path)  # noqa: PTH104 - pathlib is not to be imported here


def _signal_when_gone(controller: int, number: int) -> None:
    """Receive a signal when the controller ends, for any reason."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number) != 0:
        sys.exit(f"kvferry: error: cannot tie a process to its controller: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != controller:
        sys.exit("kvferry: error: the controller ended before its child began")


def _become(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"kvferry: error: cannot run {command[0]}: {error.strerror}")


def _guard(command: list[str]) -> None:
    """Run the command as a child, forward SIGTERM to it, and end as it ends. The controller then ends the group."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is a child to forward it to
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        _signal_when_gone(os.getppid(), signal.SIGKILL)
        _become(command)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # so that its pid is its own for as long as it may be signalled
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_group(number: int, frame: object) -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
