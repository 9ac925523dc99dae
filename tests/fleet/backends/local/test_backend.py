"""Members outlive the backend that started them; the next one finds exactly them, and nobody else."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.backends.local.test_child import somebody_elses
from fleet.children import CRASHING, CRASHING_WHEN_TOLD, GOOD, STUBBORN, child
from fleet.fleets import Make, Programs, fleet_of
from fleet.recording import RecordingDisplay
from kvferry.core.errors import ConfigError
from kvferry.engine.config import EngineConfig
from kvferry.fleet.backends.local.backend import LocalBackend
from kvferry.fleet.backends.local.folder import MemberFolder
from kvferry.fleet.backends.local.fork_server import ForkServer
from kvferry.fleet.control.backend import BackendContext, Member, MemberSpec, MemberState, NotStarted
from kvferry.fleet.processes.process import ProcessSpec
from kvferry.fleet.processes.process_settings import InstanceProcess
from kvferry.fleet.processes.start_time import started_at
from kvferry.fleet.spec.fleet_spec import MemberRole
from kvferry.http.server.listen import BACKLOG, reserve
from support.waiting import eventually

pytestmark = pytest.mark.usefixtures("leaves_nobody")

TESTS = Path(__file__).parents[3]
HANGS_S = 60.0
_PR_SET_CHILD_SUBREAPER = 36


def talks(name: str) -> ProcessSpec:
    return child(name, CRASHING_WHEN_TOLD)


MAKES: dict[MemberRole, Make] = {
    "prefill": lambda name: child(name, CRASHING),
    "decode": talks,
    "both": lambda name: child(name, STUBBORN),
    "router": lambda name: child(name, GOOD, "R", "http://r:1"),
}


@asynccontextmanager
async def backend(
    folder: Path, *, outlives: bool = True, makes: Any = MAKES, addresses: Any = (), written_s: float = 10.0
) -> AsyncIterator[tuple[LocalBackend, RecordingDisplay]]:
    """One that has been opened; it is closed at the end."""
    display = RecordingDisplay()
    context = BackendContext(folder, lambda fleet: Programs(fleet, makes, (0,), addresses), display, outlives=outlives)
    one = LocalBackend(context)
    one.written_s = written_s
    one.use(fleet_of(makes))
    async with asyncio.timeout(HANGS_S):
        try:
            await one.open()
            yield one, display
        finally:
            await one.close()


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    """Whatever is left in it at the end is ended, by a last backend, which also finds what has just been started."""
    yield tmp_path
    async with backend(tmp_path) as (last, _):
        for member in last.members():
            await last.stop(member.name, 0.0)


def named(one: LocalBackend, name: str) -> Member:
    return next(member for member in one.members() if member.name == name)


async def start(one: LocalBackend, name: str, *, revision: str = "r", unit: str = "") -> None:
    await one.start(MemberSpec(name, name.split("-")[0], revision, unit))  # type: ignore[arg-type]


async def until(one: LocalBackend, name: str, state: MemberState) -> Member:
    while named(one, name).state is not state:
        one.changed.clear()
        await one.changed.wait()
    return named(one, name)


def pid_of(folder: Path, name: str) -> int:
    pid = MemberFolder(folder / "members" / name).pid()
    assert pid is not None
    return pid


def reaped(pid: int) -> None:
    """A process whose parent has ended may have become this one's, which reaps all that descend from it."""
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


@contextmanager
def goes_on(pid: int) -> Iterator[None]:
    """The process must be there all the time."""
    descriptor = os.pidfd_open(pid)
    try:
        yield
        assert not select.select([descriptor], [], [], 0.3)[0], "it has ended"
    finally:
        os.close(descriptor)


