"""A process of this machine, started by this process or by an earlier controller.

A child has its own session, so that Ctrl-C on the terminal does not reach it, and so that its whole group can be
killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from kvferry.fleet.backends.local.spawning import spawn_process


class ChildProcess:
    """Owns a descriptor of the process, with which it waits for the process and sends signals, because the process's
    number may belong to another process later. Used on one event loop."""

    poll_interval_s = 0.01

    def __init__(self, pid: int, *, is_child: bool = True) -> None:
        """`is_child`: it is a child of this process, or is about to become one. Raises `OSError` if there is no such
        process, or no free descriptor."""
        self.pid, self._is_child = pid, is_child
        self.returncode: int | None = None
        """Exit code; minus the number of the signal that ended it; None while it runs, or if it cannot be read."""
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    @property
    def has_ended(self) -> bool:
        """True if it has ended."""
        return self._ended.is_set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end, at most `timeout_s`. Returns True if it has ended."""
        if not self._ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._ended.wait()
        return self._ended.is_set()

    def terminate(self) -> None:
        """Ask it to end."""
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Send it a signal, unless it is known to have ended."""
        if not self._ended.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        """Kill it and its whole group. Must not be called long after its end, because its number may belong to another
        group then."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.signal(signal.SIGKILL)  # just after a fork, it has no group yet

    def reap_group(self) -> None:
        """Processes of its group whose parent has ended are children of this process, if it is a subreaper."""
        with suppress(ChildProcessError):
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass

    def detach(self) -> None:
        """Stop watching it; it continues."""
        if not self._ended.is_set():
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._ended.set()

    def _reap(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._descriptor)
        if self._is_child:
            try:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:  # it ended before it became a child of this process
                loop.call_later(self.poll_interval_s, loop.add_reader, self._descriptor, self._reap)
                return
        os.close(self._descriptor)
        self._ended.set()


def spawn(
    command: Sequence[str], environment: Mapping[str, str], *, output: int | None = None, inherits: Sequence[int] = ()
) -> ChildProcess:
    """A child with its own session, which writes to `output` (None: nowhere) and inherits these descriptors under the
    same numbers. Raises `OSError`."""
    return ChildProcess(spawn_process(command, environment, output=output, inherits=inherits))
