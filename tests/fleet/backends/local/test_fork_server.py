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

from fleet.fleets import Programs, fleet_of
from fleet.recording import RecordingDisplay
from kvferry.engine.config import EngineConfig
from kvferry.fleet.backends.local.backend import LocalBackend
from kvferry.fleet.backends.local.folder import MemberFolder
from kvferry.fleet.backends.local.fork_server import ForkServer
from kvferry.fleet.control.backend import BackendContext, Member, MemberSpec, MemberState
from kvferry.fleet.processes.health_check import serves
from kvferry.fleet.processes.process import MEMBER, ProcessSpec
from kvferry.fleet.processes.process_settings import InstanceProcess
from kvferry.fleet.spec.kv_transfer import DEFAULT, transfer_for
from kvferry.fleet.spec.settings import InstanceSettings, ListenSettings
from kvferry.observe.logs import LogConfig
from support.waiting import eventually

pytestmark = pytest.mark.processes

CORE = min(os.sched_getaffinity(0))
HANGS_S = 240.0
REFUSED_AT_ONCE = "{"
"""Transfer settings that are refused before torch is imported."""
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def decode(model: object, transfer: str = "", forks: bool = True, **more: str) -> ProcessSpec:
    settings = InstanceProcess(
        role="decode",
        engine=EngineConfig(model=str(model), kv_cache_memory="32MiB"),
        instance=InstanceSettings(kv_transfer_config=transfer or transfer_for(DEFAULT, "decode")),
        listen=ListenSettings(port=0),
        log=LogConfig(log_level="debug"),
    )
    environment = {**THREADS, "KVFERRY_INSTANCE_NAME": "decode-7", "HF_HUB_OFFLINE": "1", **more}
    return ProcessSpec("decode-7", (*MEMBER, *settings.title), environment, forks=forks, settings=settings)


