"""A fleet in the foreground with real children: it starts them, tells of them, and leaves none behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from fleet.children import (
    CRASHING,
    CRASHING_WHEN_TOLD,
    GOOD,
    PARENT,
    SHOWING,
    SLOW,
    STUBBORN,
    WRONG,
    child,
)
from fleet.fleets import NO_RESTARTS, SECRET, attended, run, up
from fleet.processes.test_external_servers import foreign
from fleet.recording import RecordingDisplay
from kvferry.core.errors import ConfigError
from kvferry.fleet import places
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.leftovers import remove_leftovers
from kvferry.fleet.places import running_folder
from kvferry.fleet.processes.process import ProcessSpec
from kvferry.fleet.processes.start_time import started_at
from kvferry.fleet.spec.fleet_spec import FailureSpec
from kvferry.http.registrar import Registrar, make_registrar
from support.waiting import eventually

pytestmark = pytest.mark.usefixtures("leaves_nobody")

TESTS = Path(__file__).parents[1]


def good_prefill(name: str) -> ProcessSpec:
    return child(name, GOOD, "P", "http://p:1")


def good_decode(name: str) -> ProcessSpec:
    return child(name, GOOD, "D", "http://d:1")


def good_router(name: str) -> ProcessSpec:
    return child(name, GOOD, "R", "http://r:1")


def crashes_when_told(name: str) -> ProcessSpec:
    return child(name, CRASHING_WHEN_TOLD)


def stubborn(name: str) -> ProcessSpec:
    return child(name, STUBBORN)


async def end_by(number: int, task: asyncio.Task[int]) -> int:
    """Send this process, in which the fleet listens, a signal."""
    os.kill(os.getpid(), number)
    return await task


@pytest.fixture(autouse=True)
def hang_up_is_heard() -> Iterator[None]:
    """Also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_starts_everything_at_once_and_ends_the_router_first(number: int) -> None:
    display = RecordingDisplay()
    task = await up(display, {"prefill": good_prefill, "decode": good_decode, "router": good_router})
    await display.until(lambda seen: ["decode-0", "a line of D"] in seen.of("line"))
    assert await end_by(number, task) == 0
    assert sorted(name for names in display.of("starting") for name in names) == ["decode-0", "prefill-0", "router-0"]
    began = [kind for kind, *_ in display.told if kind in ("starting", "ready")]
    assert began == ["starting"] * 3 + ["ready"] * 3
    assert ["prefill-0", "loading", "0.5"] in display.of("progress")
    assert display.of("up") == [["http://r:1"]]
    assert [sorted(urls) for urls in display.of("members")] == [["decode-0 http://d:1", "prefill-0 http://p:1"]]
    ended = [name for name, text in display.of("line") if text == "told to end"]
    assert ended[0] == "router-0"
    assert sorted(ended[1:]) == ["decode-0", "prefill-0"]
    assert display.told[-1] == ("close",)


async def test_without_a_router_an_instance_is_the_address() -> None:
    display = RecordingDisplay()
    task = await up(display, {"both": good_decode})
    assert display.of("up") == [["http://d:1"]]
    assert display.of("members") == []
    assert await end_by(signal.SIGTERM, task) == 0


async def test_a_crash_while_starting_is_told_with_its_last_lines_and_ends_all() -> None:
    display = RecordingDisplay()
    code = await run(display, {"prefill": good_prefill, "decode": lambda name: child(name, CRASHING)})
    assert code == 1
    notes = [text for (text,) in display.of("note")]
    assert notes[0] == "error: decode-0 ended with exit code 7 while starting; its last lines:"
    assert notes[-1].strip() == "the last words"
    assert "line 29" in notes[-2]
    assert display.of("up") == []
    assert display.told[-1] == ("close",)


async def test_a_router_that_ends_before_all_is_up_ends_all() -> None:
    display = RecordingDisplay()
    makes = {"both": good_decode, "router": lambda name: child(name, CRASHING)}
    assert await run(display, makes) == 1
    assert display.of("note")[0] == ["error: router-0 ended with exit code 7 while starting; its last lines:"]


async def test_a_crash_while_running_ends_all_where_nothing_is_started_again() -> None:
    display = RecordingDisplay()
    task = await up(display, {"prefill": good_prefill, "decode": crashes_when_told}, NO_RESTARTS)
    await display.until(lambda seen: bool(_numbers(seen, "pid")))
    os.kill(_numbers(display, "pid")[0], signal.SIGUSR1)
    assert await task == 1
    told = next(text for (text,) in display.of("note") if text.startswith("error: "))
    assert told.startswith("error: decode-0 was killed by SIGABRT while running; ")
    assert told.endswith("; its last lines:")
    assert any(text.startswith("  pid ") for (text,) in display.of("note"))
    assert ["prefill-0", "told to end"] in display.of("line")


