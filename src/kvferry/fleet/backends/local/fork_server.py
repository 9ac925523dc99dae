"""Forks instances from one process that has imported torch and transformers for all of them.

These imports are most of the CPU time that an instance takes to start, and the same in each. So a fleet needs this time
only once, and an instance that has died restarts quickly. `fork_main` is the process; it is started with the first
instance, and ends with the controller. Each instance becomes a child of the controller, which is their subreaper. They
continue when the forking process dies, and the next fork starts another one. If forking would not be sound (with CUDA,
whose state a child cannot inherit, or when a library starts threads on import), each instance is started as a new
process.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.errors import ProtocolError
from kvferry.core.messages.wire import FrameReader, encode_frame
from kvferry.core.settings.model import encode
from kvferry.fleet.backends.local.child import ChildProcess
from kvferry.fleet.backends.local.fork_messages import Forked, ForkRequest, Imported, Message, NotForked
from kvferry.fleet.backends.local.spawning import (
    CUDA_DEVICE,
    FORK_PROGRAM,
    discard_early_fork_process,
    start_fork_process,
    take_early_fork_process,
)
from kvferry.fleet.processes.cpu import Cores
from kvferry.fleet.processes.process_settings import ProcessSettings

logger = logging.getLogger(__name__)

_RECEIVE_BYTES = 4096
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class ForkTimes:
    """Maximum seconds to wait for the forking process."""

    end_timeout_s: float = 5.0
    fork_s: float = 10.0
    import_s: float = 120.0
    """For its imports. After this time, instances are started without it."""


class ForkServer:
    """Owns the forking process and the socket to it. Used by one event loop. Makes this process the subreaper of its
    descendants: processes that are forked become its children."""

    def __init__(
        self,
        *,
        is_tied: bool = True,
        program: Sequence[str] = FORK_PROGRAM,
        cuda_device: Path = Path(CUDA_DEVICE),
        times: ForkTimes | None = None,
    ) -> None:
        """`is_tied`: forked processes end with this one. `program`: the command of the forking process. `cuda_device`:
        a path; if it exists, nothing is forked."""
        self._is_tied, self.program, self.times = is_tied, program, times or ForkTimes()
        self._is_enabled = not cuda_device.exists()
        self._is_closed = False
        self._server: _Server | None = None
        self._lock = asyncio.Lock()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    async def fork(
        self,
        settings: ProcessSettings,
        environment: Mapping[str, str],
        cores: Cores,
        *,
        log: int,
        ready: int,
        process: Path,
    ) -> ChildProcess | None:
        """A child that runs the process of these settings, and writes its process id into the file `process`; None if
        it has to be started as a new process.

        Raises `OSError` if the system has no room for another process, and after `close`.
        """
        async with self._lock:
            server = await self._running(environment)
        if self._is_closed:
            raise OSError(errno.ESHUTDOWN, "the fleet ends")
        if server is None:
            return None
        try:
            title = " ".join(("kvferry", *settings.title))
            request = ForkRequest(
                encode(settings), title, dict(environment), cores, os.getpid(), self._is_tied, str(process)
            )
            return await server.fork(request, log, ready)
        except TimeoutError:
            logger.warning("the process that forks instances has hung; starting an instance without it")
            server.kill()  # otherwise it might fork later, and the child would take this member's place
            return None

    async def _running(self, environment: Mapping[str, str]) -> _Server | None:
        """The forking process, restarted if it has ended; None: instances are not forked."""
        if self._server is not None and self._server.is_gone:
            await self._server.close()
            self._server = None
        if self._server is None and self._is_enabled:
            self._server = _Server.start(environment, self.program, self.times)
            if self._is_closed:  # closed during the start
                await self._server.close()
        if self._server is not None and not await self._server.has_imported():
            logger.debug("instances are not forked, as what they import cannot be imported once for all of them")
            await self._server.close()
            self._server, self._is_enabled = None, False
        return self._server

    @property
    def pid(self) -> int | None:
        """The process id of the forking process; None if there is none."""
        return None if self._server is None or self._server.is_gone else self._server.pid

    @property
    def num_pending(self) -> int:
        """Requests to fork that have no answer yet."""
        return 0 if self._server is None else self._server.num_pending

    async def close(self) -> None:
        """End the process. A `fork` that waits for it ends at once."""
        self._is_enabled, self._is_closed = False, True
        discard_early_fork_process()
        if self._server is not None:
            await self._server.close()


class _Server:
    """One forking process, from its start to its end."""

    def __init__(self, process: ChildProcess, own_end: socket.socket, times: ForkTimes) -> None:
        self._process, self._socket, self._times = process, own_end, times
        self._answers: deque[asyncio.Future[ChildProcess]] = deque()
        self._ready = asyncio.Event()
        self._sending = asyncio.Lock()
        self._listener = asyncio.create_task(self._listen())
        self.is_gone = False

    @classmethod
    def start(cls, environment: Mapping[str, str], program: Sequence[str], times: ForkTimes) -> _Server:
        """Start the process, or take the one that was started early. It can be used once `has_imported` returns
        True."""
        pid, own_end = take_early_fork_process() or start_fork_process(environment, program)
        try:
            process = ChildProcess(pid)
        except BaseException:  # no descriptor is left
            os.kill(pid, signal.SIGKILL)
            own_end.close()
            raise
        return cls(process, own_end, times)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def num_pending(self) -> int:
        """Requests that have no answer yet."""
        return len(self._answers)

    async def has_imported(self) -> bool:
        """Wait until everything is imported; False if it cannot be, if forking would not be sound, or after
        `ForkTimes.import_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._times.import_s):
                await self._ready.wait()
        return self._ready.is_set() and not self.is_gone

    async def fork(self, request: ForkRequest, log: int, ready: int) -> ChildProcess:
        """A child. Raises `OSError`; `TimeoutError` if the process has hung."""
        answer: asyncio.Future[ChildProcess] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._times.fork_s):
                async with self._sending:
                    await self._send(encode_frame(request), [log, ready])
                    self._answers.append(answer)
                return await answer
        except BaseException:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                answer.result().kill()  # it arrived at the moment at which the wait for it ended
            raise

    async def _send(self, frame: bytearray, descriptors: list[int]) -> None:
        try:
            sent = socket.send_fds(self._socket, [frame], descriptors)
        except BlockingIOError as error:
            raise TimeoutError("it has not read earlier requests") from error
        if sent < len(frame):
            try:
                await asyncio.get_running_loop().sock_sendall(self._socket, memoryview(frame)[sent:])
            except BaseException:
                self.kill()  # it has half a request, and would take the next one for the rest
                raise

    def kill(self) -> None:
        """Kill it now; pending requests get no reply."""
        self.is_gone = True
        self._process.kill()

    async def close(self) -> None:
        """End it; returns when it has ended, and children that are not awaited any more are killed."""
        for answer in self._answers:
            _fail(answer, OSError(errno.ESHUTDOWN, "the fleet ends"))
        if self._ready.is_set():
            with suppress(OSError):  # it has ended
                self._socket.shutdown(socket.SHUT_WR)
        else:  # it receives nothing while it imports
            self._process.kill()
        if not await self._process.wait(self._times.end_timeout_s):
            self._process.kill()
            await self._process.wait()
        await asyncio.wait([self._listener])
        self._socket.close()

    async def _listen(self) -> None:
        loop, frames = asyncio.get_running_loop(), FrameReader(Message)
        try:
            with suppress(ConnectionError):
                while data := await loop.sock_recv(self._socket, _RECEIVE_BYTES):
                    for message in frames.feed(data):
                        self._on_message(message)
        except ProtocolError as error:
            logger.warning("the process that forks instances sent something that is not a message: %s", error)
        finally:  # After any error, no caller may wait for messages that will not come.
            self._fail_pending()

    def _on_message(self, message: Message) -> None:
        match message:
            case Imported():
                self._ready.set()
            case Forked(pid):
                self._deliver(pid, self._answers.popleft())
            case NotForked(number):
                _fail(self._answers.popleft(), OSError(number, os.strerror(number)))

    def _deliver(self, pid: int, answer: asyncio.Future[ChildProcess]) -> None:
        try:
            child = ChildProcess(pid)
        except OSError as error:  # no descriptor is left
            os.kill(pid, signal.SIGKILL)
            _fail(answer, error)
            return
        if answer.done():  # its caller no longer waits, and would not end it
            child.kill()
        else:
            answer.set_result(child)

    def _fail_pending(self) -> None:
        """The process has ended, or nothing is received from it any more: fail all pending requests."""
        self.is_gone = True
        self._ready.set()
        while self._answers:
            _fail(self._answers.popleft(), OSError(errno.ECHILD, "the process that forks instances has ended"))


def _fail(answer: asyncio.Future[ChildProcess], error: OSError) -> None:
    if not answer.done():
        answer.set_exception(error)