class Forked:
    """Members of one backend, of which each runs what it is told."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.folder, self.display, self.server = folder, RecordingDisplay(), server
        self._specs: dict[str, ProcessSpec] = {}
        makes: Any = {"decode": lambda name: self._specs[name]}
        context = BackendContext(folder, lambda fleet: Programs(fleet, makes, (CORE,)), self.display, outlives=False)
        self.backend = LocalBackend(context, fork_server=self.server)
        self.backend.use(fleet_of(makes, decode=2))

    async def start(self, name: str, spec: ProcessSpec) -> None:
        self._specs[name] = spec
        await self.backend.start(MemberSpec(name, "decode", "r"))

    def member(self, name: str) -> Member:
        return next(one for one in self.backend.members() if one.name == name)

    async def until(self, name: str, state: MemberState) -> Member:
        while self.member(name).state is not state:
            assert self.member(name).state is not MemberState.ENDED, self.member(name)
            self.backend.changed.clear()
            await self.backend.changed.wait()
        return self.member(name)

    def pid(self, name: str) -> int:
        pid = MemberFolder(self.folder / "members" / name).pid()
        assert pid is not None
        return pid

    def lines(self, name: str) -> list[str]:
        return [text for who, text in self.display.of("line") if who == name]

    def is_forked(self, name: str) -> bool:
        """One that was started from nothing has the interpreter in its command line."""
        return "-m" not in psutil.Process(self.pid(name)).cmdline()


@asynccontextmanager
async def forking(folder: Path, server: ForkServer | None = None) -> AsyncIterator[Forked]:
    made = Forked(folder, server or ForkServer())
    async with asyncio.timeout(HANGS_S):
        await made.backend.open()
        try:
            yield made
        finally:
            await made.backend.close()
            await made.server.close()


def surroundings(pid: int) -> dict[str, Any]:
    """What a process has of its own and what it has inherited, as the kernel tells it; numbers left out."""
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines())
    wanted = ("SigBlk", "SigIgn", "SigCgt", "Cpus_allowed_list", "Seccomp")
    open_files = [str(one.readlink()) for one in (folder / "fd").iterdir()]
    return {
        **{name: status[name] for name in wanted},
        "session": os.getsid(pid) == os.getpgid(pid) == pid,
        "files": Counter(re.sub(r"[0-9a-f]{5,}|\d+|(?<=members/)\w+", "N", one) for one in open_files),
        "threads": len(list((folder / "task").iterdir())),
        "input": str((folder / "fd/0").readlink()),
    }


def descriptors() -> set[str]:
    return {one.name for one in Path("/proc/self/fd").iterdir()}


def children() -> set[int]:
    """All that descend from this process; other tests may have left some to the end of the run."""
    return {one.pid for one in psutil.Process().children(recursive=True)}


async def test_ends_are_told_and_nothing_is_left(tmp_path: Path, model_maker: Any) -> None:
    """Also of one that was told something wrong. The end of the server itself ends none, and there is another."""
    before, others = descriptors(), children()
    async with forking(tmp_path / "fleet") as made:
        await made.start("wrong", decode(tmp_path / "nowhere"))
        wrong = await made.until("wrong", MemberState.ENDED)
        assert wrong.is_misconfigured
        assert "nowhere" in wrong.reason

        for name in ("killed", "kept"):
            await made.start(name, decode(model_maker()))
        for name in ("killed", "kept"):
            await made.until(name, MemberState.SERVING)
        os.kill(made.pid("killed"), signal.SIGKILL)
        assert (await made.until("killed", MemberState.ENDED)).reason == "was killed by SIGKILL"
        kept = made.member("kept")
        assert kept.state is MemberState.SERVING
        assert psutil.Process(made.pid("kept")).ppid() == os.getpid()
        assert made.server.pid is not None
        os.kill(made.server.pid, signal.SIGKILL)
        await eventually(lambda: made.server.pid is None)
        assert await serves(kept.url)
        await made.backend.stop("kept", 30.0)
        assert made.lines("kept")

        await it_is_as_one_started_from_nothing(made, model_maker())
    assert children() == others
    assert descriptors() - before == set()


async def it_is_as_one_started_from_nothing(made: Forked, model: Path) -> None:
    found, logged = [], []
    for name, forks in (("forked", True), ("begun", False)):
        await made.start(name, decode(model, forks=forks))
        await made.until(name, MemberState.SERVING)
        assert made.is_forked(name) is forks
        assert "decode" in " ".join(psutil.Process(made.pid(name)).cmdline()).split()
        found.append(surroundings(made.pid(name)))
        await made.backend.stop(name, 30.0)
        always = [line for line in made.lines(name) if "compiling for this machine" not in line]  # the first one only
        logged.append([re.sub(r"[\d.:]+", "N", line) for line in always])
    assert found[0] == found[1]
    assert logged[0] == logged[1]


async def test_nobody_waits_for_one_that_is_no_longer_wanted(tmp_path: Path) -> None:
    """The fleet may end while the first is being started."""
    others = children()
    async with forking(tmp_path / "fleet") as made:
        starting = asyncio.create_task(made.start("one", decode(tmp_path / "nowhere")))
        await eventually(lambda: children() != others, interval_s=0)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
        assert made.backend.members() == []
    assert children() == others


@pytest.mark.parametrize("reason", ["there is CUDA", pytest.param("it has threads", marks=pytest.mark.full)])
async def test_where_forks_are_not_sound_each_is_started_from_nothing(reason: str, tmp_path: Path) -> None:
    more, others = {}, children()
    server = ForkServer(cuda_device=tmp_path) if reason == "there is CUDA" else ForkServer()
    if reason != "there is CUDA":
        program = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        (tmp_path / "sitecustomize.py").write_text(program)
        more = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    async with forking(tmp_path / "fleet", server) as made:
        await made.start("one", decode(tmp_path / "nowhere", REFUSED_AT_ONCE, **more))
        started = children() - others
        assert len(started) == 1
        assert (await made.until("one", MemberState.ENDED)).is_misconfigured
        assert made.server.pid is None
