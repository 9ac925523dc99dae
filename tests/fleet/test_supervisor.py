"""The supervisor with real children: it starts them, tells of them, and leaves none behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from fleet.recording import RecordingDisplay
from kvferry.fleet.process import ProcessSpec
from kvferry.fleet.ready import InstanceReady
from kvferry.fleet.restart import RestartPolicy
from kvferry.fleet.supervisor import FleetPlan, LocalSupervisor, RouterGroup

TESTS = Path(__file__).parents[1]


async def run(plan: FleetPlan, display: RecordingDisplay, grace_s: float = 10.0) -> int:
    return await LocalSupervisor(display, grace_s).run(plan)


class OneRouter:
    """Says the instances' addresses for its own."""

    addresses = (("127.0.0.1", 0),)

    def processes(self, ready: Mapping[str, InstanceReady], group: RouterGroup) -> list[ProcessSpec]:
        return [child("router", GOOD, "router", ",".join(about.url for about in ready.values()))]


def two(front: bool = True) -> FleetPlan:
    instances = (child("prefill-0", GOOD, "P", "http://p:1"), child("decode-0", GOOD, "D", "http://d:1"))
    return FleetPlan(instances, OneRouter() if front else None)


async def end_by(number: int, task: asyncio.Task[int]) -> int:
    """Send this process, in which the supervisor listens, a signal."""
    os.kill(os.getpid(), number)
    return await task