async def test_a_child_that_was_told_something_wrong_ends_the_fleet_as_a_user_error() -> None:
    display = RecordingDisplay()
    assert await run(display, {"both": lambda name: child(name, WRONG)}) == 2
    assert display.of("note") == [["error: both-0: the model is not there; name another"]]


async def test_what_cannot_be_made_into_a_process_ends_the_fleet() -> None:
    def wrong(name: str) -> ProcessSpec:
        raise ConfigError("there is no such thing")

    display = RecordingDisplay()
    assert await run(display, {"prefill": good_prefill, "decode": wrong}) != 0
    assert display.of("note")[0] == ["error: decode-0: there is no such thing"]


async def test_ending_while_starting() -> None:
    display = RecordingDisplay()
    task = asyncio.create_task(run(display, {"both": lambda name: child(name, SLOW)}))
    await display.until(lambda seen: bool(seen.of("progress")))
    assert await end_by(signal.SIGINT, task) == 0
    assert ["SIGINT: stopping everything"] in display.of("note")


async def test_ending_by_a_call_even_before_it_begins() -> None:
    display = RecordingDisplay()
    fleet = attended(display, {"both": good_decode})
    fleet.stop()
    assert await fleet.run() == 0
    assert display.of("up") == []
    display = RecordingDisplay()
    fleet = attended(display, {"both": good_decode})
    task = asyncio.create_task(fleet.run())
    await display.until(lambda seen: bool(seen.of("up")))
    fleet.stop()
    assert await task == 0


async def test_who_does_not_end_is_killed_when_the_grace_is_over() -> None:
    display = RecordingDisplay()
    task = await up(display, {"both": stubborn}, grace_s=0.2, end_margin_s=0.0)
    assert await end_by(signal.SIGINT, task) == 0
    assert ["both-0", "no"] in display.of("line")
    assert display.of("note") == [
        ["SIGINT: stopping everything once running answers end; Ctrl-C again ends everything now"],
        ["waiting for both-0"],
        ["killing both-0: not ended within 0.2 s"],
    ]


async def test_a_second_ctrl_c_kills_at_once() -> None:
    display = RecordingDisplay()
    task = await up(display, {"both": stubborn}, grace_s=3600)
    os.kill(os.getpid(), signal.SIGINT)
    await display.until(lambda seen: ["waiting for both-0"] in seen.of("note"))
    assert await end_by(signal.SIGINT, task) == 130


async def test_nor_does_a_second_ctrl_c_wait_for_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[float] = []

    async def leave(registrar: Registrar, timeout_s: float) -> bool:
        left.append(timeout_s)
        await asyncio.sleep(timeout_s)
        return False

    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", SECRET)
    monkeypatch.setattr(Registrar, "leave", leave)
    registrar = make_registrar(("http://127.0.0.1:9",), "decode", host="127.0.0.1")
    display = RecordingDisplay()
    task = await up(display, {"both": lambda name: replace(foreign(), registrar=registrar)}, grace_s=3600)
    os.kill(os.getpid(), signal.SIGINT)
    await eventually(lambda: left)
    assert left[0] >= 3600
    async with asyncio.timeout(60):
        assert await end_by(signal.SIGINT, task) == 130


async def test_what_a_child_leaves_behind_is_ended_too() -> None:
    display = RecordingDisplay()
    task = await up(display, {"both": lambda name: child(name, PARENT)})
    await display.until(lambda seen: bool(_numbers(seen, "grandchild")))
    (grandchild,) = _numbers(display, "grandchild")
    with ended(grandchild):
        assert await end_by(signal.SIGTERM, task) == 0


async def test_cancelling_leaves_no_process() -> None:
    display = RecordingDisplay()
    task = asyncio.create_task(run(display, {"both": crashes_when_told}))
    await display.until(lambda seen: bool(_numbers(seen, "pid")))
    with ended(_numbers(display, "pid")[0]):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_display_that_fails_leaves_no_process() -> None:
    class Unable(RecordingDisplay):
        def up(self, url: str) -> None:
            raise ValueError(url)

    display = Unable()
    task = asyncio.create_task(run(display, {"both": crashes_when_told}))
    await display.until(lambda seen: bool(seen.of("ready")))
    with pytest.raises(ExceptionGroup):
        await task
    await display.until(lambda seen: seen.told[-1] == ("close",))
    for pid in _numbers(display, "pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_what_children_find_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_HIDDEN", "1")
    core = min(os.sched_getaffinity(0))
    environment = {"KVFERRY_AUTH_TOKEN": "secret", "OMP_NUM_THREADS": "1"}

    def showing(name: str) -> ProcessSpec:
        return child(name, SHOWING, environment=environment, hidden=frozenset({"KVFERRY_HIDDEN"}))

    display = RecordingDisplay()
    task = await up(display, {"both": showing}, cores=(core,))
    await display.until(lambda seen: bool(seen.of("line")))
    found = json.loads(display.of("line")[0][1])
    assert found == {
        "cores": [core],
        "threads": "1",
        "token": "secret",
        "hidden": None,
        "leads_session": True,
        "stdin": "",
    }
    await end_by(signal.SIGTERM, task)