async def test_a_member_from_its_start_to_its_end(folder: Path) -> None:
    async with backend(folder) as (one, display):
        await start(one, "decode-0", revision="r1", unit="u")
        member = await until(one, "decode-0", MemberState.SERVING)
        assert (member.role, member.revision, member.unit, member.url) == ("decode", "r1", "u", "http://here:1")
        await display.until(lambda seen: bool(seen.of("line")))
        pid = pid_of(folder, "decode-0")
        await one.assign("decode-0", "prefill")
        assert named(one, "decode-0").role == "prefill"
        await one.stop("decode-0", 30.0)
        assert one.members() == []
        assert list((folder / "members").iterdir()) == []
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        await one.stop("decode-0", 1.0)  # nobody of this name is here


async def test_one_that_ends_is_kept_until_it_is_stopped(folder: Path) -> None:
    async with backend(folder) as (one, _):
        await start(one, "prefill-0")
        member = await until(one, "prefill-0", MemberState.ENDED)
        assert member.reason == "ended with exit code 7 while starting"
        assert member.last_lines[-1] == "the last words"
        assert len(member.last_lines) <= 20
        await one.stop("prefill-0", 1.0)
        assert one.members() == []


async def test_less_grace_may_be_given_meanwhile(folder: Path) -> None:
    async with backend(folder) as (one, _):
        await start(one, "both-0")
        await until(one, "both-0", MemberState.SERVING)
        slowly = asyncio.create_task(one.stop("both-0", 3600))
        await asyncio.sleep(0.05)
        await one.stop("both-0", 0.0)
        await slowly


async def test_members_outlive_a_backend_that_is_closed(folder: Path) -> None:
    async with backend(folder) as (one, _):
        for name in ("decode-0", "decode-1"):
            await start(one, name, revision=name)
            await until(one, name, MemberState.SERVING)
        await one.assign("decode-1", "prefill")
    pids = {name: pid_of(folder, name) for name in ("decode-0", "decode-1")}
    with goes_on(pids["decode-0"]), goes_on(pids["decode-1"]):
        async with backend(folder) as (other, display):
            assert {one.name: (one.role, one.revision, one.state, one.url) for one in other.members()} == {
                "decode-0": ("decode", "decode-0", MemberState.SERVING, "http://here:1"),
                "decode-1": ("prefill", "decode-1", MemberState.SERVING, "http://here:1"),
            }
            assert {name: pid_of(folder, name) for name in pids} == pids
            assert display.of("line") == []  # nobody is told again
    async with backend(folder) as (other, _):
        os.kill(pids["decode-0"], signal.SIGUSR1)  # aborts
        await until(other, "decode-0", MemberState.ENDED)
        await other.stop("decode-0", 1.0)
        await other.stop("decode-1", 10.0)
        assert other.members() == []
    for pid in pids.values():
        reaped(pid)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_one_that_was_just_started_or_found_can_be_stopped_at_once(folder: Path) -> None:
    async with backend(folder) as (one, _):
        await start(one, "decode-0")
        await one.stop("decode-0", 0.0)
        assert one.members() == []
        await start(one, "decode-1")
        await until(one, "decode-1", MemberState.SERVING)
    async with backend(folder) as (other, _):
        await other.stop("decode-1", 10.0)
        assert other.members() == []


class LateForkServer(ForkServer):
    """It still imports what instances need, and will not do."""

    def __init__(self) -> None:
        super().__init__(is_tied=True)
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def fork(self, *_: Any, **__: Any) -> None:
        self.asked.set()
        await self.answers.wait()


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_one_that_gets_its_process_just_now_is_gone_once_it_was_stopped(is_given_up: bool, folder: Path) -> None:
    settings = InstanceProcess(role="decode", engine=EngineConfig(model="m"))
    makes: dict[MemberRole, Make] = {"decode": lambda name: replace(talks(name), forks=True, settings=settings)}
    context = BackendContext(folder, lambda fleet: Programs(fleet, makes), RecordingDisplay(), outlives=False)
    server = LateForkServer()
    one = LocalBackend(context, fork_server=server)
    one.use(fleet_of(makes))
    async with asyncio.timeout(HANGS_S):
        await one.open()
        starting = asyncio.create_task(start(one, "decode-0"))
        await server.asked.wait()
        stopping = asyncio.create_task(one.stop("decode-0", 10.0))
        await asyncio.sleep(0.05)
        assert [member.name for member in one.members()] == ["decode-0"]
        assert not stopping.done(), "who asks for it again and again would be told each time that it is done"
        if is_given_up:
            starting.cancel()
        else:
            server.answers.set()
        await stopping
        assert one.members() == []
        with suppress(asyncio.CancelledError):
            await starting
        assert one.members() == []
        await one.close()


