"""Forks instances from one process that has imported torch and transformers for all of them.

These imports are most of the CPU time that an instance takes to start, and the same in each. A fleet pays for them
once, and an instance that died is restarted in a moment. `cli.fork_main` is the process; it is started with the first
instance, and ends with the supervisor. Each instance becomes a child of the supervisor, which is their subreaper, so
none of them minds when the forking process dies; the next fork starts another one. If forking would not be sound (with
CUDA, whose state a child cannot inherit, or when a library starts threads on import), each instance is started as a new
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
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from kvferry.fleet.cpu import Cores, thread_variables
from kvferry.fleet.fork_messages import MOST_BYTES, Forked, ForkRequest, Imported, Message, NotForked
from kvferry.fleet.launcher import launching

logger = logging.getLogger(__name__)

_IMPORT_S = 120.0
"""Most seconds for the imports, before instances are started without them."""
_FORK_S = 10.0
_END_S = 5.0
_AGAIN_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36
_CUDA = Path("/dev/nvidiactl")


class ForkedChild:
    """A forked process, with the part of `asyncio.subprocess.Process` that `Process` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    async def wait(self) -> int:
        """Its exit code; minus the number of the signal that ended it."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM, unless it is known to have ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to it alone, unless it is known to have ended: right after the fork it does not lead a group
        yet."""
        self._signal(signal.SIGKILL)

    def _reap(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._descriptor)
        try:
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:  # it ended so early that it is not this process's child yet
            loop.call_later(_AGAIN_S, loop.add_reader, self._descriptor, self._reap)
            return
        os.close(self._descriptor)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()

    def _signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)


class ForkServer:
    """Owns the forking process and the socket to it. One event loop. Makes this process the subreaper of its
    descendants: who is forked becomes its child."""

    def __init__(self) -> None:
        self._is_wanted = not _CUDA.exists()
        self._is_closed = False
        self._server: _Server | None = None
        self._lock = asyncio.Lock()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    async def fork(
        self, arguments: tuple[str, ...], environment: Mapping[str, str], cores: Cores, log: int, ready: int
    ) -> ForkedChild | None:
        """A child that runs `kvferry ARGUMENTS`; None if it has to be started as a new process.

        Raises `OSError` if the system has no room for another process, and after `close`.
        """
        async with self._lock:
            server = await self._running(environment)
        if self._is_closed:
            raise OSError(errno.ESHUTDOWN, "the fleet ends")
        if server is None:
            return None
        try:
            return await server.fork(ForkRequest(arguments, dict(environment), cores, os.getpid()), log, ready)
        except (TimeoutError, BlockingIOError):
            logger.warning("the process that forks instances has hung; starting an instance without it")
            return None

    async def _running(self, environment: Mapping[str, str]) -> _Server | None:
        """The forking process, restarted if it has ended; None: instances are not forked."""
        if self._server is not None and self._server.is_gone:
            await self._server.close()
            self._server = None
        if self._server is None and self._is_wanted:
            self._server = await _Server.start(environment)
            if self._is_closed:  # closed meanwhile, when there was nothing to close yet
                await self._server.close()
        if self._server is not None and not await self._server.has_imported():
            logger.debug("instances are not forked, as what they import cannot be imported once for all of them")
            await self._server.close()
            self._server, self._is_wanted = None, False
        return self._server

    async def close(self) -> None:
        """End the process. A `fork` that waits for it ends at once."""
        self._is_wanted, self._is_closed = False, True
        if self._server is not None:
            await self._server.close()


class _Server:
    """One forking process, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process, ours: socket.socket) -> None:
        self._process, self._socket = process, ours
        self._answers: deque[asyncio.Future[ForkedChild]] = deque()
        self._ready = asyncio.Event()
        self._listener = asyncio.create_task(self._listen())
        self.is_gone = False

    @classmethod
    async def start(cls, environment: Mapping[str, str]) -> _Server:
        """Start it; it can be used once `has_imported` returns True."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = (sys.executable, "-m", "kvferry.cli.fork_main", str(theirs.fileno()))
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *launching(command, (), "self"),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,  # an import that fails here fails in an instance too
                    stderr=asyncio.subprocess.DEVNULL,
                    env={**environment, **thread_variables(()), "OPENBLAS_NUM_THREADS": "1"},
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                )
        except BaseException:
            ours.close()
            raise
        return cls(process, ours)

    async def has_imported(self) -> bool:
        """Wait until everything is imported; False if it cannot be, if forking would not be sound, or after
        `_IMPORT_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_IMPORT_S):
                await self._ready.wait()
        return self._ready.is_set() and not self.is_gone

    async def fork(self, request: ForkRequest, log: int, ready: int) -> ForkedChild:
        """A child. Raises `OSError`; `TimeoutError` or `BlockingIOError` if the process has hung."""
        answer: asyncio.Future[ForkedChild] = asyncio.get_running_loop().create_future()
        asked = os.memfd_create("kvferry-fork")
        try:
            os.write(asked, msgspec.json.encode(request))
            socket.send_fds(self._socket, [b"f"], [asked, log, ready])
        finally:
            os.close(asked)
        self._answers.append(answer)
        try:
            async with asyncio.timeout(_FORK_S):
                return await answer
        except BaseException:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                answer.result().kill()  # it arrived at the moment at which the wait for it ended
            raise

    async def close(self) -> None:
        """End it; returns when it has ended, and all that it has forked since for nobody is killed."""
        for answer in self._answers:
            _fail(answer, OSError(errno.ESHUTDOWN, "the fleet ends"))
        if self._ready.is_set():
            with suppress(OSError):  # it has ended
                self._socket.shutdown(socket.SHUT_WR)
        else:  # it receives nothing while it imports
            self._kill()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self._kill()
            await self._process.wait()
        await asyncio.wait([self._listener])
        self._socket.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            with suppress(ConnectionError):
                while packet := await loop.sock_recv(self._socket, MOST_BYTES):
                    self._hear(msgspec.json.decode(packet, type=Message))
        except msgspec.MsgspecError as error:
            logger.warning("the process that forks instances sent a message that is none: %s", error)
        finally:  # Whatever happened, nobody may wait for messages that will not come.
            self._give_up()

    def _hear(self, message: Message) -> None:
        match message:
            case Imported():
                self._ready.set()
            case Forked(pid):
                self._hand_over(pid, self._answers.popleft())
            case NotForked(number):
                _fail(self._answers.popleft(), OSError(number, os.strerror(number)))

    def _hand_over(self, pid: int, answer: asyncio.Future[ForkedChild]) -> None:
        try:
            child = ForkedChild(pid)
        except OSError as error:  # no descriptor is left
            os.kill(pid, signal.SIGKILL)
            _fail(answer, error)
            return
        if answer.done():  # nobody waits any more, and so nobody would end it
            child.kill()
        else:
            answer.set_result(child)

    def _give_up(self) -> None:
        """The process has ended, or nothing is received from it any more: fail all that wait for it."""
        self.is_gone = True
        self._ready.set()
        while self._answers:
            _fail(self._answers.popleft(), OSError(errno.ECHILD, "the process that forks instances has ended"))


def _fail(answer: asyncio.Future[ForkedChild], error: OSError) -> None:
    if not answer.done():
        answer.set_exception(error)
