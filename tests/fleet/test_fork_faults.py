"""A process that forks instances and is slow, stops, dies or is not needed any more: no wait for it is without end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleet.recording import RecordingDisplay
from kvferry.fleet import fork_server, supervisor
from kvferry.fleet.fork_server import ForkedChild, ForkServer
from kvferry.fleet.launcher import launching
from kvferry.fleet.process import PROGRAM, ProcessSpec
from kvferry.fleet.supervisor import FleetPlan, LocalSupervisor

pytestmark = pytest.mark.processes

HANGS_S = 120.0
THREADS = {"OMP_NUM_THREADS": "1"}

FORKS = """
import os, signal, socket, sys
from kvferry.cli.fork_main import _Forks
child = _Forks(socket.socket(fileno=int(sys.argv[1]))).run()
if child is None:
    os._exit(0)
os.write(child.ready, b'{"url":"http://127.0.0.1:9"}\\n')
while True:
    signal.pause()
"""
"""The true loop of the forking process, in one that has little to import; children serve until they are ended."""

IMPORTS_FOR_EVER = "import signal\nwhile True: signal.pause()"

Runs = Callable[[str], None]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Have the forking process run this program from now on."""

    def use(program: str) -> None:
        monkeypatch.setattr(
            fork_server,
            "launching",
            lambda command, cores, leash: launching((sys.executable, "-c", program, command[-1]), cores, leash),
        )

    monkeypatch.setattr(fork_server, "_CUDA", Path("/nowhere"))
    use(FORKS)
    return use


@asynccontextmanager
async def forking() -> AsyncIterator[tuple[ForkServer, Callable[[], set[int]]]]:
    """A server, and what it has forked and still runs; they are ended, and nothing else is left behind."""
    others, server = children(), ForkServer()

    def forked() -> set[int]:
        return children() - others - ({server._server._process.pid} if server._server else set())

    async with asyncio.timeout(HANGS_S):
        try:
            yield server, forked
        finally:
            wanted = forked()
            await server.close()
            for pid in wanted & children():
                os.kill(pid, signal.SIGKILL)
        await until(lambda: children() <= others)


async def fork(server: ForkServer) -> ForkedChild | None:
    nothing = os.memfd_create("nothing")
    try:
        return await server.fork(("decode",), {**os.environ, **THREADS}, (), nothing, nothing)
    finally:
        os.close(nothing)


async def cancel_when_asked(server: ForkServer) -> None:
    """Ask for a child, and do not wait for the answer."""
    starting = asyncio.create_task(fork(server))
    await until(lambda: starting.done() or bool(server._server and server._server._answers), every_s=0)
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


async def until(there: Callable[[], bool], every_s: float = 0.02) -> None:
    while not there():
        await asyncio.sleep(every_s)


def fleet(grace_s: float = 0.2) -> tuple[LocalSupervisor, RecordingDisplay, asyncio.Task[int]]:
    """Two instances, which are forked."""
    display = RecordingDisplay()
    one = LocalSupervisor(display, grace_s=grace_s)
    specs = tuple(ProcessSpec(f"decode-{number}", (*PROGRAM, "decode"), THREADS, forks=True) for number in range(2))
    return one, display, asyncio.create_task(one.run(FleetPlan(specs)))


async def test_a_child_that_nobody_wants_any_more_is_ended_and_the_next_is_forked(runs: Runs) -> None:
    async with forking() as (server, forked):
        wanted = await fork(server)
        assert wanted is not None
        for _ in range(5):
            await cancel_when_asked(server)
        second = await fork(server)
        assert second is not None
        await until(lambda: forked() == {wanted.pid, second.pid})