async def test_members_that_do_not_outlive_it_are_ended(folder: Path) -> None:
    async with backend(folder, outlives=False) as (one, _):
        await start(one, "both-0")
        await until(one, "both-0", MemberState.SERVING)
        pid = pid_of(folder, "both-0")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_numbers_are_not_given_twice_after_another_has_taken_over(folder: Path) -> None:
    async with backend(folder) as (one, _):
        for name in ("decode-0", "decode-1"):
            await start(one, name)
        await until(one, "decode-1", MemberState.SERVING)
        await one.stop("decode-0", 10.0)
    async with backend(folder) as (other, _):
        await start(other, "decode-7")
        numbers = {path.name: MemberFolder(path).record() for path in (folder / "members").iterdir()}
        assert {name: about and about.number for name, about in numbers.items()} == {"decode-1": 1, "decode-7": 0}


CONTROL = """
import asyncio, sys
from pathlib import Path
from fleet.backends.local.test_backend import backend, start, until
from kvferry.fleet.control.backend import MemberState
async def main():
    async with backend(Path(sys.argv[1])) as (one, _):
        for name in ("decode-0", "decode-1", "decode-2"):
            await start(one, name)
            await until(one, name, MemberState.SERVING)
        print("up", flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""


@contextmanager
def another_controller(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """As a process of its own, with three members that serve."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)])}
    command = [sys.executable, "-c", CONTROL, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"up\n"
            yield process
        finally:
            process.kill()


async def test_members_outlive_a_controller_that_is_killed(folder: Path) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # in a container, there may be nobody else who reaps orphans
    with another_controller(folder) as process:
        pids = {name: pid_of(folder, name) for name in ("decode-0", "decode-1", "decode-2")}
        process.kill()
        process.wait()
    with goes_on(pids["decode-0"]), goes_on(pids["decode-2"]):
        lost = os.pidfd_open(pids["decode-1"])
        os.kill(pids["decode-1"], signal.SIGKILL)
        assert select.select([lost], [], [], HANGS_S)[0]
        os.close(lost)
        reaped(pids["decode-1"])
        async with backend(folder) as (other, _):
            states = {one.name: one.state for one in other.members()}
            assert states == {
                "decode-0": MemberState.SERVING,
                "decode-1": MemberState.ENDED,
                "decode-2": MemberState.SERVING,
            }
            assert named(other, "decode-1").reason == "ended while no controller was there"
            await other.stop("decode-1", 0.0)
            await start(other, "decode-1")
            await until(other, "decode-1", MemberState.SERVING)
            await other.stop("decode-1", 10.0)
    async with backend(folder) as (other, _):
        descriptors = [os.pidfd_open(pids[name]) for name in ("decode-0", "decode-2")]
        for name in ("decode-0", "decode-2"):
            await other.stop(name, 10.0)
        assert other.members() == []
        for descriptor in descriptors:
            assert select.select([descriptor], [], [], HANGS_S)[0]
            os.close(descriptor)


Forge = Callable[[Path, int], None]


def another_start(path: Path, pid: int) -> None:
    """The number is another process's now."""
    path.write_text(f"{pid} {started_at(pid) - 1}\n")


def nothing(path: Path, pid: int) -> None:
    path.unlink(missing_ok=True)


def torn(path: Path, pid: int) -> None:
    path.write_text(f"{pid}")


@pytest.mark.parametrize("forge", [another_start, nothing, torn])
async def test_another_process_is_never_taken_for_a_member_nor_signalled(folder: Path, forge: Forge) -> None:
    async with backend(folder) as (one, _):
        await start(one, "decode-0")
        await until(one, "decode-0", MemberState.SERVING)
        await one.stop("decode-0", 10.0)
        await start(one, "decode-0")
        await until(one, "decode-0", MemberState.SERVING)
        ours = pid_of(folder, "decode-0")
    with somebody_elses() as stranger:
        os.kill(ours, signal.SIGKILL)
        reaped(ours)
        forge(folder / "members" / "decode-0" / "process", stranger.pid)
        async with backend(folder, written_s=0.1) as (other, _):
            assert named(other, "decode-0").state is MemberState.ENDED
            await other.stop("decode-0", 0.0)
            assert other.members() == []
        assert stranger.poll() is None


async def test_folders_that_are_no_members_are_removed(folder: Path) -> None:
    (folder / "members" / "empty").mkdir(parents=True)
    (folder / "members" / "torn").mkdir()
    (folder / "members" / "torn" / "about").write_text("{")
    async with backend(folder) as (one, _):
        assert one.members() == []
        assert list((folder / "members").iterdir()) == []


async def test_a_process_that_says_late_who_it_is_is_found(folder: Path) -> None:
    """Its controller died while it started."""
    async with backend(folder) as (one, _):
        await start(one, "decode-0")
        await until(one, "decode-0", MemberState.SERVING)
    process = folder / "members" / "decode-0" / "process"
    text = process.read_text()
    process.unlink()
    asyncio.get_running_loop().call_later(0.3, process.write_text, text)
    async with backend(folder) as (other, _):
        assert named(other, "decode-0").state is MemberState.SERVING
        await other.stop("decode-0", 10.0)


async def test_one_that_became_ready_while_nobody_looked_serves(folder: Path) -> None:
    told = folder / "told"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(told)!r}).exists():\n    time.sleep(0.01)\n"
    makes: Any = {**MAKES, "decode": lambda name: child(name, waits + GOOD, "D", "http://d:1")}
    async with backend(folder, makes=makes) as (one, _):
        await start(one, "decode-0")
        await eventually((folder / "members" / "decode-0" / "process").exists)
        assert named(one, "decode-0").state is MemberState.STARTING
    told.touch()
    await eventually(lambda: b"InstanceReady" in (folder / "members" / "decode-0" / "messages").read_bytes())
    async with backend(folder, makes=makes) as (other, _):
        assert (await until(other, "decode-0", MemberState.SERVING)).url == "http://d:1"
        await other.stop("decode-0", 10.0)


