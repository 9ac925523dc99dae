"""Programs of somebody else's: known to serve by their health, told by their log, ended with all their children."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from fleet.fleets import NO_RESTARTS, run, up
from fleet.recording import RecordingDisplay
from kvferry.fleet.backends.local.launcher import launch_command
from kvferry.fleet.processes.health_check import serves
from kvferry.fleet.processes.process import ExternalServer, ProcessSpec
from kvferry.fleet.processes.ready import StartProgress
from kvferry.fleet.processes.vllm.ports import free_ports

PROGRAM = """
import http.server, os, signal, subprocess, sys
stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", stubborn])
print("child", child.pid, flush=True)
print("half of it is loaded", flush=True)
asked = []
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        self.send_response(200 if len(asked) > 1 else 503)
        self.end_headers()
    def log_message(self, *args):
        pass
def end(*_):
    print("told to end", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR2, lambda *_: os.kill(os.getpid(), signal.SIGSEGV))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""Leaves a child behind when it ends."""

STEPS = ((re.compile("half of it"), StartProgress(0.5, "loading")),)


def foreign() -> ProcessSpec:
    (port,) = free_ports(1)
    command = (sys.executable, "-c", PROGRAM, str(port))
    return ProcessSpec("engine", command, foreign=ExternalServer(f"http://127.0.0.1:{port}", STEPS))


def child_of(display: RecordingDisplay) -> psutil.Process:
    (pid,) = (int(text.split()[1]) for _, text in display.of("line") if text.startswith("child "))
    return psutil.Process(pid)


def program_of(spec: ProcessSpec) -> psutil.Process:
    """The process itself; its guard is this one's child."""
    [found] = (
        one
        for guard in psutil.Process().children()
        for one in guard.children()
        if guard.status() != psutil.STATUS_ZOMBIE and one.cmdline() == list(spec.command)
    )
    return found


async def test_it_serves_when_its_health_says_so_and_leaves_nothing() -> None:
    display, spec = RecordingDisplay(), foreign()
    task = await up(display, {"both": lambda name: spec})
    assert spec.foreign is not None
    assert display.of("up") == [[spec.foreign.url]]
    assert display.of("progress") == [["both-0", "loading", "0.5"]]
    left = child_of(display)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0
    assert ["both-0", "told to end"] in display.of("line")
    assert psutil.wait_procs([left], timeout=10)[1] == []


async def test_a_crash_is_told_as_it_was() -> None:
    display = RecordingDisplay()
    spec = foreign()
    task = await up(display, {"both": lambda name: spec}, NO_RESTARTS)
    left = child_of(display)
    program_of(spec).send_signal(signal.SIGUSR2)
    assert await task == 1
    told = next(text for (text,) in display.of("note") if text.startswith("error: "))
    assert told.startswith("error: both-0 was killed by SIGSEGV while running; ")
    assert told.endswith("; its last lines:")
    assert psutil.wait_procs([left], timeout=10)[1] == []


async def test_one_that_ends_before_it_serves() -> None:
    spec = ProcessSpec(
        "engine", (sys.executable, "-c", "raise SystemExit(3)"), foreign=ExternalServer("http://127.0.0.1:9")
    )
    display = RecordingDisplay()
    assert await run(display, {"both": lambda name: spec}) == 1
    assert display.of("note")[0] == ["error: both-0 ended with exit code 3 while starting; its last lines:"]


BINDS = """
import os, signal, socket
path = os.environ["SOCKETS_IN"] + "/a-socket-with-a-name-as-long-as-a-uuid"
socket.socket(socket.AF_UNIX).bind(path)
print("socket", path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("is_named", [False, True])
async def test_sockets_of_a_start_that_is_cut_off_are_not_left(is_named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But in a folder that the user has named."""
    monkeypatch.delenv("SOCKETS_IN", raising=False)
    with TemporaryDirectory(prefix="s") as folder:  # short, as names of sockets have to be
        if is_named:
            monkeypatch.setenv("SOCKETS_IN", folder)
        await cut_off(Path(folder), is_named=is_named)


async def cut_off(folder: Path, *, is_named: bool) -> None:
    server = ExternalServer("http://127.0.0.1:9", sockets_in="SOCKETS_IN")
    spec = ProcessSpec("engine", (sys.executable, "-c", BINDS), foreign=server)
    display = RecordingDisplay()
    assert await run(display, {"both": lambda name: spec}) == 1
    (path,) = (Path(text.split()[1]) for _, text in display.of("line") if text.startswith("socket "))
    assert path.exists() is (path.parent == folder) is is_named


SUPERVISE = """
import asyncio
from fleet.fleets import run
from fleet.processes.test_external_servers import foreign
from kvferry.fleet.display import PlainDisplay
asyncio.run(run(PlainDisplay(), {"both": lambda name: foreign()}))
"""


def test_when_the_controller_is_killed_nothing_of_it_is_left() -> None:
    tests = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, tests])}
    command = [sys.executable, "-c", SUPERVISE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"kvferry is up")
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(started) == 3
        process.kill()
        assert psutil.wait_procs(started, timeout=20)[1] == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://nowhere.invalid:80"])
async def test_who_cannot_be_reached_does_not_serve(url: str) -> None:
    assert not await serves(url)


ENDS_AS_ITS_GUARD_IS_TOLD = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the guard may run earlier, where others keep this from running
guard = os.getppid()
os.sched_setscheduler(guard, os.SCHED_IDLE, os.sched_param(0))  # it is told, and runs when this has ended
os.kill(guard, signal.SIGTERM)
os._exit(3)
"""


def test_sigterm_meets_a_program_that_has_ended() -> None:
    core = min(os.sched_getaffinity(0))
    command = launch_command((sys.executable, "-I", "-S", "-c", ENDS_AS_ITS_GUARD_IS_TOLD), (core,), "group")
    for _ in range(10):
        done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=30, check=False)
        assert (done.returncode, done.stderr) == (3, "")
