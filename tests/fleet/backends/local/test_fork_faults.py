"""A process that forks instances and is slow, stops, dies or is not needed any more: no wait for it is without end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from fleet.fleets import attended
from fleet.recording import RecordingDisplay
from kvferry.cli.serving.attended import AttendedFleet
from kvferry.engine.config import EngineConfig
from kvferry.fleet.backends.local import fork_server as module
from kvferry.fleet.backends.local import member
from kvferry.fleet.backends.local.child import ChildProcess
from kvferry.fleet.backends.local.fork_server import ForkServer, ForkTimes
from kvferry.fleet.processes.process import MEMBER, ProcessSpec
from kvferry.fleet.processes.process_settings import InstanceProcess
from kvferry.fleet.spec.fleet_spec import FailureSpec
from support.waiting import eventually

pytestmark = pytest.mark.processes

HANGS_S = 120.0
DECODE = InstanceProcess(role="decode", engine=EngineConfig(model="m"))
THREADS = {"OMP_NUM_THREADS": "1"}

FORKS = """
import os, signal, sys
from kvferry.fleet.backends.local.fork_main import _Forks
from kvferry.fleet.processes.ready import ReadyWriter
child = _Forks(int(sys.argv[1])).run()
if child is None:
    os._exit(0)
ReadyWriter(child.ready).ready({"url": "http://127.0.0.1:9"})
while True:
    signal.pause()
"""
"""The true loop of the forking process, in one that has little to import; children serve until they are ended."""

ANSWERS_WITH_REQUESTS = """
import signal, sys
from kvferry.core.messages.wire import Pipe
from kvferry.fleet.backends.local.fork_messages import ForkRequest, Imported
pipe = Pipe(int(sys.argv[1]), ForkRequest)
pipe.send(Imported())
pipe.send(pipe.receive_with_descriptors(2)[0])
signal.pause()
"""

IMPORTS_FOR_EVER = "import signal\nwhile True: signal.pause()"


def command(program: str) -> tuple[str, ...]:
    """The command of a forking process that runs this program."""
    return (sys.executable, "-c", program)


def fork_server(program: str = FORKS, **times: float) -> ForkServer:
    return ForkServer(program=command(program), cuda_device=Path("/nowhere"), times=ForkTimes(**times))


@asynccontextmanager
async def forking(program: str = FORKS, **times: float) -> AsyncIterator[tuple[ForkServer, Callable[[], set[int]]]]:
    """A server, and what it has forked and still runs; they are ended, and nothing else is left behind."""
    others, server = children(), fork_server(program, **times)

    def forked() -> set[int]:
        return children() - others - {server.pid}

    async with asyncio.timeout(HANGS_S):
        try:
            yield server, forked
        finally:
            wanted = forked()
            await server.close()
            for pid in wanted & children():
                os.kill(pid, signal.SIGKILL)
        await eventually(lambda: children() <= others)


async def fork(server: ForkServer, **more: str) -> ChildProcess | None:
    nothing = os.memfd_create("nothing")
    try:
        with TemporaryDirectory() as folder:
            process, environment = Path(folder) / "process", {**os.environ, **THREADS, **more}
            child = await server.fork(DECODE, environment, (), log=nothing, ready=nothing, process=process)
            await eventually(lambda: child is None or child.has_ended or process.exists())  # it is about to write there
            return child
    finally:
        os.close(nothing)


async def cancel_when_asked(server: ForkServer) -> None:
    """Ask for a child, and do not wait for the answer."""
    starting = asyncio.create_task(fork(server))
    await eventually(lambda: starting.done() or server.num_pending > 0, interval_s=0)
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled() and (child := starting.result()) is not None:
        child.kill()  # it was faster


def children() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True) if is_there(one)}


def is_there(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it ended in the meantime
        return False


class Fleet:
    """Two instances, which are forked by `server`."""

    def __init__(self, grace_s: float = 0.2, **times: float) -> None:
        self.display, self.server = RecordingDisplay(), fork_server(**times)
        self.attended: AttendedFleet = attended(
            self.display,
            {"decode": lambda name: ProcessSpec(name, (*MEMBER, "decode"), THREADS, forks=True, settings=DECODE)},
            FailureSpec(hang="0s", backoff=("10ms", "50ms")),
            grace_s=grace_s,
            end_margin_s=0.0,
            fork_server=self.server,
            decode=2,
        )
        self.running = asyncio.create_task(self._run())

    async def _run(self) -> int:
        try:
            return await self.attended.run()
        finally:
            await self.server.close()

    @property
    def forking(self) -> int:
        """The forking process."""
        assert self.server.pid is not None
        return self.server.pid

    def instances(self) -> set[int]:
        """The processes that are the fleet's and fork nothing."""
        return {one.pid for one in psutil.Process().children() if is_there(one) and one.pid != self.server.pid}

    async def up(self) -> None:
        await self.display.until(lambda seen: bool(seen.of("up")))


async def test_a_child_that_nobody_wants_any_more_is_ended_and_the_next_is_forked() -> None:
    async with forking() as (server, forked):
        wanted = await fork(server)
        assert wanted is not None
        for _ in range(5):
            await cancel_when_asked(server)
        second = await fork(server)
        assert second is not None
        await eventually(lambda: forked() == {wanted.pid, second.pid})