async def test_what_cannot_be_started_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async with backend(folder) as (one, _):
        monkeypatch.setattr("kvferry.fleet.backends.local.starting.spawn", no_room)
        with pytest.raises(NotStarted, match="cannot start a process: Resource temporarily unavailable"):
            await start(one, "decode-0")
        assert one.members() == []
        assert list((folder / "members").iterdir()) == []


# The routers' address.


async def test_the_next_backend_has_the_same_address_as_long_as_a_router_is_there(folder: Path) -> None:
    addresses = [("127.0.0.1", 0)]
    async with backend(folder, addresses=addresses) as (one, _):
        await start(one, "router-0")
        await until(one, "router-0", MemberState.SERVING)
        port = (folder / "ports").read_text()
        ((_, asked, bound),) = json.loads(port)
        assert asked == 0
        assert bound
    async with backend(folder, addresses=addresses) as (other, _):
        assert (folder / "ports").read_text() == port
        await other.stop("router-0", 10.0)


@pytest.mark.parametrize("said", ["", "nonsense", "{}"])
async def test_an_address_of_which_nothing_is_said_any_more_is_taken_beside_the_routers_that_have_it(
    folder: Path, said: str
) -> None:
    with reserve("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    async with backend(folder, addresses=[("127.0.0.1", port)]) as (one, _):
        await start(one, "router-0")
        await until(one, "router-0", MemberState.SERVING)
        kept = one._listeners[0].dup()  # as the router has it
    (folder / "ports").write_text(said)
    with kept:
        async with backend(folder, addresses=[("127.0.0.1", port)]) as (other, _):
            assert json.loads((folder / "ports").read_text()) == [["127.0.0.1", port, port]]
            await other.stop("router-0", 10.0)


async def test_routers_that_are_started_after_a_change_of_the_address_have_the_new_one(folder: Path) -> None:
    addresses = [("127.0.0.1", 0)]
    async with backend(folder, addresses=addresses) as (one, _):
        first = json.loads((folder / "ports").read_text())[0][2]
        with reserve("127.0.0.1", 0) as taken:
            taken.listen(BACKLOG)
            addresses[:] = [taken.getsockname()[:2]]
            with pytest.raises(ConfigError, match="cannot listen on"):
                one.use(one.recipe.fleet)
            assert json.loads((folder / "ports").read_text())[0][2] == first
        addresses[:] = [*addresses, ("127.0.0.1", 0)]  # for operators, say
        one.use(one.recipe.fleet)
        moved = json.loads((folder / "ports").read_text())
        assert [asked for _, asked, _ in moved] == [addresses[0][1], 0]
        assert moved[1][2] == first  # what stays is kept
        del addresses[1]
        one.use(one.recipe.fleet)
        reserve("127.0.0.1", first).close()  # nobody has it any more


# Folders that somebody has touched.


async def test_a_member_of_which_nothing_can_be_read_is_ended(folder: Path) -> None:
    async with backend(folder) as (one, _):
        await start(one, "decode-0")
        await until(one, "decode-0", MemberState.SERVING)
        pid = pid_of(folder, "decode-0")
    (folder / "members" / "decode-0" / "about").write_text("{")
    descriptor = os.pidfd_open(pid)
    async with backend(folder) as (other, _):
        assert other.members() == []
        assert list((folder / "members").iterdir()) == []
        assert select.select([descriptor], [], [], HANGS_S)[0]
    os.close(descriptor)


async def test_what_is_no_folder_is_removed_and_what_it_points_to_stays(folder: Path, tmp_path: Path) -> None:
    (folder / "members").mkdir()
    (folder / "members" / "file").touch()
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "here").touch()
    (folder / "members" / "link").symlink_to(kept)
    async with backend(folder) as (one, _):
        assert one.members() == []
    assert list((folder / "members").iterdir()) == []
    assert (kept / "here").exists()


