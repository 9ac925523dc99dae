"""One child process of the fleet: started, read, and stopped.

A child leads a session of its own, so that Ctrl-C on the terminal reaches the supervisor only, and so that its whole
group can be killed. It is started from the supervisor's main thread: the kernel ties a child's life to the thread that
made it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from kvferry.core.errors import ProtocolError
from kvferry.engine.server.registrar import RegistrarConfig
from kvferry.fleet.asking import serves
from kvferry.fleet.cpu import Cores
from kvferry.fleet.first_cause import FirstCause
from kvferry.fleet.fork_server import ForkedChild, ForkServer
from kvferry.fleet.launcher import launching
from kvferry.fleet.ready import MAX_LINE_BYTES, READY_FLAG, InstanceReady, StartProgress, parse_message

PROGRAM = (sys.executable, "-m", "kvferry.cli.main")

_NUM_LAST_LINES = 20
_ASK_EVERY_S = 0.25
_DRAIN_S = 1.0
"""Seconds after a child's end for the rest of its group to end, and to read what it has written."""


@dataclass(frozen=True)
class Foreign:
    """A program that is not kvferry's and does not speak the start protocol.

    It serves when GET `url`/health is answered with 200. `steps`: patterns of log lines, and the progress that they
    mean.
    """

    url: str
    steps: tuple[tuple[re.Pattern[str], StartProgress], ...] = ()

    def progress_of(self, line: str) -> StartProgress | None:
        """The progress that a log line means, if any."""
        return next((progress for pattern, progress in self.steps if pattern.search(line)), None)


@dataclass(frozen=True)
class ProcessSpec:
    """What to run. `environment` is added to the supervisor's own, without `hidden`.

    `foreign`: set for a program that is not kvferry's; its children may outlive it, so it runs under a guard process.
    `forks`: it is `PROGRAM` with arguments and imports what every instance imports, so it may be forked. `registrar`:
    routers at which the supervisor registers it, if it does not do so itself. `descriptors`: files that it inherits.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    cores: Cores = ()
    foreign: Foreign | None = None
    registrar: RegistrarConfig | None = None
    forks: bool = False
    descriptors: tuple[int, ...] = ()

    def at_port(self, port: int | None) -> ProcessSpec:
        """The same with a fixed port, that of an earlier process, instead of any free one."""
        if port is None:
            return self
        return replace(self, command=tuple(f"--port={port}" if one == "--port=0" else one for one in self.command))

    def full_environment(self) -> dict[str, str]:
        """The child's environment. Output is unbuffered, so that the last line before a crash is seen."""
        inherited = {name: value for name, value in os.environ.items() if name not in self.hidden}
        return {**inherited, "PYTHONUNBUFFERED": "1", **self.environment}