async def test_a_fleet_goes_on_with_the_instances_that_can_answer() -> None:
    """One of two that crashes for ever is given up; the other serves."""
    display = RecordingDisplay()

    def one_of_two(name: str) -> ProcessSpec:
        return crashes_when_told(name) if name == "decode-0" else good_decode(name)

    task = await up(display, {"decode": one_of_two}, FailureSpec(crash_loop=1, hang="0s"), decode=2)
    await display.until(lambda seen: bool(_numbers(seen, "pid")))
    (pid,) = _numbers(display, "pid")
    with ended(pid):
        os.kill(pid, signal.SIGUSR1)
    done, _ = await asyncio.wait([task], timeout=1.0)
    assert not done
    assert await end_by(signal.SIGTERM, task) == 0
    assert ["decode-1", "told to end"] in display.of("line")


# As a process of its own.

SUPERVISE = """
import asyncio, sys
from fleet.fleets import run
from fleet.test_attended import crashes_when_told, stubborn
from kvferry.fleet.display import PlainDisplay
makes = {"prefill": crashes_when_told, "decode": stubborn}
sys.exit(asyncio.run(run(PlainDisplay(), makes, grace_s=0.2, end_margin_s=0.0)))
"""


@contextmanager
def fleet_process() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A fleet of two, once it is up, and the process id of the first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS)])}
    command = [sys.executable, "-c", SUPERVISE]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            pid = int(_read_until(process.stderr, r"\[prefill-0\] pid (\d+)"))
            assert _read_until(process.stdout, r"kvferry is up: (\S+)") == "http://here:1"
            yield process, pid
        finally:
            process.kill()


def _read_until(stream: IO[str], pattern: str) -> str:
    for line in stream:
        found = re.search(pattern, line)
        if found:
            return found[1]
    raise AssertionError(f"the fleet ended without saying {pattern}")


def test_ctrl_c_ends_everything() -> None:
    with fleet_process() as (process, pid), ended(pid):
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0


def test_children_die_with_a_controller_that_is_killed() -> None:
    with fleet_process() as (process, pid), ended(pid):
        process.kill()
        assert process.wait(timeout=30) == -signal.SIGKILL


@contextmanager
def ended(pid: int) -> Iterator[None]:
    """The process must be gone soon after the block; waits on the process itself, which need not be our child."""
    descriptor = os.pidfd_open(pid)
    try:
        yield
        readable, _, _ = select.select([descriptor], [], [], 30)
        assert readable, f"process {pid} is still there"
    finally:
        os.close(descriptor)


def _numbers(display: RecordingDisplay, word: str) -> list[int]:
    lines = (text.split() for _, text in display.of("line"))
    return [int(words[1]) for words in lines if words[:1] == [word]]


def test_what_was_left_by_those_that_were_killed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what somebody else has made, is serving from, or has just begun; nor a fleet's that goes on without its
    controller."""
    names = ("kvferry-killed", "kvferry-serving", "kvferry-new", "other-killed")
    for name in names:
        lease = Ledger(tmp_path / name / "ledger").try_acquire()
        assert lease is not None
        if name == "kvferry-serving":
            serving = lease
        else:
            lease.close()
    (tmp_path / "kvferry-else").mkdir()
    monkeypatch.setattr(places, "memory_folder", lambda: str(tmp_path))
    over, alone, led = (running_folder(Ledger(tmp_path / f"ledger-{name}")) for name in ("over", "alone", "led"))
    lease = Ledger(tmp_path / "ledger-led").try_acquire()
    assert lease is not None
    member = alone / "members" / "decode-0"
    for folder in (over, alone, led):
        (folder / "members" / "decode-0").mkdir(parents=True)
    with (member / "log").open("wb") as log:
        process = subprocess.Popen(["sleep", "600"], stdout=log)
    for folder, started in ((over, 1), (alone, started_at(process.pid)), (led, 1)):
        (folder / "members" / "decode-0" / "process").write_text(f"{process.pid} {started}\n")
        os.utime(folder / "members", (0, 0))
    for one in [*tmp_path.iterdir(), *tmp_path.glob("*/ledger")]:
        if "kvferry-new" not in str(one):
            os.utime(one, (0, 0))
    remove_leftovers(tmp_path)
    left = {"kvferry-serving", "kvferry-new", "other-killed", "kvferry-else", alone.name, led.name, "ledger-led"}
    try:
        assert {one.name for one in tmp_path.iterdir()} - {f"ledger-{name}" for name in ("over", "alone")} == left
    finally:
        process.kill()
        process.wait()
    serving.close()
    lease.close()