@pytest.fixture(autouse=True)
def hang_up_is_heard() -> Iterator[None]:
    """Also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_starts_instances_then_the_router_and_ends_the_router_first(number: int) -> None:
    display = RecordingDisplay()
    task = asyncio.create_task(run(two(), display))
    await display.until(lambda seen: bool(seen.of("up")))
    assert await end_by(number, task) == 0
    assert display.of("starting") == [["prefill-0", "decode-0"], ["router"]]
    assert ["prefill-0", "loading", "0.5"] in display.of("progress")
    assert ["decode-0", "a line of D"] in display.of("line")
    assert display.of("up") == [["http://p:1,http://d:1"]]
    assert display.of("members") == [["prefill-0 http://p:1", "decode-0 http://d:1"]]
    ended = [name for name, text in display.of("line") if text == "told to end"]
    assert ended[0] == "router"
    assert sorted(ended[1:]) == ["decode-0", "prefill-0"]
    assert display.told[-1] == ("close",)


async def test_without_a_router_the_first_instance_is_the_address() -> None:
    display = RecordingDisplay()
    task = asyncio.create_task(run(two(front=False), display))
    await display.until(lambda seen: bool(seen.of("up")))
    assert display.of("up") == [["http://p:1"]]
    assert await end_by(signal.SIGTERM, task) == 0


async def test_a_crash_while_starting_is_told_with_its_last_lines_and_ends_all() -> None:
    display = RecordingDisplay()
    plan = FleetPlan((child("prefill-0", GOOD, "P", "http://p:1"), child("decode-0", CRASHING)))
    assert await run(plan, display) == 1
    notes = [text for (text,) in display.of("note")]
    assert notes[0] == "error: decode-0 ended with exit code 7 while starting; its last lines:"
    assert notes[-1].strip() == "the last words"
    assert "line 29" in notes[-2]
    assert display.of("up") == []


async def test_a_crash_while_running_ends_all_where_nothing_is_started_again() -> None:
    display = RecordingDisplay()
    plan = FleetPlan((child("prefill-0", GOOD, "P", "http://p:1"), child("decode-0", CRASHING_WHEN_TOLD)))
    task = asyncio.create_task(LocalSupervisor(display, policy=RestartPolicy(max_restarts=0)).run(plan))
    await display.until(lambda seen: bool(seen.of("up")) and bool(_numbers(seen, "pid")))
    os.kill(_numbers(display, "pid")[0], signal.SIGUSR1)
    assert await task == 1
    notes = [text for (text,) in display.of("note")]
    assert notes[0] == "error: decode-0 was killed by SIGABRT while running; its last lines:"
    assert ["prefill-0", "told to end"] in display.of("line")


async def test_a_child_that_was_told_something_wrong_ends_the_fleet_as_a_user_error() -> None:
    display = RecordingDisplay()
    assert await run(FleetPlan((child("prefill-0", WRONG),)), display) == 2
    assert display.of("note") == [["error: prefill-0: the model is not there; name another"]]


async def test_ending_while_starting() -> None:
    display = RecordingDisplay()
    task = asyncio.create_task(run(FleetPlan((child("prefill-0", SLOW),)), display))
    await display.until(lambda seen: bool(seen.of("progress")))
    assert await end_by(signal.SIGINT, task) == 0


async def test_who_does_not_end_is_killed_when_the_grace_is_over() -> None:
    display = RecordingDisplay()
    task = asyncio.create_task(run(FleetPlan((child("prefill-0", STUBBORN),)), display, grace_s=0.2))
    await display.until(lambda seen: bool(seen.of("up")))
    assert await end_by(signal.SIGINT, task) == 0
    assert ["prefill-0", "no"] in display.of("line")
    assert display.of("note") == [
        ["SIGINT: stopping everything once running answers have ended; Ctrl-C again ends everything now"],
        ["waiting for prefill-0"],
        ["killing prefill-0: not ended within 0.2 s"],
    ]


async def test_a_second_ctrl_c_kills_at_once() -> None:
    display = RecordingDisplay()
    task = asyncio.create_task(run(FleetPlan((child("prefill-0", STUBBORN),)), display, grace_s=3600))
    await display.until(lambda seen: bool(seen.of("up")))
    os.kill(os.getpid(), signal.SIGINT)
    await display.until(lambda seen: ["waiting for prefill-0"] in seen.of("note"))
    assert await end_by(signal.SIGINT, task) == 130


async def test_nor_does_a_second_ctrl_c_wait_for_a_router() -> None:
    class Draining:
        left: list[float] = []  # noqa: RUF012

        async def leave(self, within_s: float) -> bool:
            self.left.append(within_s)
            await asyncio.sleep(within_s)
            return False

    display, draining = RecordingDisplay(), Draining()
    supervisor = LocalSupervisor(display, 3600)
    task = asyncio.create_task(supervisor.run(FleetPlan((child("prefill-0", STUBBORN),))))
    await display.until(lambda seen: bool(seen.of("up")))
    supervisor._registrars.append((draining, asyncio.create_task(asyncio.sleep(0))))  # type: ignore[arg-type]
    os.kill(os.getpid(), signal.SIGINT)
    while not draining.left:
        await asyncio.sleep(0)
    assert await end_by(signal.SIGINT, task) == 130
    assert draining.left == [3600, 0]


async def test_what_a_child_leaves_behind_is_ended_too() -> None:
    display = RecordingDisplay()
    task = asyncio.create_task(run(FleetPlan((child("prefill-0", PARENT),)), display))
    await display.until(lambda seen: bool(seen.of("up")) and bool(_numbers(seen, "grandchild")))
    (grandchild,) = _numbers(display, "grandchild")
    with ended(grandchild):
        assert await end_by(signal.SIGTERM, task) == 0


async def test_cancelling_leaves_no_process() -> None:
    display = RecordingDisplay()
    task = asyncio.create_task(run(FleetPlan((child("prefill-0", CRASHING_WHEN_TOLD),)), display))
    await display.until(lambda seen: bool(_numbers(seen, "pid")))
    with ended(_numbers(display, "pid")[0]):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_display_that_fails_leaves_no_process() -> None:
    class Failing(RecordingDisplay):
        def up(self, url: str) -> None:
            raise ValueError(url)

    display = Failing()
    with pytest.raises(ExceptionGroup):
        await run(FleetPlan((child("prefill-0", GOOD, "P", "http://p:1"),)), display)


async def test_what_children_find_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_HIDDEN", "1")
    core = min(os.sched_getaffinity(0))
    environment = {"KVFERRY_AUTH_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
    spec = child("prefill-0", SHOWING, environment=environment, hidden=frozenset({"KVFERRY_HIDDEN"}), cores=(core,))
    display = RecordingDisplay()
    task = asyncio.create_task(run(FleetPlan((spec,)), display))
    await display.until(lambda seen: bool(seen.of("up")) and bool(seen.of("line")))
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


# The supervisor as a process of its own.

SUPERVISE = """
import asyncio, sys
from fleet.children import GOOD, STUBBORN, CRASHING_WHEN_TOLD, child
from kvferry.fleet.display import PlainDisplay
from kvferry.fleet.supervisor import FleetPlan, LocalSupervisor, RouterGroup
plan = FleetPlan((child("prefill-0", CRASHING_WHEN_TOLD), child("decode-0", STUBBORN)))
sys.exit(asyncio.run(LocalSupervisor(PlainDisplay(), grace_s=0.2).run(plan)))
"""


@contextmanager
def supervisor_process() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A supervisor with two children, once it is up, and the process id of the first."""
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
    raise AssertionError(f"the supervisor ended without saying {pattern}")


def test_ctrl_c_ends_everything() -> None:
    with supervisor_process() as (process, pid), ended(pid):
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0


def test_children_die_with_a_supervisor_that_is_killed() -> None:
    with supervisor_process() as (process, pid), ended(pid):
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