async def test_a_child_that_comes_in_the_moment_of_the_cancellation_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with forking() as (server, forked):
        assert await fork(server)
        starting = asyncio.create_task(fork(server))
        hear = module._Server._on_message

        def hear_and_cancel(*arguments: Any) -> None:
            hear(*arguments)
            starting.cancel()

        monkeypatch.setattr(module._Server, "_on_message", hear_and_cancel)
        await asyncio.wait([starting])
        assert starting.cancelled()
        await eventually(lambda: len(forked()) == 1)


async def test_the_end_while_the_second_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    others, num_forks = children(), 0
    one = Fleet()
    asked = one.server.fork

    async def stopping(*arguments: Any, **named: Any) -> ChildProcess | None:
        nonlocal num_forks
        num_forks += 1
        if num_forks == 2:
            asyncio.get_running_loop().call_soon(one.attended.stop)
        return await asked(*arguments, **named)

    one.server.fork = stopping  # type: ignore[method-assign]
    async with asyncio.timeout(HANGS_S):
        assert await one.running == 0
        await eventually(lambda: children() <= others)


@pytest.mark.parametrize("program", [FORKS, IMPORTS_FOR_EVER])
async def test_the_end_while_the_forking_process_is_started_anew(program: str) -> None:
    others, one = children(), Fleet(end_timeout_s=HANGS_S)
    async with asyncio.timeout(HANGS_S):
        await one.up()
        one.server.program = command(program)
        first, instances = one.forking, one.instances() - others
        os.kill(first, signal.SIGKILL)
        os.kill(min(instances), signal.SIGKILL)
        await eventually(lambda: one.server.pid not in (first, None))
        one.attended.stop()
        assert await one.running == 0
        await eventually(lambda: children() <= others)


async def test_one_that_stands_still_is_waited_for_no_longer_than_told(monkeypatch: pytest.MonkeyPatch) -> None:
    others, one = children(), Fleet()
    async with asyncio.timeout(HANGS_S):
        await one.up()
        one.server.times.fork_s = one.server.times.end_timeout_s = 0.2
        monkeypatch.setattr(member.LocalMember, "kill_timeout_s", 0.2)
        os.kill(one.forking, signal.SIGSTOP)
        assert await fork(one.server) is None
        one.attended.stop()
        assert await one.running == 0
        await eventually(lambda: children() <= others)


async def test_the_ends_of_children_are_seen_while_the_forking_process_hangs() -> None:
    async with forking() as (server, _):
        child = await fork(server)
        assert child is not None
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        child.terminate()
        assert await child.wait()
        assert child.returncode == -signal.SIGTERM
        os.kill(server.pid, signal.SIGCONT)
        assert await fork(server) is not None  # of the same process


async def test_ctrl_c_ends_everything_within_the_grace_while_the_forking_process_hangs() -> None:
    """And an instance that ends meanwhile is started without it."""
    others, one = children(), Fleet(grace_s=HANGS_S)
    async with asyncio.timeout(HANGS_S):
        await one.up()
        one.server.times.fork_s = one.server.times.end_timeout_s = 0.2
        instances = one.instances() - others
        os.kill(one.forking, signal.SIGSTOP)
        os.kill(min(instances), signal.SIGTERM)
        await eventually(lambda: len(one.instances() - others - instances) > 0)
        os.kill(os.getpid(), signal.SIGINT)
        assert await one.running == 0
        await eventually(lambda: children() <= others)


async def test_imports_that_take_too_long_are_not_waited_for() -> None:
    # One that imports does not hear that it shall end.
    async with forking(IMPORTS_FOR_EVER, import_s=0.1, end_timeout_s=HANGS_S) as (server, _):
        assert await fork(server) is None
        assert await fork(server) is None


async def test_children_go_on_when_the_forking_process_dies() -> None:
    async with forking() as (server, forked):
        child = await fork(server)
        assert child is not None
        first = server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: server.pid is None)
        second = await fork(server)
        assert second is not None
        assert server.pid != first
        await eventually(lambda: forked() == {child.pid, second.pid})
        child.terminate()
        assert await child.wait()
        assert child.returncode == -signal.SIGTERM


async def test_a_message_that_is_not_understood_ends_all_waits() -> None:
    async with forking(ANSWERS_WITH_REQUESTS, end_timeout_s=0.1) as (server, _):
        with pytest.raises(OSError, match="has ended"):
            await fork(server)
        server.program = command(FORKS)
        assert await fork(server) is not None  # of another forking process


async def test_a_request_that_is_longer_than_what_the_system_buffers() -> None:
    async with forking() as (server, _):
        assert await fork(server) is not None
        assert await fork(server, KVFERRY_LONG="x" * 2**21) is not None
        assert await fork(server) is not None


async def test_a_request_that_is_half_sent_is_followed_by_none(caplog: pytest.LogCaptureFixture) -> None:
    async with forking() as (server, _):
        assert await fork(server) is not None
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        server.times.fork_s = 0.2
        assert await fork(server, KVFERRY_LONG="x" * 2**21) is None
        assert "has hung" in caplog.text
        server.times.fork_s = HANGS_S
        assert await fork(server) is not None  # of another forking process


async def test_after_the_end_nothing_is_forked() -> None:
    async with forking() as (server, _):
        await server.close()
        with pytest.raises(OSError, match="the fleet ends"):
            await fork(server)
