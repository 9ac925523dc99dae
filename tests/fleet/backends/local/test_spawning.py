"""The process that instances are forked from is started before the command line's imports, and never left behind."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from kvferry.fleet.backends.local import spawning
from kvferry.fleet.backends.local.fork_server import ForkServer
from support.waiting import eventually, until

pytestmark = pytest.mark.processes

SERVE = ("serve", "m", "--port=0")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    spawning.discard_early_fork_process()


def start_early(arguments: Sequence[str]) -> None:
    """On a machine without a GPU."""
    spawning.start_fork_process_early(arguments, cuda_device="/nowhere")


def num_children() -> int:
    return len(psutil.Process().children())


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("router",),
        ("serve", "--help"),
        ("serve", "m", "--engine=vllm"),
        ("demo", "--backend", "ray"),
        ("x", "serve"),
    ],
)
def test_commands_that_fork_nothing_start_none(arguments: tuple[str, ...]) -> None:
    before = num_children()
    start_early(arguments)
    assert num_children() == before
    assert spawning.take_early_fork_process() is None


def test_none_is_started_beside_gpus(tmp_path: Path) -> None:
    spawning.start_fork_process_early(SERVE, cuda_device=str(tmp_path))
    assert spawning.take_early_fork_process() is None


def test_its_environment_has_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_API_KEY", "secret")
    start_early(SERVE)
    started = spawning.take_early_fork_process()
    assert started is not None
    pid, ours = started
    with ours:
        path = Path(f"/proc/{pid}/environ")
        until(path.read_bytes)  # empty until the program has begun
        environment = path.read_bytes()
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert b"KVFERRY_" not in environment
    assert b"OMP_NUM_THREADS=1" in environment


async def test_the_server_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start_early(SERVE)
    early = {child.pid for child in psutil.Process().children()}
    server = ForkServer(cuda_device=Path("/nowhere"))
    nothing = os.memfd_create("nothing")
    forking = asyncio.create_task(
        server.fork(None, {**os.environ}, (), log=nothing, ready=nothing, process=Path("/nowhere"))  # type: ignore[arg-type]
    )
    async with asyncio.timeout(60):
        await eventually(lambda: server.pid is not None, interval_s=0)
        assert server.pid in early
        await server.close()
        with suppress(Exception):
            await forking
    os.close(nothing)
    assert spawning.take_early_fork_process() is None


async def test_one_that_is_not_needed_is_ended() -> None:
    before = num_children()
    start_early(SERVE)
    assert num_children() == before + 1
    await ForkServer().close()
    assert num_children() == before


def test_it_ends_with_the_command_that_started_it() -> None:
    program = (
        "import os, psutil\n"
        "from kvferry.fleet.backends.local import spawning\n"
        f"spawning.start_fork_process_early({SERVE!r}, cuda_device='/nowhere')\n"
        "started = spawning.take_early_fork_process()\n"
        "print(started[0], flush=True)\n"
        "os._exit(1)\n"
    )
    read, write = os.pipe()
    pid = spawning.spawn_process((sys.executable, "-c", program), os.environ, output=write)
    os.close(write)
    with os.fdopen(read) as output:
        forking = int(output.readline())
    os.waitpid(pid, 0)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(forking).wait(timeout=30)
    assert not psutil.pid_exists(forking) or psutil.Process(forking).status() == psutil.STATUS_ZOMBIE
