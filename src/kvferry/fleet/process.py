"""One child process of the fleet: started, read, told to end.

A child leads a session of its own, so that a Ctrl-C on the terminal reaches the supervisor only, and so that the
whole group can be ended. It is started from the supervisor's main thread: the kernel ties a child's life to the
thread that made it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvferry.core.errors import ProtocolError
from kvferry.fleet.asking import serves
from kvferry.fleet.cpu import Cores
from kvferry.fleet.ready import MAX_LINE_BYTES, InstanceReady, StartProgress, parse_message
from kvferry.http.registrar import RegistrarConfig

READY_FLAG = "--ready-fd"
"""The flag that tells a child where to write its start messages; put behind its command."""

_LAUNCHER = str(Path(__file__).with_name("launcher.py"))
_NUM_LAST_LINES = 20
_ASK_EVERY_S = 0.25
_DRAIN_S = 1.0
"""How long after a child's end the rest of its group may last, and its last words are waited for."""


@dataclass(frozen=True)
class Foreign:
    """A program of somebody else's, which does not speak the start protocol.

    It serves when GET `url`/health says 200. `steps`: what a line of its log tells of its start, and how far that is.
    """

    url: str
    steps: tuple[tuple[re.Pattern[str], StartProgress], ...] = ()

    def progress_of(self, line: str) -> StartProgress | None:
        """How far a line of its log says it is."""
        return next((progress for pattern, progress in self.steps if pattern.search(line)), None)


@dataclass(frozen=True)
class ProcessSpec:
    """What to run. `environment` is added to the supervisor's own, less what is in `hidden`.

    `foreign` is given for a program that is not kvferry's. Its children need not end with it, so it gets a guard.
    `tls_cert`: the certificate it is given for its https. `registrar`: routers at which the supervisor registers it, as
    it does not do so itself.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    cores: Cores = ()
    foreign: Foreign | None = None
    tls_cert: Path | None = None
    registrar: RegistrarConfig | None = None

    def at_port(self, port: int | None) -> ProcessSpec:
        """The same, at a port that a process of it was given before, where it takes any free one."""
        if port is None:
            return self
        return replace(self, command=tuple(f"--port={port}" if one == "--port=0" else one for one in self.command))

    def full_environment(self) -> dict[str, str]:
        """The child's environment. Output is not buffered, so that the last line before a crash is seen."""
        inherited = {name: value for name, value in os.environ.items() if name not in self.hidden}
        return {**inherited, "PYTHONUNBUFFERED": "1", **self.environment}


class Process:
    """A running child. `watch` must run for as long as the child does."""

    def __init__(
        self,
        spec: ProcessSpec,
        process: asyncio.subprocess.Process,
        log: _Pipe,
        messages: _Pipe,
    ) -> None:
        self.spec, self.pid = spec, process.pid
        self.ready: asyncio.Future[InstanceReady] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self.last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._process, self._log, self._messages = process, log, messages

    @classmethod
    async def start(cls, spec: ProcessSpec) -> Process:
        """Start it. Raises `OSError` when the system has no room for another process."""
        log_read, log_write = os.pipe()
        ready_read, ready_write = os.pipe()
        log, messages = await _Pipe.open(log_read), await _Pipe.open(ready_read)
        try:
            process = await asyncio.create_subprocess_exec(
                *_launch(spec, ready_write),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_write,
                stderr=log_write,
                env=spec.full_environment(),
                start_new_session=True,
                pass_fds=(ready_write,),
            )
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
        """Exit code; minus the signal's number when a signal ended it; None while it runs."""
        return self._process.returncode

    async def watch(self, on_line: Callable[[str], None], on_progress: Callable[[StartProgress], None]) -> None:
        """Pass on what the child says until it has ended and all its group with it."""
        try:
            async with asyncio.TaskGroup() as group:
                foreign = self.spec.foreign
                readers = [
                    group.create_task(self._read_log(on_line, on_progress)),
                    group.create_task(self._read_messages(on_progress) if foreign is None else self._ask(foreign)),
                ]
                await self._process.wait()
                # Helpers of the child hold its pipes, and may still tidy up after it; but not for long.
                await asyncio.wait(readers, timeout=_DRAIN_S)
                self.kill()
                _, late = await asyncio.wait(readers, timeout=_DRAIN_S)
                for reader in late:
                    reader.cancel()
        finally:
            await self._put_away()

    async def _put_away(self) -> None:
        """Whatever happened, nothing of the child is left when `gone` is set."""
        self.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await self._process.wait()
        self._log.close()
        self._messages.close()
        self.gone.set()

    def terminate(self) -> None:
        """Ask the child to end. Its own children are its to end."""
        if self.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """End the child and its whole group, at once."""
        if not self.gone.is_set():  # Later, the number may be another's.
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _read_log(self, on_line: Callable[[str], None], on_progress: Callable[[StartProgress], None]) -> None:
        foreign = self.spec.foreign
        async for line in self._log.lines():
            text = line.decode(errors="replace").rstrip()
            self.last_lines.append(text)
            on_line(text)
            progress = None if foreign is None or self.ready.done() else foreign.progress_of(text)
            if progress is not None:
                on_progress(progress)

    async def _ask(self, foreign: Foreign) -> None:
        """Ask again and again whether it serves; nobody tells."""
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


def _launch(spec: ProcessSpec, ready_write: int) -> Iterator[str]:
    cores = ",".join(map(str, spec.cores)) or "-"
    # Isolated and without site: the launcher needs the standard library only, and must start fast.
    leash = "self" if spec.foreign is None else "group"
    yield from (sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), cores, leash, "--")
    yield from spec.command
    if spec.foreign is None:
        yield from (READY_FLAG, str(ready_write))


class _Pipe:
    """The reading end of a pipe."""

    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport) -> None:
        self._reader, self._transport = reader, transport

    @classmethod
    async def open(cls, descriptor: int) -> _Pipe:
        """Take over a descriptor."""
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
        )
        return cls(reader, transport)

    async def lines(self) -> AsyncIterator[bytes]:
        """Lines as they come, none much longer than `MAX_LINE_BYTES`: what is longer comes in pieces."""
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
        """Give the descriptor back."""
        self._transport.close()
