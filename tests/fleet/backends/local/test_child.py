"""One child process: started, found again, ended; and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.fleet.backends.local import launcher
from kvferry.fleet.backends.local.child import ChildProcess, spawn
from kvferry.fleet.backends.local.launcher import launch_command
from kvferry.fleet.processes.start_time import started_at
from support.waiting import eventually

HANGS_S = 60.0
FOR_EVER = "import signal\nprint('here', flush=True)\nwhile True: signal.pause()"
PYTHON = (sys.executable, "-I", "-S", "-c")


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def start(program: str, *, output: int | None = None, inherits: tuple[int, ...] = ()) -> ChildProcess:
    return spawn((*PYTHON, program), dict(os.environ), output=output, inherits=inherits)


@contextmanager
def somebody_elses() -> Iterator[subprocess.Popen[bytes]]:
    """A process that a `ChildProcess` finds, and does not reap."""
    with subprocess.Popen((*PYTHON, FOR_EVER), stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"here\n"
            yield process
        finally:
            process.kill()


async def test_the_exit_code_is_known_and_nothing_is_left_open() -> None:
    before = descriptors()
    child = start("raise SystemExit(3)")
    assert await child.wait(HANGS_S)
    assert (child.returncode, child.has_ended) == (3, True)
    child.terminate()
    child.signal(signal.SIGUSR1)
    child.detach()
    assert await child.wait(0)
    assert descriptors() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_signal_ends_it(number: signal.Signals) -> None:
    child = start(FOR_EVER)
    assert not await child.wait(0.01)
    assert child.returncode is None
    child.signal(number)
    assert await child.wait(HANGS_S)
    assert child.returncode == -number


async def test_it_has_a_session_and_streams_of_its_own() -> None:
    read, write = os.pipe()
    with os.fdopen(read) as output:
        child = start("import os, sys; print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()))", output=write)
        os.close(write)
        assert await child.wait(HANGS_S)
        assert output.read() == "True ''\n"


async def test_it_inherits_what_is_named_and_nothing_else_does() -> None:
    named, kept = os.memfd_create("named"), os.memfd_create("kept")
    try:
        program = f"import os; os.fstat({named})\ntry: os.fstat({kept})\nexcept OSError: raise SystemExit(5)"
        child = start(program, inherits=(named,))
        assert await child.wait(HANGS_S)
        assert child.returncode == 5
        assert not os.get_inheritable(named)
    finally:
        os.close(named)
        os.close(kept)


async def test_its_whole_group_is_killed() -> None:
    read, write = os.pipe()
    with os.fdopen(read) as output:
        child = start(
            "import os, signal\npid = os.fork()\nif pid: print(pid, flush=True)\nwhile True: signal.pause()",
            output=write,
        )
        os.close(write)
        grandchild = os.pidfd_open(int(output.readline()))
        try:
            child.kill()
            assert await child.wait(HANGS_S)
            gone = asyncio.Event()
            asyncio.get_running_loop().add_reader(grandchild, gone.set)
            async with asyncio.timeout(HANGS_S):
                await gone.wait()
        finally:
            asyncio.get_running_loop().remove_reader(grandchild)
            os.close(grandchild)


async def test_one_that_was_found_is_waited_for_and_signalled_though_nobody_can_know_how_it_ended() -> None:
    with somebody_elses() as process:
        before = descriptors()
        found = ChildProcess(process.pid, is_child=False)
        assert not await found.wait(0.01)
        found.terminate()
        assert await found.wait(HANGS_S)
        assert found.returncode is None
        assert descriptors() == before
        assert process.wait() == -signal.SIGTERM


async def test_one_that_is_let_go_goes_on() -> None:
    with somebody_elses() as process:
        before = descriptors()
        found = ChildProcess(process.pid, is_child=False)
        found.detach()
        found.signal(signal.SIGKILL)
        assert descriptors() == before
        assert process.poll() is None


async def test_there_is_no_such_process() -> None:
    child = start("")
    assert await child.wait(HANGS_S)
    with pytest.raises(OSError, match="No such process"):
        ChildProcess(child.pid, is_child=False)
    with pytest.raises(OSError):
        started_at(child.pid)


async def test_a_program_that_is_not_there() -> None:
    before = descriptors()
    with pytest.raises(FileNotFoundError):
        spawn(("/nowhere/program",), {})
    assert descriptors() == before


async def test_processes_of_one_number_differ_in_when_they_began() -> None:
    mine = started_at(os.getpid())
    assert mine == started_at(os.getpid()) > 0
    child = start(FOR_EVER)
    assert started_at(child.pid) >= mine
    child.kill()
    assert await child.wait(HANGS_S)


# What runs before the member's program.


async def test_the_launcher_writes_which_process_it_is(tmp_path: Path) -> None:
    file = tmp_path / "process"
    child = spawn(launch_command((*PYTHON, FOR_EVER), (), "none", str(file)), dict(os.environ))
    async with asyncio.timeout(HANGS_S):
        await eventually(file.exists)
    assert file.read_text() == f"{child.pid} {started_at(child.pid)}\n"
    child.kill()
    assert await child.wait(HANGS_S)
    assert os.listdir(tmp_path) == ["process"]  # noqa: PTH208


def test_a_program_that_cannot_be_run_is_told() -> None:
    command = launch_command(("/nowhere/program",), (), "none")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr == "kvferry: error: cannot run /nowhere/program: No such file or directory\n"


@pytest.mark.parametrize("leash", ["self", "group"])
def test_a_launcher_whose_controller_is_gone_does_not_begin(leash: str) -> None:
    somebody_else = str(os.getppid())
    program = [sys.executable, "-c", "print('begun')"]
    command = [sys.executable, launcher.__file__, somebody_else, "-", leash, "-", "--", *program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30, start_new_session=True)
    assert done.returncode == 1
    assert (done.stdout, done.stderr) == ("", "kvferry: error: the controller ended before its child began\n")


def test_without_a_leash_the_controller_may_be_gone() -> None:
    somebody_else = str(os.getppid())
    program = [sys.executable, "-c", "print('begun')"]
    command = [sys.executable, launcher.__file__, somebody_else, "-", "none", "-", "--", *program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "begun\n")
