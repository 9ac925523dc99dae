"""Instances that are forked begin, serve and end as those that are started from nothing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvferry.fleet import fork_server
from kvferry.fleet.asking import serves
from kvferry.fleet.fork_server import ForkServer
from kvferry.fleet.process import PROGRAM, Process, ProcessSpec

pytestmark = pytest.mark.processes

CORE = min(os.sched_getaffinity(0))
HANGS_S = 240.0
REFUSED_AT_ONCE = "--block-size=0"
"""Before torch is imported."""
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def decode(model: object, *flags: str, **more: str) -> ProcessSpec:
    arguments = ("decode", str(model), "--port=0", "--kv-cache-memory=32MiB", "--log-level=debug", *flags)
    environment = {**THREADS, "KVFERRY_INSTANCE_NAME": "decode-7", "HF_HUB_OFFLINE": "1", **more}
    return ProcessSpec("decode-7", (*PROGRAM, *arguments), environment, cores=(CORE,), forks=True)


@asynccontextmanager
async def fork_servers() -> AsyncIterator[ForkServer]:
    server = ForkServer()
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def watched(process: Process) -> AsyncIterator[list[str]]:
    """What it logs; it is waited for at the end."""
    lines: list[str] = []
    watching = asyncio.create_task(process.watch(lines.append, lambda progress: None))
    try:
        yield lines
    except BaseException:
        process.kill()
        raise
    finally:
        async with asyncio.timeout(HANGS_S):
            await watching


def surroundings(pid: int) -> dict[str, Any]:
    """What a process has of its own and what it has inherited, as the kernel tells it; numbers left out."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines())
    wanted = ("SigBlk", "SigIgn", "SigCgt", "Cpus_allowed_list", "Seccomp")
    open_files = [str(one.readlink()) for one in (folder / "fd").iterdir()]
    return {
        **{name: status[name] for name in wanted},
        "session": os.getsid(pid) == os.getpgid(pid) == pid,
        "files": Counter(re.sub(r"[0-9a-f]{5,}|\d+", "N", one) for one in open_files),
        "threads": len(list((folder / "task").iterdir())),
        "input": str((folder / "fd/0").readlink()),
    }


def descriptors() -> set[str]:
    return {one.name for one in Path("/proc/self/fd").iterdir()}


def children() -> set[int]:
    """All that descend from this process; other tests may have left some to the end of the run."""
    return {one.pid for one in psutil.Process().children(recursive=True)}


def is_forked(process: Process) -> bool:
    return isinstance(process._process, fork_server.ForkedChild)


async def test_ends_are_told_and_nothing_is_left(tmp_path: Path, model_maker: Any) -> None:
    """Also of one that was told something wrong. The end of the server itself ends none, and there is another."""
    before, others = descriptors(), children()
    async with fork_servers() as server:
        wrong = await Process.start(decode(tmp_path / "nowhere"), server)
        async with watched(wrong) as lines:
            pass
        assert wrong.returncode == 2
        assert "kvferry: error: " in lines[-1]
        assert "nowhere" in lines[-1]

        killed, kept = [await Process.start(decode(model_maker()), server) for _ in range(2)]
        async with watched(killed), watched(kept):
            await killed.ready
            os.kill(killed.pid, signal.SIGKILL)
            await killed.gone.wait()
            assert killed.returncode == -signal.SIGKILL
            await kept.ready
            assert kept.returncode is None
            assert psutil.Process(kept.pid).ppid() == os.getpid()
            assert server._server is not None
            server._server._process.kill()
            await server._server._process.wait()
            assert await serves(kept.ready.result().url)
            kept.terminate()
        assert kept.returncode == 0

        await it_is_as_one_started_from_nothing(server, decode(model_maker()))
    assert children() == others
    assert descriptors() - before == set()


async def it_is_as_one_started_from_nothing(server: ForkServer, spec: ProcessSpec) -> None:
    found, logged = [], []
    for one in (server, None):
        process = await Process.start(spec, one)
        async with watched(process) as lines:
            await process.ready
            assert is_forked(process) is (one is not None)
            assert "decode" in psutil.Process(process.pid).cmdline()
            found.append(surroundings(process.pid))
            process.terminate()
        assert process.returncode == 0, lines
        always = [line for line in lines if "compiling for this machine" not in line]  # the first one only
        logged.append([re.sub(r"[\d.:]+", "N", line) for line in always])
    assert found[0] == found[1]
    assert logged[0] == logged[1]


async def test_nobody_waits_for_one_that_is_no_longer_wanted(tmp_path: Path) -> None:
    """The fleet may end while the first is being started."""
    others = children()
    async with fork_servers() as server:
        starting = asyncio.create_task(Process.start(decode(tmp_path / "nowhere"), server))
        while children() == others:
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
    assert children() == others


@pytest.mark.parametrize(
    "why", ["there is CUDA", pytest.param("it has threads", marks=pytest.mark.full(in_every_part=True))]
)
async def test_where_forks_are_not_sound_each_is_started_from_nothing(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, others = {}, children()
    if why == "there is CUDA":
        monkeypatch.setattr(fork_server, "_CUDA", tmp_path)
    else:
        program = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        (tmp_path / "sitecustomize.py").write_text(program)
        more = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    async with fork_servers() as server:
        process = await Process.start(decode(tmp_path / "nowhere", REFUSED_AT_ONCE, **more), server)
        started = children() - others
        async with watched(process):
            assert started == {process.pid}
        assert process.returncode == 2