class Process:
    """A running child. `watch` must run for as long as the child does."""

    def __init__(
        self,
        spec: ProcessSpec,
        process: asyncio.subprocess.Process | ForkedChild,
        log: _Pipe,
        messages: _Pipe,
    ) -> None:
        self.spec, self.pid = spec, process.pid
        self.ready: asyncio.Future[InstanceReady] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self.last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self.first_cause = FirstCause()
        """Of what goes wrong while it starts."""
        self._process, self._log, self._messages = process, log, messages

    @classmethod
    async def start(cls, spec: ProcessSpec, fork_server: ForkServer | None = None) -> Process:
        """Start it, by a fork if possible. Raises `OSError` if the system has no room for another process."""
        log_read, log_write = os.pipe()
        ready_read, ready_write = os.pipe()
        log, messages = await _Pipe.open(log_read), await _Pipe.open(ready_read)
        try:
            forked = await _forked(spec, fork_server, log_write, ready_write)
            process = forked or await _spawned(spec, log_write, ready_write)
        except BaseException:
            log.close()
            messages.close()
            raise
        finally:
            os.close(log_write)
            os.close(ready_write)
        return cls(spec, process, log, messages)

    @property
    def name(self) -> str:
        """Its name in the fleet."""
        return self.spec.name

    @property
    def returncode(self) -> int | None:
        """Exit code; minus the number of the signal that ended it; None while it runs."""
        return self._process.returncode

    async def watch(self, on_line: Callable[[str], None], on_progress: Callable[[StartProgress], None]) -> None:
        """Pass on the child's log and progress until it and its whole group have ended."""
        try:
            async with asyncio.TaskGroup() as group:
                foreign = self.spec.foreign
                readers = [
                    group.create_task(self._read_log(on_line, on_progress)),
                    group.create_task(self._read_messages(on_progress) if foreign is None else self._ask(foreign)),
                ]
                await self._process.wait()
                # Processes of the child's group may hold its pipes and finish their work, but not for long.
                await asyncio.wait(readers, timeout=_DRAIN_S)
                self.kill()
                _, late = await asyncio.wait(readers, timeout=_DRAIN_S)
                for reader in late:
                    reader.cancel()
        finally:
            await self._put_away()

    async def _put_away(self) -> None:
        """Nothing of the child is left when `gone` is set."""
        self.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await self._process.wait()
                _reap_group(self.pid)
        self._log.close()
        self._messages.close()
        self.gone.set()

    def terminate(self) -> None:
        """Send SIGTERM to the child, which has to end its own children."""
        if self.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the child and its whole group."""
        if not self.gone.is_set():  # Later, the pid may be another process's.
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            if self.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)  # right after a fork, it leads no group yet

    async def _read_log(self, on_line: Callable[[str], None], on_progress: Callable[[StartProgress], None]) -> None:
        foreign = self.spec.foreign
        async for line in self._log.lines():
            text = line.decode(errors="replace").rstrip()
            self.last_lines.append(text)
            on_line(text)
            if not self.ready.done():
                self.first_cause.feed(text)
            progress = None if foreign is None or self.ready.done() else foreign.progress_of(text)
            if progress is not None:
                on_progress(progress)

    async def _ask(self, foreign: Foreign) -> None:
        """Poll whether it serves, since it sends no message."""
        while self.returncode is None:
            if await serves(foreign.url) and not self.ready.done():
                self.ready.set_result(InstanceReady(foreign.url))
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_ASK_EVERY_S):
                    await self._process.wait()

    async def _read_messages(self, on_progress: Callable[[StartProgress], None]) -> None:
        async for line in self._messages.lines():
            try:
                message = parse_message(line)
            except ProtocolError as error:
                self.last_lines.append(str(error))
                continue
            if isinstance(message, StartProgress):
                on_progress(message)
            elif not self.ready.done():
                self.ready.set_result(message)


def _reap_group(leader: int) -> None:
    """Processes whose parent has ended are children of this process, if it is a subreaper."""
    with suppress(ChildProcessError):
        while os.waitpid(-leader, os.WNOHANG)[0]:
            pass


async def _forked(spec: ProcessSpec, fork_server: ForkServer | None, log: int, ready: int) -> ForkedChild | None:
    """The forked child; None if it has to be started as a new process."""
    if fork_server is None or not spec.forks:
        return None
    return await fork_server.fork(spec.command[len(PROGRAM) :], spec.full_environment(), spec.cores, log, ready)


async def _spawned(spec: ProcessSpec, log: int, ready: int) -> asyncio.subprocess.Process:
    own = spec.foreign is None
    command = (*spec.command, READY_FLAG, str(ready)) if own else spec.command
    return await asyncio.create_subprocess_exec(
        *launching(command, spec.cores, "self" if own else "group"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=spec.full_environment(),
        start_new_session=True,
        pass_fds=(ready, *spec.descriptors),
    )


class _Pipe:
    """The reading end of a pipe."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport) -> None:
        self._reader, self._transport = reader, transport

    @classmethod
    async def open(cls, descriptor: int) -> _Pipe:
        """Take ownership of a descriptor."""
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        return cls(reader, transport)

    async def lines(self) -> AsyncIterator[bytes]:
        """Lines as they arrive, none much longer than `MAX_LINE_BYTES`: longer ones come in pieces."""
        rest = b""
        while chunk := await self._reader.read(MAX_LINE_BYTES):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield line
            if len(rest) > MAX_LINE_BYTES:
                yield rest
                rest = b""
        if rest:
            yield rest

    def close(self) -> None:
        """Close the descriptor."""
        self._transport.close()