async def test_a_child_that_comes_in_the_moment_of_the_cancellation_is_ended(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with forking() as (server, forked):
        assert await fork(server)
        starting = asyncio.create_task(fork(server))
        hear = fork_server._Server._hear

        def hear_and_cancel(*arguments: Any) -> None:
            hear(*arguments)
            starting.cancel()

        monkeypatch.setattr(fork_server._Server, "_hear", hear_and_cancel)
        await asyncio.wait([starting])
        assert starting.cancelled()
        await until(lambda: len(forked()) == 1)


async def test_the_end_while_the_second_is_forked(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    others, num_forks = children(), 0
    one, _, running = fleet()
    asked = fork_server._Server.fork

    async def stopping(*arguments: Any) -> ForkedChild:
        nonlocal num_forks
        num_forks += 1
        if num_forks == 2:
            asyncio.get_running_loop().call_soon(one.stop)
        return await asked(*arguments)

    monkeypatch.setattr(fork_server._Server, "fork", stopping)
    async with asyncio.timeout(HANGS_S):
        assert await running == 0
        await until(lambda: children() <= others)


@pytest.mark.parametrize("program", [FORKS, IMPORTS_FOR_EVER])
async def test_the_end_while_the_forking_process_is_started_anew(
    program: str, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_END_S", HANGS_S)
    others = children()
    one, display, running = fleet()
    async with asyncio.timeout(HANGS_S):
        await display.until(lambda seen: bool(seen.of("up")))
        runs(program)
        first = one._fork_server and one._fork_server._server
        assert first
        first._process.kill()
        instance = one._instances[0].process
        assert instance
        instance.kill()
        await until(lambda: one._fork_server is not None and one._fork_server._server not in (first, None))
        one.stop()
        assert await running == 0
        await until(lambda: children() <= others)


async def test_one_that_stands_still_is_waited_for_no_longer_than_told(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = children()
    one, display, running = fleet()
    async with asyncio.timeout(HANGS_S):
        await display.until(lambda seen: bool(seen.of("up")))
        for name, module in (("_FORK_S", fork_server), ("_END_S", fork_server), ("_KILLED_S", supervisor)):
            monkeypatch.setattr(module, name, 0.2)
        assert one._fork_server is not None
        assert one._fork_server._server is not None
        os.kill(one._fork_server._server._process.pid, signal.SIGSTOP)
        assert await fork(one._fork_server) is None
        one.stop()
        assert await running == 0
        await until(lambda: children() <= others)


async def test_the_ends_of_children_are_seen_while_the_forking_process_hangs(
    runs: Runs,
) -> None:
    async with forking() as (server, _):
        child = await fork(server)
        assert child is not None
        assert server._server is not None
        os.kill(server._server._process.pid, signal.SIGSTOP)
        child.terminate()
        assert await child.wait() == -signal.SIGTERM
        os.kill(server._server._process.pid, signal.SIGCONT)
        assert await fork(server) is not None  # of the same process


async def test_ctrl_c_ends_everything_within_the_grace_while_the_forking_process_hangs(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an instance that ends meanwhile is started without it."""
    others = children()
    one, display, running = fleet(grace_s=HANGS_S)
    async with asyncio.timeout(HANGS_S):
        await display.until(lambda seen: bool(seen.of("up")))
        monkeypatch.setattr(fork_server, "_FORK_S", 0.2)
        monkeypatch.setattr(fork_server, "_END_S", 0.2)
        assert one._fork_server is not None
        assert one._fork_server._server is not None
        first = one._instances[0].process
        assert first
        os.kill(one._fork_server._server._process.pid, signal.SIGSTOP)
        os.kill(first.pid, signal.SIGTERM)
        await until(lambda: one._instances[0].process not in (first, None))
        os.kill(os.getpid(), signal.SIGINT)
        assert await running == 0
        await until(lambda: children() <= others)


async def test_imports_that_take_too_long_are_not_waited_for(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_IMPORT_S", 0.1)
    monkeypatch.setattr(fork_server, "_END_S", HANGS_S)  # one that imports does not hear that it shall end
    runs(IMPORTS_FOR_EVER)
    async with forking() as (server, _):
        assert await fork(server) is None
        assert await fork(server) is None


async def test_children_go_on_when_the_forking_process_dies(runs: Runs) -> None:
    async with forking() as (server, forked):
        child = await fork(server)
        assert child is not None
        first = server._server
        assert first is not None
        first._process.kill()
        await until(lambda: first.is_gone)
        second = await fork(server)
        assert second is not None
        assert server._server is not first
        await until(lambda: forked() == {child.pid, second.pid})
        child.terminate()
        assert await child.wait() == -signal.SIGTERM


async def test_a_message_that_is_not_understood_ends_all_waits(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    async with forking() as (server, _):
        assert await fork(server) is not None
        with monkeypatch.context() as patched:
            patched.setattr(fork_server, "Message", fork_server.ForkRequest)
            with pytest.raises(OSError, match="has ended"):
                await fork(server)
        assert await fork(server) is not None  # of another forking process


async def test_after_the_end_nothing_is_forked(runs: Runs) -> None:
    async with forking() as (server, _):
        await server.close()
        with pytest.raises(OSError, match="the fleet ends"):
            await fork(server)