async def test_a_folder_that_somebody_removes_is_made_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems remove what a user has in memory when he logs out."""
    monkeypatch.setattr("kvferry.fleet.backends.local.member.LocalMember.keep_interval_s", 0.1)
    async with backend(folder) as (one, _):
        await start(one, "decode-0")
        await until(one, "decode-0", MemberState.SERVING)
        pid = pid_of(folder, "decode-0")
        shutil.rmtree(folder / "members")
        shutil.rmtree(folder / "routers")
        await one.assign("decode-0", "prefill")
        await eventually(lambda: MemberFolder(folder / "members" / "decode-0").pid() == pid)
        await start(one, "router-0")
        await until(one, "router-0", MemberState.SERVING)
        await one.stop("router-0", 10.0)
    async with backend(folder) as (other, _):
        member = named(other, "decode-0")
        assert (member.state, member.role, member.url) == (MemberState.SERVING, "prefill", "http://here:1")
        await other.stop("decode-0", 10.0)


def test_a_reserved_port_is_refused_to_others_and_given_beside() -> None:
    with reserve("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with reserve("127.0.0.1", port, beside=True) as second:
            assert second.getsockname()[1] == port
            first.listen(BACKLOG)
            second.listen(BACKLOG)
        with pytest.raises(Exception, match="cannot listen on"):
            reserve("127.0.0.1", port)
