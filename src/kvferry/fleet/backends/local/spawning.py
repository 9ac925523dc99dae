"""Starts processes of this machine, and the forking process before the command line's own imports.

It imports little: the command line needs it first of all (`start_fork_process_early`), and the imports of the forking
process, about three seconds of CPU time, then run beside its own.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence

from kvferry.fleet.backends.local.launcher import launch_command

MEMBERS_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Variables that prevent libraries from starting threads on import: a process with several threads cannot be forked."""
FORK_PROGRAM = (sys.executable, "-m", "kvferry.fleet.backends.local.fork_main")
CUDA_DEVICE = "/dev/nvidiactl"
_early: list[tuple[int, socket.socket]] = []


def spawn_process(
    command: Sequence[str], environment: Mapping[str, str], *, output: int | None = None, inherits: Sequence[int] = ()
) -> int:
    """Process id of a child with a session of its own, which writes to `output` (None: nowhere) and inherits these
    descriptors under the same numbers. Raises `OSError`."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        target = null if output is None else output
        for descriptor in inherits:
            os.set_inheritable(descriptor, True)
        streams = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, target, 1), (os.POSIX_SPAWN_DUP2, target, 2)]
        return os.posix_spawn(
            command[0],
            [*command],
            environment,
            file_actions=streams,
            setsid=True,
            setsigmask=(),  # a process of Ray's has blocked some
        )
    finally:
        for descriptor in inherits:
            os.set_inheritable(descriptor, False)
        os.close(null)


def start_fork_process(
    environment: Mapping[str, str], program: Sequence[str] = FORK_PROGRAM
) -> tuple[int, socket.socket]:
    """Process id of a forking process, which ends with this one, and this end of its socket. Raises `OSError`."""
    own_end, program_end = socket.socketpair()
    own_end.setblocking(False)
    command = (*program, str(program_end.fileno()))
    try:
        with program_end:
            pid = spawn_process(  # without output: an import that fails here fails in an instance too
                launch_command(command, (), "self"),
                {**environment, **MEMBERS_THREADS},
                inherits=(program_end.fileno(),),
            )
    except BaseException:
        own_end.close()
        raise
    return pid, own_end


def start_fork_process_early(arguments: Sequence[str], cuda_device: str = CUDA_DEVICE) -> None:
    """Start it before anything is imported, if a command with these arguments will most likely need it."""
    flags = {argument.partition("=")[0] for argument in arguments}
    if not {"serve", "demo"} & set(arguments[:1]) or flags & {"--help", "-h", "--help-all", "--engine", "--backend"}:
        return
    if "KVFERRY_ENGINE" in os.environ or "KVFERRY_BACKEND" in os.environ or os.path.exists(cuda_device):  # noqa: PTH110
        return
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    try:
        _early.append(start_fork_process(inherited))
    except OSError:
        return  # it is started when it is needed, and the error is reported then


def take_early_fork_process() -> tuple[int, socket.socket] | None:
    """The forking process that was started early, unless it has been taken; the caller owns it."""
    return _early.pop() if _early else None


def discard_early_fork_process() -> None:
    """End it, because it will not be needed."""
    for pid, own_end in _early:
        own_end.close()
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    _early.clear()
